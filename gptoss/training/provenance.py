"""Where a number comes from: the machine, the software and the commit (chapters 14 and 17)."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def machine(on_cpu: bool = False, gpus: int = 1) -> str:
    """The device that was measured, in words: "one NVIDIA H200", "2 x NVIDIA H200" or the processor's kind.

    Args:
        on_cpu: the work ran on the processor, whether there is a GPU or not.
        gpus: how many GPUs the work used, where there are any.
    """
    if torch.cuda.is_available() and not on_cpu:
        name = torch.cuda.get_device_name(0)
        return f"one {name}" if gpus == 1 else f"{gpus} x {name}"
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def software() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def current_commit() -> str:
    """The short hash of the checkout's commit, with "+" where files differ from it; "unknown" outside git and in a repository of
    something else, which the package may be installed below."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # installed below another checkout?
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
