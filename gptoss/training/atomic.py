"""Files that are there whole or not at all, whatever happens while they are written.

A write goes to `<name>.tmp` in the same directory, is flushed to the disk, and takes its name by one rename. A rename
inside a directory is atomic on POSIX file systems: a reader sees the old file or the new one. Without the two flushes
(the file before the rename, its directory after) a power cut may keep the new name and lose the bytes behind it.
Source: Pillai et al. 2014, "All File Systems Are Not Created Equal", section 2; chapter 17 of this book.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STAGED_SUFFIX = ".tmp"


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written: its name, its length in bytes, and the SHA-256 of its bytes."""

    name: str
    bytes: int
    sha256: str


def write_atomically(path: Path, write: Callable[[Path], object]) -> FileRecord:
    """Write a file so that its name never shows a part of it.

    Args:
        path: the final name.
        write: called with the path of a staged file in the same directory, which it creates and fills.

    Returns:
        The record to hold the file against later.

    Raises:
        Whatever `write` or the file system raises; the staged file is gone then, and what stood at `path` stands. Only
            when the directory cannot be flushed does the new file stand there, and a power cut may bring the old one
            back.
    """
    staged = path.with_name(path.name + STAGED_SUFFIX)
    try:
        write(staged)
        with open(staged, "rb+") as file:
            os.fsync(file.fileno())
        record = FileRecord(path.name, staged.stat().st_size, sha256_of(staged))
        os.replace(staged, path)
        sync_directory(path.parent)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return record


def sync_directory(directory: Path) -> None:
    """Flush a directory's list of names to the disk (where the system can: Windows cannot)."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault_in_file(directory: Path, record: FileRecord, *, checksum: bool = True) -> str | None:
    """Say what is wrong with a recorded file, or None when nothing is.

    Args:
        directory: where the file lies.
        record: what it held when it was written.
        checksum: also read the whole file; without it the length alone is compared.

    Returns:
        One line that starts with the file's path, or None.
    """
    path = directory / record.name
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path}: {size:,} bytes where {record.bytes:,} were written"
        if checksum and sha256_of(path) != record.sha256:
            return f"{path}: its bytes changed since it was written (SHA-256 differs)"
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror or error})"
    return None
