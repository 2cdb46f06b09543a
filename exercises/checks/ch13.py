"""Checks of chapter 13: from text to batches.

Shapes: N targets.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gptoss.data.order import mix, permute

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "13_data"

Pair = tuple[int, int]
Merges = dict[Pair, int]

# 1. Write a word with merges ------------------------------------------------------------------------------------------


def _join(ids: Sequence[int], pair: Pair, new: int) -> list[int]:
    out: list[int] = []
    i = 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def _encode_by_rank(ids: Sequence[int], merges: Merges) -> list[int]:
    ids, order = list(ids), list(merges)
    while known := [pair for pair in itertools.pairwise(ids) if pair in merges]:
        first = min(known, key=order.index)
        ids = _join(ids, first, merges[first])
    return ids


def _encode_in_one_pass(ids: Sequence[int], merges: Merges) -> list[int]:
    """Right: a merge makes a symbol that no earlier merge knows, so each is tried once."""
    ids = list(ids)
    for pair, new in merges.items():
        ids = _join(ids, pair, new)
    return ids


def _choosing(choose: Callable[[list[Pair], Merges], Pair]) -> Callable[..., list[int]]:
    def encode(ids: Sequence[int], merges: Merges) -> list[int]:
        ids = list(ids)
        while known := [pair for pair in itertools.pairwise(ids) if pair in merges]:
            pair = choose(known, merges)
            ids = _join(ids, pair, merges[pair])
        return ids

    return encode


def _from_the_right(ids: Sequence[int], merges: Merges) -> list[int]:
    ids = list(ids)
    for pair, new in merges.items():
        ids = _join(ids[::-1], (pair[1], pair[0]), new)[::-1]
    return ids


def _single_round(ids: Sequence[int], merges: Merges) -> list[int]:
    known = [pair for pair in itertools.pairwise(ids) if pair in merges]
    first = min(known, key=list(merges).index, default=None)
    return list(ids) if first is None else _join(ids, first, merges[first])


def _word(label: str, ids: list[int], merges: Merges) -> Trial:
    return Trial(label, lambda: (list(ids), dict(merges)))


_LEARNED: Merges = {(1, 2): 10, (2, 3): 11, (10, 3): 12, (3, 4): 13, (12, 4): 14}

check_encode_word = Exercise(
    function="encode_word",
    title="Write a word with merges",
    dots=2,
    minutes=15,
    reference=_encode_by_rank,
    trials=(
        _word("a word of four symbols", [1, 2, 3, 4], _LEARNED),
        _word("the earliest pair stands on the right", [3, 4, 2, 3], _LEARNED),
        _word("a pair that is blocked by an earlier one", [5, 3, 1, 2, 3], _LEARNED),
        _word("a later pair to the left of an earlier one", [7, 8, 9], {(8, 9): 20, (7, 8): 21}),
        _word("three equal symbols", [5, 5, 5], {(5, 5): 20}),
        _word("the same pair twice", [1, 2, 9, 1, 2], _LEARNED),
        _word("ids that are not in the merges' order", [1, 2, 3], {(1, 2): 99, (2, 3): 50}),
        _word("nothing to join", [9, 8, 7], _LEARNED),
        _word("one symbol", [3], _LEARNED),
        _word("no symbol", [], _LEARNED),
    ),
    mistakes=(
        Mistake(
            "the first pair from the left",
            "the pair that stands first was joined. The pair that was learned first goes first, wherever it stands.",
            _choosing(lambda known, merges: known[0]),
        ),
        Mistake(
            "the latest pair first",
            "the pair that was learned last was joined first, to get long symbols early. It is the other way round.",
            _choosing(lambda known, merges: max(known, key=list(merges).index)),
        ),
        Mistake(
            "the smallest new id",
            "the smallest new id was taken for the earliest merge. The dict's order says which was learned first.",
            _choosing(lambda known, merges: min(known, key=lambda pair: merges[pair])),
        ),
        Mistake(
            "from the right",
            "of three equal symbols the last two were joined. Occurrences are replaced from the left.",
            _from_the_right,
        ),
        Mistake(
            "one round",
            "after the first pair was joined, others have become possible. Go on until none is left.",
            _single_round,
        ),
    ),
    alternatives=(_encode_in_one_pass,),
    hints=(
        "List the neighbouring pairs of the word, and see which of them are in merges.",
        "The rank of a pair is its place in the dict: {pair: place for place, pair in enumerate(merges)}.",
        "Join the pair of the lowest rank, list the pairs anew, and stop when none is in merges.",
    ),
)


# 2. Find a token ------------------------------------------------------------------------------------------------------


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _locate(lengths: Sequence[int], g: int) -> Pair:
    offsets = _offsets(lengths)
    shard = bisect_right(offsets, g) - 1
    return shard, g - offsets[shard]


def _locate_by_walking(lengths: Sequence[int], g: int) -> Pair:
    shard = 0
    while g >= lengths[shard]:
        g -= lengths[shard]
        shard += 1
    return shard, g


def _locate_left(lengths: Sequence[int], g: int) -> Pair:
    offsets = _offsets(lengths)
    shard = max(0, bisect_left(offsets, g) - 1)
    return shard, g - offsets[shard]


def _locate_whole(lengths: Sequence[int], g: int) -> Pair:
    return bisect_right(_offsets(lengths), g) - 1, g


def _locate_equal(lengths: Sequence[int], g: int) -> Pair:
    return divmod(g, max(1, lengths[0]))


def _locate_from_one(lengths: Sequence[int], g: int) -> Pair:
    shard, place = _locate(lengths, g)
    return shard + 1, place


def _token(label: str, lengths: list[int], g: int) -> Trial:
    return Trial(label, lambda: (list(lengths), g))


check_locate = Exercise(
    function="locate",
    title="Find a token",
    dots=1,
    minutes=10,
    reference=_locate,
    trials=(
        _token("a token in the middle of the second of three shards", [7, 7, 3], 10),
        _token("the first token of all", [7, 7, 3], 0),
        _token("the first token of a shard", [7, 7, 3], 7),
        _token("the last token of a shard", [7, 7, 3], 6),
        _token("the last token of all", [7, 7, 3], 16),
        _token("shards of different lengths", [2, 9, 4], 12),
        _token("an empty shard before it", [3, 0, 5], 3),
        _token("a single shard", [5], 4),
    ),
    mistakes=(
        Mistake(
            "an edge belongs to the next shard",
            "a shard's first token was looked for behind the end of the shard before. Where does token 7 lie in "
            "shards of 7?",
            _locate_left,
        ),
        Mistake(
            "place in the stream",
            "the place counts from the shard's own first token, not from the stream's.",
            _locate_whole,
        ),
        Mistake(
            "equal shards",
            "all shards were taken to be as long as the first. The last is shorter, and others may be.",
            _locate_equal,
        ),
        Mistake("counted from 1", "shards are counted from 0.", _locate_from_one),
    ),
    alternatives=(_locate_by_walking,),
    hints=(
        "Where does each shard begin? The sums of the lengths before it.",
        "The shard is the last one that begins at or before g.",
        "bisect.bisect_right(offsets, g) - 1, with offsets = [0, l0, l0 + l1, …].",
    ),
)


# 3. Whose sequences? --------------------------------------------------------------------------------------------------


def _positions(start: int, m: int, batch_size: int, rank: int, world_size: int) -> list[int]:
    return [start + (m * world_size + rank) * batch_size + b for b in range(batch_size)]


def _positions_filtered(
    start: int, m: int, batch_size: int, rank: int, world_size: int
) -> list[int]:
    """Right, and slow: go through all positions and keep those whose block is this rank's."""
    until = range((m + 1) * world_size * batch_size)
    blocks = ((p, p // batch_size) for p in until)
    mine = [p for p, block in blocks if block % world_size == rank and block // world_size == m]
    return [start + p for p in mine]


def _positions_interleaved(
    start: int, m: int, batch_size: int, rank: int, world_size: int
) -> list[int]:
    return [start + (m * batch_size + b) * world_size + rank for b in range(batch_size)]


def _positions_overlapping(
    start: int, m: int, batch_size: int, rank: int, world_size: int
) -> list[int]:
    return [start + (m + rank) * batch_size + b for b in range(batch_size)]


def _positions_from_zero(
    start: int, m: int, batch_size: int, rank: int, world_size: int
) -> list[int]:
    return _positions(0, m, batch_size, rank, world_size)


def _positions_start_each(
    start: int, m: int, batch_size: int, rank: int, world_size: int
) -> list[int]:
    return _positions(start * world_size, m, batch_size, rank, world_size)


def _share(label: str, *arguments: int) -> Trial:
    return Trial(label, lambda: arguments)


check_positions = Exercise(
    function="positions",
    title="Whose sequences?",
    dots=1,
    minutes=10,
    reference=_positions,
    trials=(
        _share("rank 1 of 2, its second micro-batch of 3", 0, 1, 3, 1, 2),
        _share("rank 0 of 2", 0, 2, 3, 0, 2),
        _share("a single rank", 0, 5, 4, 0, 1),
        _share("taken up at position 40", 40, 1, 2, 2, 4),
        _share("one sequence a micro-batch", 7, 3, 1, 2, 3),
    ),
    mistakes=(
        Mistake(
            "ranks overlap",
            "a micro-batch later, a rank stands where the next rank stood before. All ranks together move on by "
            "world_size micro-batches.",
            _positions_overlapping,
        ),
        Mistake(
            "single sequences dealt in turn",
            "no overlap, but another deal: here a rank takes batch_size positions in a row.",
            _positions_interleaved,
        ),
        Mistake(
            "start forgotten",
            "the run goes on at start, not at 0.",
            _positions_from_zero,
        ),
        Mistake(
            "start counted a rank",
            "start counts the sequences of all ranks together already.",
            _positions_start_each,
        ),
    ),
    alternatives=(_positions_filtered,),
    hints=(
        "In one round, all ranks together read world_size · batch_size positions.",
        "m rounds are over; then the ranks before this one take their batch_size each.",
    ),
)


# 4. When was this window read? ----------------------------------------------------------------------------------------


def _unpermute(
    item: int,
    length: int,
    key: int,
    *,
    keys_back: bool = True,
    swap: bool = True,
    walk: bool = True,
    beyond: int = 0,
) -> int:
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    rounds = range(6)[::-1] if keys_back else range(6)
    while True:
        left, right = item >> half, item & mask
        for i in rounds:
            if swap:
                left, right = right ^ (mix(left ^ mix(key + i)) & mask), left
            else:
                left, right = right, left ^ (mix(right ^ mix(key + i)) & mask)
        item = left << half | right
        if item < length + beyond or not walk:
            return item


def _unpermute_reference(item: int, length: int, key: int) -> int:
    return _unpermute(item, length, key)


def _unpermute_by_search(item: int, length: int, key: int) -> int:
    """Right, but it searches."""
    return next(i for i in range(length) if permute(i, length, key) == item)


def _window(length: int, item: int, key: int) -> Trial:
    return Trial(f"window {item} of {length}, key {key}", lambda: (item, length, key))


check_unpermute = Exercise(
    function="unpermute",
    title="When was this window read?",
    dots=3,
    minutes=25,
    reference=_unpermute_reference,
    trials=(
        _window(16, 3, 1),
        _window(64, 40, 2),
        _window(3, 2, 0),
        _window(100, 99, 5),
        _window(300, 123, -4),
        _window(1000, 0, 2**70),
        _window(2, 1, 3),
        _window(1, 0, 3),
    ),
    mistakes=(
        Mistake(
            "keys in the forward order",
            "each round was undone, but in the order in which they were made. The last round has to be undone first.",
            lambda item, length, key: _unpermute(item, length, key, keys_back=False),
        ),
        Mistake(
            "the forward round",
            "a round was applied with the keys reversed, not undone. What was on the left of a result was on the "
            "right before.",
            lambda item, length, key: _unpermute(item, length, key, swap=False),
        ),
        Mistake(
            "permuted again",
            "that is permute itself. A permutation is its own inverse only by luck.",
            lambda item, length, key: permute(item, length, key),
        ),
        Mistake(
            "no walk",
            "right where the length is a power of four. Elsewhere the walk has to be walked back, until the index is "
            "below length.",
            lambda item, length, key: _unpermute(item, length, key, walk=False),
        ),
        Mistake(
            "walk too short",
            "an index equal to length came out. Indices run from 0 to length − 1: the walk goes on there.",
            lambda item, length, key: _unpermute(item, length, key, beyond=1),
        ),
    ),
    alternatives=(_unpermute_by_search,),
    hints=(
        "Undo one round first: from (left', right') = (right, left ^ f(right)) get left and right.",
        "right is left'. Then left is right' ^ f(left').",
        "Undo the six rounds from the last to the first; while the result is not below length, undo six more.",
    ),
)


# 5. Bits a byte -------------------------------------------------------------------------------------------------------


def _bits(losses: Tensor, byte_lengths: Tensor) -> Tensor:
    return losses.sum() / math.log(2) / byte_lengths.sum()


def _bits_by_means(losses: Tensor, byte_lengths: Tensor) -> Tensor:
    return losses.mean() / byte_lengths.to(losses.dtype).mean() * math.log2(math.e)


def _bits_mean_of_ratios(losses: Tensor, byte_lengths: Tensor) -> Tensor:
    there = byte_lengths > 0
    return (losses[there] / byte_lengths[there]).mean() / math.log(2)


def _bits_without_ends(losses: Tensor, byte_lengths: Tensor) -> Tensor:
    return losses[byte_lengths > 0].sum() / math.log(2) / byte_lengths.sum()


def _targets(
    label: str, lengths: list[int], seed: int, dtype: torch.dtype = torch.float64
) -> Trial:
    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        losses = torch.rand(len(lengths), generator=generator, dtype=torch.float64) * 6
        return losses.to(dtype), torch.tensor(lengths)

    return Trial(label, make)


check_bits_per_byte = Exercise(
    function="bits_per_byte",
    title="Bits a byte",
    dots=1,
    minutes=5,
    reference=_bits,
    trials=(
        _targets("tokens of different lengths", [1, 4, 7, 2, 2], 0),
        _targets("single bytes", [1, 1, 1, 1], 1),
        _targets("an ending symbol among them", [3, 5, 0, 1, 8], 2),
        _targets("float32", [2, 6, 4, 1], 3, torch.float32),
    ),
    mistakes=(
        Mistake(
            "nats",
            "losses are in nats; a bit is ln 2 nats.",
            lambda losses, byte_lengths: losses.sum() / byte_lengths.sum(),
        ),
        Mistake(
            "the wrong way round",
            "you multiplied by ln 2. A nat is more than a bit, so the number of bits is larger.",
            lambda losses, byte_lengths: losses.sum() * math.log(2) / byte_lengths.sum(),
        ),
        Mistake(
            "bits a token",
            "that is bits a token: divide by the bytes, not by the number of targets.",
            lambda losses, byte_lengths: losses.mean() / math.log(2),
        ),
        Mistake(
            "mean of ratios",
            "a mean of the tokens' own ratios counts a token of one byte like one of eight. Take a sum over a sum.",
            _bits_mean_of_ratios,
        ),
        Mistake(
            "ends left out",
            "the ending symbol has no bytes, but its loss was paid: it belongs to the sum.",
            _bits_without_ends,
        ),
    ),
    alternatives=(_bits_by_means,),
    hints=(
        "The whole loss of the text over the whole length of the text.",
        "losses.sum() is in nats; divide by math.log(2) for bits.",
    ),
)
