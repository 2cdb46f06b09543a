"""Corpora by name: what "stdlib", "package:sympy", "texts/*.md" or "hf:owner/name" stand for (chapter 13).

Listing a corpus finds its files, in an order that does not depend on the machine; reading is `documents.py`'s.
"""

import glob
import hashlib
import importlib.util
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from gptoss.data.documents import ROW_SUFFIXES, Document, FileReader, HuggingFaceReader
from gptoss.data.equal_files import EqualFiles

BUILT_FOLDERS = frozenset({"__pycache__", "node_modules"})
SKIPPED_FOLDERS = BUILT_FOLDERS | frozenset(
    {
        *("test", "tests", "idle_test", "testing", "site-packages", "dist-packages"),
        *("lib2to3", "idlelib", "turtledemo", "ensurepip"),
        *("encodings", "pydoc_data"),  # tables and a help text, hardly any code
    }
)
SKIPPED_FILES = frozenset({"html/entities.py", "stringprep.py"})  # tables of numbers
TEXT_SUFFIXES = ROW_SUFFIXES | frozenset(
    {
        *(".txt", ".md", ".rst", ".tex", ".org", ".html", ".xml", ".csv", ".json", ".yaml", ".yml"),
        *(".toml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go"),
        *(".java", ".kt", ".scala", ".js", ".ts", ".tsx", ".jsx", ".css", ".rb", ".php", ".pl"),
        *(".lua", ".r", ".jl", ".hs", ".ml", ".sh", ".sql", ".swift", ".zig"),
    }
)
SPLIT_RULE = (
    "equal files have one key"  # in fingerprints: what was split otherwise is prepared again
)


class Reader(Protocol):
    """An iterator of documents that knows where it stands."""

    def __iter__(self) -> Iterator[Document]: ...
    def __next__(self) -> Document: ...
    def cursor(self) -> Any:
        """A JSON value that starts a reader behind the last document read."""
        ...


@dataclass(frozen=True)
class Corpus:
    """A source of documents.

    Attributes:
        name: as the caller gave it.
        fingerprint: changes when the files' names or sizes or the rule for their keys change; guards a continued
            preparation.
        size_bytes: of all files, or None when nobody knows before reading.
        read: starts a reader, from the beginning or from a cursor.
        about: facts for a model card: files, bytes, and per package its version and licence.
    """

    name: str
    fingerprint: str
    size_bytes: int | None
    read: Callable[[Any], Reader]
    about: tuple[dict[str, Any], ...] = ()


def open_corpus(
    source: str | Path | Sequence[str | Path],
    column: str = "text",
    leave_out: str | Path | None = None,
) -> Corpus:
    """Find what a source names.

    A document's key is made of its file's name, and of the first name where several files, of one source or of several,
    are equal byte for byte: whoever splits by keys has equal files on one side. Rows are keyed by their text.

    Args:
        source: one of these, or a list of them, read one after the other:
            "stdlib"            the Python standard library of this interpreter, without its tests;
            "package:NAME"      the Python sources of an installed package, without its tests;
            "hf:NAME", "hf:NAME:CONFIG", "hf:NAME:CONFIG:SPLIT"   a Hugging Face dataset, streamed;
            a folder            every text, code, .jsonl and .parquet file in it, hidden folders left out;
            a file or a glob    "books/*.txt", "data/**/*.parquet".
        column: the field with the text in JSONL, Parquet and Hugging Face datasets.
        leave_out: a folder whose files no folder or glob among the sources lists: the one that is written to.

    Raises:
        ValueError: a blank name, or nothing found under it; one line says what was looked for.

    Source: chapter 13.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise ValueError('no source of text was given: expected "stdlib", a folder, a file, ...')
    if not all(str(one).strip() for one in sources):
        raise ValueError(
            'a source is blank: expected "stdlib", a folder, a file, ...; "." is the current folder'
        )
    equal = EqualFiles()
    corpora = [_open_one(str(one), column, equal, leave_out) for one in sources]
    if len(corpora) == 1:
        return corpora[0]
    sizes = [corpus.size_bytes for corpus in corpora]
    return Corpus(
        name=" + ".join(corpus.name for corpus in corpora),
        fingerprint=_digest([corpus.fingerprint for corpus in corpora]),
        size_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        read=lambda cursor: _ChainReader(corpora, cursor),
        about=tuple(fact for corpus in corpora for fact in corpus.about),
    )


def stdlib_files() -> list[tuple[str, Path]]:
    """(name, path) of each module of the running interpreter's standard library, by name.

    Tests and tables of numbers are left out: a small model that meets a table goes on with it for ever.
    """
    files = _python_files(Path(sysconfig.get_paths()["stdlib"]))
    return [(name, path) for name, path in files if name not in SKIPPED_FILES]


def package_files(name: str) -> list[tuple[str, Path]]:
    """(name, path) of each Python source of an installed package, tests left out, by name.

    Raises:
        ValueError: no such package here.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ValueError(
            f"package:{name}: no installed package of that name; pip install it, or leave it out"
        )
    return [(f"{name}/{file}", path) for file, path in _python_files(Path(folders[0]))]


