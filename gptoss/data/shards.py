"""Shards: token ids as raw little-endian integers in `shard_*.bin`, then one `manifest.json` (chapter 13).

Each shard is written beside its place, fsynced and renamed. Ids are uint16 when every id of the vocabulary fits, else
uint32; an id that does not fit is an error, never a wrap.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gptoss.data.atomic import remove_partial, sync_directory, write_atomically
from gptoss.data.manifest import DTYPES, MANIFEST, Manifest, ShardInfo, dtype_for_vocabulary


class ShardWriter:
    """Writes token ids as shards of a fixed length, then the manifest.

    A context manager: leaving it without an exception closes the last shard and writes the manifest; leaving it with
    one writes no manifest, so that the directory is never taken for a complete one.

    Args:
        directory: made if missing; must hold no finished shards.
        vocab_size: ids lie in [0, vocab_size); also chooses the dtype.
        eos_token_id: the id that ends documents.
        shard_tokens: tokens in each shard but the last.
        tokenizer_sha256: `Tokenizer.sha256`, kept in the manifest.
        state: what `commit` returned earlier, to go on after an interruption.

    Raises:
        ValueError: bad arguments, an id outside the vocabulary, or a directory that already holds shards.
        OSError: the disk is full; the message names the file.

    Source: chapter 13.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        vocab_size: int,
        eos_token_id: int,
        shard_tokens: int = 50_000_000,
        tokenizer_sha256: str = "",
        state: dict[str, Any] | None = None,
    ):
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens = {shard_tokens}: must be positive")
        if not 0 <= eos_token_id < vocab_size:
            raise ValueError(
                f"eos_token_id = {eos_token_id}: must lie in [0, vocab_size = {vocab_size})"
            )
        self.directory = Path(directory)
        self.dtype = dtype_for_vocabulary(vocab_size)
        self.vocab_size, self.eos_token_id = vocab_size, eos_token_id
        self.shard_tokens, self.tokenizer_sha256 = shard_tokens, tokenizer_sha256
        self.directory.mkdir(parents=True, exist_ok=True)
        self.documents = self.text_bytes = self._open_tokens = 0
        self._shards: list[ShardInfo] = []
        self._file: Any = None
        self._hash = hashlib.sha256()
        if state is not None:
            self._restore(state)
        elif (self.directory / MANIFEST).exists() or any(self.directory.glob("shard_*.bin")):
            raise ValueError(
                f"{self.directory} already holds shards: choose an empty directory or delete it"
            )

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()

    @property
    def total_tokens(self) -> int:
        """Tokens written so far."""
        return sum(shard.tokens for shard in self._shards) + self._open_tokens

    def write(self, ids: np.ndarray | list[int], documents: int = 0, text_bytes: int = 0) -> None:
        """Append token ids; a document may run on into the next shard.

        Args:
            ids: (N,) integers in [0, vocab_size).
            documents: how many documents end in them, for the manifest.
            text_bytes: the UTF-8 size of their text, for the manifest.
        """
        array = np.asarray(ids)
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"token ids have dtype {array.dtype}: expected integers")
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.vocab_size):
            bad = int(array.min()) if int(array.min()) < 0 else int(array.max())
            raise ValueError(
                f"token id {bad} is outside [0, vocab_size = {self.vocab_size}): use the tokenizer's own "
                "vocabulary size"
            )
        array = array.astype(DTYPES[self.dtype])
        while array.size:
            room = self.shard_tokens - self._open_tokens
            self._append(array[:room])
            array = array[room:]
        self.documents += documents
        self.text_bytes += text_bytes

    def commit(self) -> dict[str, Any]:
        """Make everything written so far safe on disk and return the state that `state=` takes."""
        if self._file is not None:
            self._guard(self._sync)
        return {
            "shards": [asdict(shard) for shard in self._shards],
            "open_tokens": self._open_tokens,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
        }

    def close(self) -> Manifest:
        """Finish the last shard and write the manifest.

        Raises:
            ValueError: nothing was written.
        """
        if self._open_tokens:
            self._finish_shard()
        if not self._shards:
            raise ValueError(
                f"{self.directory}: no token was written, so there is no shard to keep"
            )
        manifest = Manifest(
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            total_tokens=self.total_tokens,
            shard_count=len(self._shards),
            shards=tuple(self._shards),
            tokenizer_sha256=self.tokenizer_sha256,
            documents=self.documents,
            text_bytes=self.text_bytes,
        )
        write_atomically(self.directory / MANIFEST, manifest.to_json().encode())
        return manifest

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _path(self, number: int) -> Path:
        return self.directory / f"shard_{number:05d}.bin"

    def _partial(self) -> Path:
        return self.directory / f".shard_{len(self._shards):05d}.bin.partial"

    def _append(self, array: np.ndarray) -> None:
        data = array.tobytes()
        if self._file is None:
            self._file = self._guard(lambda: open(self._partial(), "wb"))  # noqa: SIM115 # kept open over many writes
            self._hash = hashlib.sha256()
        self._guard(lambda: self._file.write(data))
        self._hash.update(data)
        self._open_tokens += array.size
        if self._open_tokens == self.shard_tokens:
            self._finish_shard()

    def _finish_shard(self) -> None:
        path = self._path(len(self._shards))
        self.commit()
        self._file.close()
        self._guard(lambda: os.replace(self._partial(), path))
        sync_directory(self.directory)
        self._shards.append(ShardInfo(path.name, self._open_tokens, self._hash.hexdigest()))
        self._file, self._open_tokens = None, 0

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            if self._file is not None:
                with contextlib.suppress(OSError):  # the same full disk again, on the buffered rest
                    self._file.close()
            raise OSError(error.errno, error.strerror, str(self._partial())) from error

    def _restore(self, state: dict[str, Any]) -> None:
        """Go back to a committed state: later shards and bytes are dropped, earlier ones must be there."""
        self._shards = [ShardInfo(**shard) for shard in state["shards"]]
        self.documents, self.text_bytes = state["documents"], state["text_bytes"]
        item = DTYPES[self.dtype].itemsize
        for shard in self._shards:
            path = self.directory / shard.name
            if not path.is_file() or path.stat().st_size != shard.tokens * item:
                raise ValueError(
                    f"{path}: missing or of another size than when it was written; delete {self.directory} and start anew"
                )
        partial, finished = self._partial(), self._path(len(self._shards))
        if finished.exists() and not partial.exists():
            os.replace(finished, partial)  # finished after the last commit: it is open again
        for path in self.directory.glob("*shard_*.bin*"):
            if path != partial and path.name not in {shard.name for shard in self._shards}:
                path.unlink()
        (self.directory / MANIFEST).unlink(missing_ok=True)
        remove_partial(self.directory, MANIFEST)
        if not state["open_tokens"]:
            partial.unlink(missing_ok=True)
            return
        size = state["open_tokens"] * item
        if not partial.is_file() or partial.stat().st_size < size:
            raise ValueError(
                f"{partial}: shorter than when it was written; delete {self.directory} and start anew"
            )
        os.truncate(partial, size)
        with open(partial, "rb") as file:
            self._hash = hashlib.file_digest(file, "sha256")
        self._open_tokens = state["open_tokens"]
        self._file = open(partial, "ab")  # noqa: SIM115 # kept open over many writes
