"""OPT-10: the shard of a token by bisection, against walking through the shards; and beside reading a window.

Shapes: S shards, T tokens of a window.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from .reading import Place, Row, compare_times

LOOKUPS = 200
PRODUCTION = 160  # 8.0B tokens in shards of 50M
WINDOW = 4096


def walk(offsets: Sequence[int], token: int) -> int:
    """The shard that holds a token, each looked at in turn."""
    for shard in range(len(offsets) - 1):
        if token < offsets[shard + 1]:
            return shard
    raise IndexError(f"token {token}: there are {offsets[-1]}")


def bisect(offsets: Sequence[int], token: int) -> int:
    """The shard that holds a token, by halving."""
    return bisect_right(offsets, token) - 1


def shard_lookup(place: Place) -> Iterator[Row]:
    """OPT-10 by number of shards; always on the host, where the loader runs."""
    host = Place(torch.device("cpu"), place.dtype)
    draw = random.Random(0)

    for count in (1, 10, PRODUCTION, 10_000):
        offsets = [0, *accumulate(draw.randrange(1000, 2000) for _ in range(count))]
        tokens = [draw.randrange(offsets[-1]) for _ in range(LOOKUPS)]
        yield compare_times(
            host,
            f"lookup, {count:,} shards",
            lambda offsets=offsets, tokens=tokens: [walk(offsets, t) for t in tokens],  # type: ignore[misc]  # bound now
            lambda offsets=offsets, tokens=tokens: [bisect(offsets, t) for t in tokens],  # type: ignore[misc]  # likewise
            measure="µs a lookup",
            per_call=LOOKUPS,
        )
    # 16 MB stand for a shard: what is read is one window
    shard = np.zeros(2**22, dtype=np.uint32)
    offsets = [50_000_000 * shard for shard in range(PRODUCTION + 1)]
    places = [draw.randrange(offsets[-1]) for _ in range(LOOKUPS)]

    def read(find: Callable[[Sequence[int], int], int]) -> None:
        for token in places:
            first = (token - offsets[find(offsets, token)]) % (shard.size - WINDOW)
            shard[first : first + WINDOW + 1].astype(np.int64)

    where = f"lookup and a window of {WINDOW:,} tokens, {PRODUCTION} shards"
    yield compare_times(host, where, lambda: read(walk), lambda: read(bisect), measure="µs a window", per_call=LOOKUPS)  # fmt: skip
