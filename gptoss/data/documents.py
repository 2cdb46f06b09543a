"""Documents one at a time from files and streams, never a whole corpus in memory (chapter 13).

A reader is an iterator of documents that can say where it stands (`cursor`) and start there again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 20
ROW_SUFFIXES = frozenset({".jsonl", ".ndjson", ".parquet"})


@dataclass(frozen=True)
class Document:
    """One text. `key` decides on which side of the train/validation split it falls."""

    key: str
    text: str


def is_validation(key: str, fraction: float) -> bool:
    """Whether a document belongs to validation: a hash of its key below the fraction, the same on every machine."""
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class FileReader(Iterator[Document]):
    """Documents of a list of files, in the list's order.

    .jsonl and .ndjson files hold one JSON object a line, .parquet files one row, each with the text in `column`; their
    key is the text's hash, so that equal texts fall on the same side of a split. Any other file is text in UTF-8 (a byte
    that is not becomes U+FFFD); `key` makes its key. A text file above 1 MiB is read in pieces of about that size cut
    at line ends (a line longer than that between two characters), each a document of its own, so that one large file
    can be split.

    Args:
        files: (name, path) pairs.
        column: the field that holds the text in JSONL and Parquet.
        cursor: what `cursor()` returned earlier, to go on behind the last document read then.
        key: (name, path) -> the key of a text file's first piece; None takes the name.

    Raises:
        ValueError: a line that is no JSON object or has no such field, a Parquet file without the column.
    """

    def __init__(
        self,
        files: list[tuple[str, Path]],
        column: str = "text",
        cursor: dict[str, int] | None = None,
        key: Callable[[str, Path], str] | None = None,
    ):
        self._files, self._column = files, column
        self._key = key or (lambda name, path: name)
        self._file, self._count = (cursor["file"], cursor["documents"]) if cursor else (0, 0)
        self._rows: Iterator[Document] | None = None

    def __next__(self) -> Document:
        while self._file < len(self._files):
            if self._rows is None:
                name, path = self._files[self._file]
                key = self._key(name, path)
                self._rows = _open_documents(key, path, self._column, self._count)
            for document in self._rows:
                self._count += 1
                return document
            self._file, self._count, self._rows = self._file + 1, 0, None
        raise StopIteration

    def cursor(self) -> dict[str, int]:
        """Where the reader stands: the file and the documents of it that were read."""
        return {"file": self._file, "documents": self._count}


class HuggingFaceReader(Iterator[Document]):
    """Rows of a dataset on the Hugging Face hub (or a local folder that `datasets` reads), streamed.

    Args:
        name: "HuggingFaceFW/fineweb-edu", or a folder.
        config: the dataset's configuration ("sample-10BT"), if it has several.
        split: "train".
        column: the field that holds the text.
        cursor: what `cursor()` returned earlier.

    Raises:
        ValueError: `datasets` is not installed, or a row has no such text field.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        column: str = "text",
        cursor: dict[str, Any] | None = None,
    ):
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                "reading a Hugging Face dataset needs the datasets library: pip install datasets"
            ) from error
        self._name, self._column = name, column
        # The library announces what it downloads on stderr; the caller has a bar of its own.
        datasets.utils.logging.disable_progress_bar()
        try:
            self._stream = datasets.load_dataset(name, config, split=split, streaming=True)
        except Exception as error:  # the library raises many kinds for one bad name
            what = " ".join(str(error).split())
            raise ValueError(f"hf:{name}: cannot be opened: {what}") from error
        if cursor:
            self._stream.load_state_dict(cursor)
        self._rows = iter(self._stream)

    def __next__(self) -> Document:
        return _row_document(next(self._rows), self._column, f"hf:{self._name}")

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, so that the shards before it are not downloaded again."""
        return self._stream.state_dict()


def _open_documents(key: str, path: Path, column: str, skip: int) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        rows = _jsonl_documents(path, column)
    elif suffix == ".parquet":
        rows = _parquet_documents(path, column)
    else:
        rows = _text_documents(key, path)
    for _ in range(skip):
        next(rows, None)
    return rows


def _text_documents(key: str, path: Path) -> Iterator[Document]:
    with open(path, "rb") as file:
        number = 0
        while data := file.read(PIECE_BYTES):
            if len(data) == PIECE_BYTES:
                data += file.readline(PIECE_BYTES)
                if not data.endswith(b"\n"):
                    data += _rest_of_character(file)
            piece_key = key if number == 0 else f"{key}#{number}"
            yield Document(piece_key, data.decode("utf-8", errors="replace"))
            number += 1


def _rest_of_character(file: BufferedReader) -> bytes:
    """The bytes, at most 3, that are still to come of the UTF-8 character inside which reading stopped: 10xxxxxx."""
    rest = b""
    while len(rest) < 3 and b"\x80" <= file.peek(1)[:1] <= b"\xbf":
        rest += file.read(1)
    return rest


def _jsonl_documents(path: Path, column: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            yield _row_document(row, column, f"{path}, line {number}")


def _parquet_documents(path: Path, column: str) -> Iterator[Document]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ValueError("reading Parquet needs pyarrow: pip install pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {' '.join(str(error).split())}") from error
    with file:
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{path}: no column {column!r}; it has {names}")
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield _row_document({column: text}, column, str(path))


def _row_document(row: Any, column: str, where: str) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: expected text in the field {column!r}; it has {has}")
    text = row[column]
    data = text.encode("utf-8", errors="surrogatepass")
    return Document(hashlib.blake2b(data, digest_size=16).hexdigest(), text)
