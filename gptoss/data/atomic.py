"""Files that are there whole or not at all, whatever happens to the machine while they are written.

A write goes to a staged file in the same directory, `.<name>.<process>.partial`, is flushed to the disk, and takes its
name by one rename. A rename inside a directory is atomic on POSIX file systems: a reader sees the old file or the new
one. Without the two flushes (the file before the rename, its directory after) a power cut may keep the new name and lose
the bytes behind it.
Source: Pillai et al. 2014, "All File Systems Are Not Created Equal", section 2; chapters 13 and 17 of this book.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a file so that its name never shows a part of it.

    Args:
        path: the final name.
        content: the bytes, or what creates and fills the staged file whose path it is called with.

    Raises:
        OSError: the disk is full or the place cannot be written; it names `path`. The staged file is gone then, and what
            stood at `path` stands. Only when the directory cannot be flushed does the new file stand there, and a power
            cut may bring the old one back.
        Whatever else `content` raises, with the same effect.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if isinstance(content, bytes):
            staged.write_bytes(content)
        else:
            content(staged)
        with open(staged, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what went wrong first is what has to be said
            staged.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise


def remove_partial(directory: Path, name: str) -> None:
    """Delete the staged files that killed calls of `write_atomically` left. Only where nobody else writes them now.

    Args:
        directory: where they lie.
        name: of the files that were to be written; * and ? as in `Path.glob`.
    """
    for staged in directory.glob(f".{name}.*.partial"):
        staged.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Flush a directory's list of names to the disk (where the system can: Windows cannot)."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
