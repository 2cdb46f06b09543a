"""Writing a file whole or not at all, whatever happens to the machine meanwhile (chapter 13)."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: beside its place, fsync, rename, fsync the directory.

    Raises:
        OSError: the disk is full or the place cannot be written; the old file, if any, is untouched.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_directory(path.parent)


def remove_partial(path: Path) -> None:
    """Delete what killed calls of `write_atomically` left beside a file. Only where nobody else writes it now."""
    for beside in path.parent.glob(f".{path.name}.*.partial"):
        beside.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make renames inside a directory survive a power cut, where the system knows how."""
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
