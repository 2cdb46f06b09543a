"""What a file held when it was written, to hold it against later (chapter 17)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRecord:
    """A file's name, its length in bytes, and the SHA-256 of its bytes."""

    name: str
    bytes: int
    sha256: str


def record_of(path: Path) -> FileRecord:
    """The record of a file as it lies on the disk now."""
    return FileRecord(path.name, path.stat().st_size, sha256_of(path))


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
