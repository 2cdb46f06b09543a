"""From shards to batches: memory-mapped windows in an order that any run can take up again (chapter 13).

The tokens of all shards form one stream, cut into windows of T tokens; a window's targets are its tokens one later.
Sequences are numbered over the whole run, all ranks together; the number alone decides what a sequence holds.
B batch, T queries (window length), S sequences of a dataset.
"""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gptoss.data.manifest import DTYPES, check_ids, read_manifest
from gptoss.data.order import window_at


class SequenceSource(Protocol):
    """What `batches` reads: a window of tokens for each (seed, position)."""

    max_seq_len: int

    def sequence_at(self, seed: int, position: int) -> np.ndarray:
        """The (T+1,) int64 tokens that a run with this seed reads at a position."""
        ...


class PretrainDataset(Dataset):
    """Windows over a directory of shards: item i is tokens [i·T, i·T + T] of the stream, as inputs and targets.

    Shards are mapped, not read; a window that crosses a shard's edge is joined. The shard of a token is found by
    bisection over the prefix sums of the shard lengths, O(log shards).

    Args:
        data_path: a directory with shard_*.bin and manifest.json.
        max_seq_len: T in tokens.

    Raises:
        FileNotFoundError, ValueError: the directory is missing, incomplete, wrong, or shorter than one window; the
            message names the file.

    Source: chapter 13.
    """

    def __init__(self, data_path: str | Path, max_seq_len: int):
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len = {max_seq_len}: must be positive")
        self.data_path, self.max_seq_len = Path(data_path), max_seq_len
        self.manifest = read_manifest(data_path)
        self.shard_offsets = [0]
        for shard in self.manifest.shards:
            self.shard_offsets.append(self.shard_offsets[-1] + shard.tokens)
        self._maps: dict[int, np.memmap] = {}
        if len(self) < 1:
            raise ValueError(
                f"{self.data_path}: {self.manifest.total_tokens} tokens make no window of max_seq_len = {max_seq_len} "
                "and its next token; add text or shorten max_seq_len"
            )

    def __len__(self) -> int:
        return (self.manifest.total_tokens - 1) // self.max_seq_len

    def __getitem__(self, index: int) -> tuple[Int[Tensor, " T"], Int[Tensor, " T"]]:
        tokens = torch.from_numpy(self.window(index))
        return tokens[:-1], tokens[1:]

    def window(self, index: int) -> np.ndarray:
        """The (T+1,) int64 tokens of window `index`.

        Raises:
            IndexError: index outside range(len(self)).
            ValueError: a token id that is not in the vocabulary; the message names the shard.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index}: the dataset has {len(self)}")
        start = index * self.max_seq_len
        return self.tokens(start, start + self.max_seq_len + 1)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, int64, from as many shards as they lie in."""
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            number = bisect_right(self.shard_offsets, at) - 1
            first = at - self.shard_offsets[number]
            piece = self._shard(number)[first : first + stop - at]
            assert piece.size, "the prefix sums put every token below the total into a shard"
            check_ids(piece, self.manifest.vocab_size, self._path(number), first)
            out[at - start : at - start + piece.size] = piece
            at += piece.size
        return out

    def order(self, seed: int, position: int) -> int:
        """The window that a run with this seed reads at a position; each epoch visits every window once."""
        return window_at(seed, position, len(self))

    def sequence_at(self, seed: int, position: int) -> np.ndarray:
        """The (T+1,) int64 tokens that a run with this seed reads at a position."""
        return self.window(self.order(seed, position))

    def document_ids(self, index: int) -> Int[Tensor, " T"]:
        """Which document each input of a window belongs to: 0, 1, ... from the left; an EOS ends its own."""
        ended = self.window(index)[:-1] == self.manifest.eos_token_id
        return torch.from_numpy(np.cumsum(ended) - ended)

    def _path(self, number: int) -> Path:
        return self.data_path / self.manifest.shards[number].name

    def _shard(self, number: int) -> np.memmap:
        if number not in self._maps:
            mapped = np.memmap(self._path(number), dtype=DTYPES[self.manifest.dtype], mode="r")
            if mapped.size != self.manifest.shards[number].tokens:
                raise ValueError(
                    f"{self._path(number)}: holds {mapped.size} tokens, but had "
                    f"{self.manifest.shards[number].tokens} when the dataset was opened"
                )
            self._maps[number] = mapped
        return self._maps[number]

    def __getstate__(self) -> dict[str, Any]:
        # A pickled map would carry the shard's bytes to each worker.
        return {**self.__dict__, "_maps": {}}


