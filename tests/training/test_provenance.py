"""The commit that a number is stamped with is this package's own, the machine is what the work used of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gptoss
from gptoss.bench.arm_results import write_result
from gptoss.training.distributed import World
from gptoss.training.journal import read_journal
from gptoss.training.plan import BatchPlan
from gptoss.training.provenance import machine
from gptoss.training.reporter import Reporter


@pytest.fixture
def eight_gpus(monkeypatch):
    """A host with eight GPUs, of which the work need not use any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")


@pytest.mark.usefixtures("eight_gpus")
def test_the_machine_is_as_many_gpus_as_the_work_used():
    assert machine() == "one NVIDIA H200"
    assert machine(gpus=2) == "2 x NVIDIA H200"
    assert machine(on_cpu=True, gpus=1).startswith("CPU, ")


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (World(torch.device("cpu")), "CPU, "),
        (World(torch.device("cuda", 5)), "one NVIDIA H200"),
        (World(torch.device("cuda", 0), rank=0, size=4), "4 x NVIDIA H200"),
    ],
)
def test_a_run_says_what_its_processes_trained_on(small_run, tmp_path, world, expected):
    (tmp_path / "run").mkdir()
    reporter = Reporter(small_run(), world, BatchPlan(2, 2, world.size, 32), 1, 0, 1, False)
    reporter.open()
    reporter.close()
    (start,) = read_journal(tmp_path / "run" / "metrics.jsonl")
    assert start["machine"].startswith(expected)


@pytest.mark.usefixtures("eight_gpus")
def test_an_arm_is_made_on_one_gpu(small_run, tmp_path):
    result = write_result(tmp_path / "arm.json", small_run(), [8], 1, {"rows": []}, "test")
    assert result["made"]["machine"] == "one NVIDIA H200"


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
