"""A file is written whole or not at all; what a killed writer staged is cleared away, and nothing else."""

import errno
from pathlib import Path

import pytest

from gptoss.data import atomic
from gptoss.data.atomic import remove_partial, write_atomically


@pytest.mark.parametrize("content", [b"new", lambda staged: staged.write_bytes(b"new")])
def test_bytes_and_a_writer_come_to_the_same(tmp_path: Path, content) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, content)
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def full(staged: Path) -> None:
    staged.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device", str(staged))


def interrupted(staged: Path) -> None:
    staged.write_bytes(b"half")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [(full, OSError, "No space left on device: '.*/file'"), (interrupted, KeyboardInterrupt, None)],
)
def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, content, error, words) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error, match=words):
        write_atomically(path, content)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileNotFoundError, match=r"'.*/none/file'"):
        write_atomically(tmp_path / "none" / "file", b"new")
    with pytest.raises(NotADirectoryError, match=r"'.*/file/file'"):
        write_atomically(tmp_path / "file" / "file", b"new")


def test_a_directory_that_cannot_be_flushed_is_an_error_and_the_new_file_stands(
    tmp_path: Path, monkeypatch
) -> None:
    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic, "sync_directory", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*/file'"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_only_staged_files_of_the_named_ones_are_removed(tmp_path: Path) -> None:
    kept = {"a.json", "a.json.partial", ".b.json.7.partial", ".shard_00000.bin.partial"}
    for name in (*kept, ".a.json.1.partial", ".a.json.22.partial"):
        (tmp_path / name).write_bytes(b"")
    remove_partial(tmp_path, "a.json")
    assert {path.name for path in tmp_path.iterdir()} == kept
    remove_partial(tmp_path, "?.json")
    assert {path.name for path in tmp_path.iterdir()} == kept - {".b.json.7.partial"}