class Batches(Iterator[tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]]):
    """An endless iterator of (inputs, targets), each (B, T) int64, that knows where it stands.

    Micro-batch m of rank r holds sequences position + (m·world_size + r)·B + [0, B). A step of
    A·world_size micro-batches of B therefore holds the same sequences on any number of ranks, as long as the
    product A·B·world_size is the same.

    Attributes:
        position: sequences consumed by all ranks together; a new iterator with this `start` goes on from here.
    """

    def __init__(
        self,
        source: SequenceSource,
        batch_size: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
    ):
        for name, value, least in (
            *(("batch_size", batch_size, 1), ("start", start, 0)),
            *(("world_size", world_size, 1), ("num_workers", num_workers, 0)),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank = {rank}: must lie in [0, world_size = {world_size})")
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self.seek(start)

    def seek(self, position: int) -> None:
        """Go to a global sequence position, forwards past offending data or back to a checkpoint."""
        if position < 0:
            raise ValueError(f"position = {position}: must not be negative")
        self.position = position
        self._iterator: Iterator[Tensor] | None = None  # ends the workers of the old place

    def __next__(self) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        if self._iterator is None:
            loader = DataLoader(
                _AtPosition(self.source, self.seed),
                batch_sampler=_Positions(
                    self.position, self.batch_size, self.rank, self.world_size
                ),
                num_workers=self.num_workers,
                # Starting workers draws a number: from its own generator, so that the run's stays untouched.
                generator=torch.Generator(),
            )
            self._iterator = iter(loader)
        tokens = next(self._iterator)  # (B, T+1)
        self.position += self.batch_size * self.world_size
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        """End the worker processes."""
        self._iterator = None


def batches(
    source: SequenceSource,
    batch_size: int,
    seed: int,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> Batches:
    """Batches of a dataset from a global position on, endless over epochs.

    Args:
        source: a PretrainDataset, or one with retrieval examples (`RetrievalDataset`).
        batch_size: B, sequences of this rank in one micro-batch.
        seed: chooses the order.
        start: sequences that all ranks together have consumed before; `Batches.position` of the stopped run.
        rank, world_size: which part of each world_size·B sequences is this process's.
        num_workers: processes that read ahead; the batches are the same with any number.

    Returns:
        the iterator; `.position` and `.seek(position)` save and restore its place.

    Raises:
        ValueError: an argument out of its range.

    Source: chapter 13.
    """
    return Batches(source, batch_size, seed, start, rank, world_size, num_workers)


class _AtPosition(Dataset):
    """A map from global position to tokens, for DataLoader's workers."""

    def __init__(self, source: SequenceSource, seed: int):
        self.source, self.seed = source, seed

    def __getitem__(self, position: int) -> Tensor:
        return torch.from_numpy(self.source.sequence_at(self.seed, position))


class _Positions:
    """One rank's positions, a micro-batch at a time, without end."""

    def __init__(self, start: int, batch_size: int, rank: int, world_size: int):
        self.first = start + rank * batch_size
        self.batch_size, self.stride = batch_size, batch_size * world_size

    def __iter__(self) -> Iterator[list[int]]:
        first = self.first
        while True:
            yield list(range(first, first + self.batch_size))
            first += self.stride