def package_licence(name: str) -> dict[str, str]:
    """The version and the licence that an installed package declares ("" where it declares none)."""
    for distribution in metadata.packages_distributions().get(name, [name]):
        try:
            declared = metadata.metadata(distribution)
        except metadata.PackageNotFoundError:
            continue
        classifiers = declared.get_all("Classifier") or ()
        stated = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License ::")]
        expression = (declared.get_all("License-Expression") or [""])[0]
        first_line = (declared.get_all("License") or [""])[0].split("\n")[0]
        licence = expression or "; ".join(stated) or first_line
        return {"version": metadata.version(distribution), "licence": licence}
    return {"version": "", "licence": ""}


def _open_one(source: str, column: str, equal: EqualFiles, leave_out: str | Path | None) -> Corpus:
    kind, _, rest = source.partition(":")
    about: dict[str, Any] = {"source": source}
    if kind == "hf" and rest:
        name, config, split = (*rest.split(":"), "", "")[:3]
        arguments = (name, config or None, split or "train", column)
        fingerprint = _digest([source, column])
        return Corpus(
            source, fingerprint, None, lambda c: HuggingFaceReader(*arguments, c), (about,)
        )
    if source == "stdlib":
        files = stdlib_files()
        about |= {"version": platform.python_version(), "licence": "PSF-2.0"}
    elif kind == "package" and rest:
        files = package_files(rest)
        about |= package_licence(rest)
    else:
        files = _listed_files(source, leave_out)
    files = [(name, path) for name, path in files if path.stat().st_size]
    if not files:
        raise ValueError(
            f"{source}: nothing to read: no text, code, .jsonl or .parquet file with content"
        )
    equal.add(file for file in files if file[1].suffix.lower() not in ROW_SUFFIXES)
    sizes = [path.stat().st_size for _, path in files]
    about |= {"files": len(files), "bytes": sum(sizes)}
    listing = [[name, size] for (name, _), size in zip(files, sizes, strict=True)]
    return Corpus(
        name=source,
        fingerprint=_digest([column, listing, SPLIT_RULE]),
        size_bytes=sum(sizes),
        read=lambda cursor: FileReader(files, column, cursor, key=equal.first_name),
        about=(about,),
    )


def _listed_files(source: str, leave_out: str | Path | None) -> list[tuple[str, Path]]:
    path = Path(source).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        found = [
            (name, file)
            for name, file in _walk(path, skip=lambda folder: folder in BUILT_FOLDERS)
            if file.suffix.lower() in TEXT_SUFFIXES
        ]
    elif glob.has_magic(source):
        matches = glob.glob(str(path), recursive=True)
        found = sorted((Path(m).as_posix(), Path(m)) for m in matches if Path(m).is_file())
    else:
        raise ValueError(
            f"{source}: no such file or folder; a source is a folder, a file, a glob, stdlib, package:NAME or hf:NAME"
        )
    if leave_out is None:
        return found
    outside = Path(leave_out).resolve()
    return [(name, file) for name, file in found if not file.resolve().is_relative_to(outside)]


def _python_files(root: Path) -> list[tuple[str, Path]]:
    files = _walk(root, skip=lambda folder: folder in SKIPPED_FOLDERS)
    return [(name, path) for name, path in files if path.suffix == ".py"]


def _walk(root: Path, skip: Callable[[str], bool]) -> list[tuple[str, Path]]:
    """(name, path) of the files under a folder by name, without hidden and skipped folders, which are not entered."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and not skip(name)]
        paths = (Path(folder, file) for file in files if not file.startswith("."))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode(errors="surrogateescape")).hexdigest()


class _ChainReader:
    """Several corpora, one after the other."""

    def __init__(self, corpora: Iterable[Corpus], cursor: dict[str, Any] | None = None):
        self._corpora = list(corpora)
        self._number = cursor["corpus"] if cursor else 0
        self._reader = self._corpora[self._number].read(cursor["cursor"] if cursor else None)

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        while True:
            for document in self._reader:
                return document
            if self._number + 1 == len(self._corpora):
                raise StopIteration
            self._number += 1
            self._reader = self._corpora[self._number].read(None)

    def cursor(self) -> dict[str, Any]:
        return {"corpus": self._number, "cursor": self._reader.cursor()}
