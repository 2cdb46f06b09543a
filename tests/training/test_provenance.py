"""The commit that a number is stamped with is this package's own."""

import shutil
import subprocess
import sys
from pathlib import Path

import gptoss


def test_a_package_below_another_checkout_does_not_take_its_commit(tmp_path: Path) -> None:
    """As in a virtual environment inside somebody's repository."""
    site = tmp_path / "venv" / "site-packages"
    package = Path(gptoss.__file__).parent
    no_weights = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(package, site / "gptoss", ignore=no_weights)

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit() -> str:
        script = "from gptoss.training.provenance import current_commit; print(current_commit())"
        return subprocess.run(
            [sys.executable, "-c", script], cwd=site, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(site)},
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    assert commit() == "unknown"
    git("add", "venv/site-packages/gptoss/training/provenance.py")
    git("commit", "-q", "-m", "y")
    assert commit() != "unknown"  # kept with its files, it is
