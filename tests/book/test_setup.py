"""`make` on a machine that lacks something: one line that says what to do, and nothing half-made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "dirname", "grep", "tail", "cut", "touch", "rm", "make", "uname")


@pytest.fixture
def machine(tmp_path):
    """A checkout, and a PATH that holds the shell's tools and nothing else."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def add(machine: Path, name: str, script: str) -> None:
    path = machine / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make(machine: Path, *arguments: str) -> str:
    """What `make book` says on stderr, without make's own line."""
    done = subprocess.run(
        ["make", "book", *arguments],
        cwd=machine,
        env={**os.environ, "PATH": str(machine / "bin")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert not (machine / ".venv" / "ready").exists()
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith("make"))


REAL_PYTHON = f'exec "{sys.executable}" "$@"'


def test_no_python(machine):
    assert make(machine).startswith("setup: Python 3.11 or newer is needed")


def test_an_old_python(machine):
    add(machine, "python3", "exit 1")
    assert make(machine).startswith("setup: Python 3.11 or newer is needed")


def test_a_python_without_venv(machine):
    add(machine, "python3", 'case "$2" in *ensurepip*) exit 1;; esac; ' + REAL_PYTHON)
    assert "apt install python3-venv" in make(machine)


def test_no_compiler(machine):
    add(machine, "python3", REAL_PYTHON)
    said = make(machine)
    assert said.startswith("setup: a C compiler is needed")
    assert said.count("\n") == 0


def test_an_unknown_torch(machine):
    assert (
        make(machine, "TORCH=gpu")
        == "setup: TORCH=gpu is not known: leave it out, or use TORCH=cpu"
    )


@pytest.mark.parametrize(
    ("pip_says", "answer"),
    [
        (
            "Failed to establish a new connection: NewConnectionError",
            "setup: no package index answers: check the network",
        ),
        ("ERROR: No space left on device", "setup: pip failed: ERROR: No space left on device"),
    ],
)
def test_pip_fails(machine, pip_says, answer):
    add(machine, "gcc", "exit 0")
    environment = machine / ".venv" / "bin"
    environment.mkdir(parents=True)
    add(machine, "python3", REAL_PYTHON)
    (environment / "python").write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) echo "{pip_says}"; exit 1;; esac\n'
    )
    (environment / "pip").write_text("#!/bin/sh\n")
    for name in ("python", "pip"):
        (environment / name).chmod(0o755)
    said = make(machine)
    assert said.startswith(answer)
    assert ".venv/setup.log" in said


@pytest.mark.parametrize(
    ("python", "pip"),
    [
        ("exit 1", "exit 0"),  # too old
        ("exit 0", None),  # made without pip
        ("exit 0", "#!/gone/.venv/bin/python"),  # made elsewhere, and moved here
    ],
)
def test_an_environment_that_cannot_be_used_is_made_anew(machine, python, pip):
    add(machine, "gcc", "exit 0")
    add(
        machine,
        "python3",
        'case "$*" in *"-m venv"*) echo "$*" >made; exit 1;; esac; ' + REAL_PYTHON,
    )
    environment = machine / ".venv" / "bin"
    environment.mkdir(parents=True)
    for name, script in (("python", python), ("pip", pip)):
        if script is not None:
            (environment / name).write_text(script if "#!" in script else f"#!/bin/sh\n{script}\n")
            (environment / name).chmod(0o755)
    assert make(machine).startswith("setup: could not create .venv here")
    assert (machine / "made").read_text() == "-m venv --clear .venv\n"


@pytest.mark.parametrize(("place", "sets_up"), [(None, False), ("/elsewhere", True)])
def test_a_moved_checkout_is_set_up_again(machine, place, sets_up):
    environment = machine / ".venv"
    environment.mkdir()
    (environment / "ready").write_text(f"{place or machine.resolve()}\n")
    done = subprocess.run(["make", "-n", "lint"], cwd=machine, capture_output=True, text=True)
    assert done.returncode == 0
    assert ("sh .ci/setup" in done.stdout) == sets_up
