"""Files that are equal byte for byte: one text under several names, for one side of a split (chapter 13)."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

NamedFile = tuple[str, Path]


class EqualFiles:
    """Some files, and for each the first name that its bytes have among them.

    Only files of one size are read and compared, at the first question.
    """

    def __init__(self) -> None:
        self._files: list[NamedFile] = []

    def add(self, files: Iterable[NamedFile]) -> None:
        """Append (name, path) pairs; the order decides which of two equal files is the first."""
        self._files += files

    def first_name(self, name: str, path: Path) -> str:
        """The first name of a file's bytes: `name` itself unless an earlier file equals this one."""
        return self._first_names.get(path, name)

    @cached_property
    def _first_names(self) -> dict[Path, str]:
        """Of the files that are not the only one with their bytes."""
        found: dict[Path, str] = {}
        for same_size in _groups(self._files, lambda path: path.stat().st_size):
            for equal in _groups(same_size, _digest):
                found |= {path: equal[0][0] for _, path in equal}
        return found


def _groups(
    files: Iterable[NamedFile], value: Callable[[Path], Hashable]
) -> Iterator[list[NamedFile]]:
    """Files of one value together, in their order, where there are two or more."""
    found: dict[Hashable, list[NamedFile]] = defaultdict(list)
    for name, path in files:
        found[value(path)].append((name, path))
    return (group for group in found.values() if len(group) > 1)


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()
