"""Checks of chapter 6: sliding windows and alternation.

Shapes: B batch, T queries, S keys, W window, H heads, D head_dim.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss.model.attention import causal_attention, visible_keys
from gptoss.model.layer_store import LayerStore

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "06_windows"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. How far back? -----------------------------------------------------------------------------------------------------


def _field_by_masks(windows: Sequence[int | None], position: int) -> int:
    index = torch.arange(position + 1)
    level = index == position
    for window in reversed(windows):
        level = (level.double() @ visible_keys(index, index, window).double()) > 0
    return int(level.sum())


def _field(
    windows: Sequence[int | None],
    position: int,
    *,
    short: int = 1,
    itself: int = 1,
    clipped: bool = True,
    widest: bool = False,
) -> int:
    if None in windows:
        return position + 1
    steps = [window - short for window in windows if window is not None]
    back = max(steps, default=0) if widest else sum(steps)
    return (min(back, position) if clipped else back) + itself


def _field_global_ignored(windows: Sequence[int | None], position: int) -> int:
    return _field([window for window in windows if window is not None], position)


def _field_trial(label: str, windows: tuple[int | None, ...], position: int) -> Trial:
    return Trial(label, lambda: (list(windows), position))


check_receptive_field = Exercise(
    function="receptive_field",
    title="How far back?",
    dots=1,
    minutes=10,
    reference=_field_by_masks,
    trials=(
        _field_trial("three windows of 4, position 100", (4, 4, 4), 100),
        _field_trial("one window of 128, position 999", (128,), 999),
        _field_trial("a window and a global layer, position 50", (4, None), 50),
        _field_trial("a global layer below two windows of unequal width", (None, 3, 7), 40),
        _field_trial("windows of 2, 9 and 5, position 60", (2, 9, 5), 60),
        _field_trial("twelve windows of 128, but only 300 tokens", (128,) * 12, 299),
        _field_trial("windows of 1, position 7", (1, 1, 1), 7),
        _field_trial("the first token", (5, 5), 0),
    ),
    mistakes=(
        Mistake(
            "W a layer",
            "each layer counted with W steps back. The window counts the query itself, so the oldest key is W − 1 back.",
            lambda windows, position: _field(windows, position, short=0),
        ),
        Mistake(
            "itself forgotten",
            "the position itself is missing. It is n(W − 1) steps back, and one token more.",
            lambda windows, position: (
                _field(windows, position, itself=0) if None not in windows else position + 1
            ),
        ),
        Mistake(
            "before the start",
            "more tokens than there are: position 299 has only 300 tokens to depend on.",
            lambda windows, position: _field(windows, position, clipped=False),
        ),
        Mistake(
            "the widest only",
            "only the widest window was counted. Each layer reads what the layer below has already mixed: steps add up.",
            lambda windows, position: _field(windows, position, widest=True),
        ),
        Mistake(
            "global layers left out",
            "a global layer was skipped. One of them opens the whole past, wherever it stands.",
            _field_global_ignored,
        ),
    ),
    alternatives=(
        _field,
        lambda windows, position: (
            position
            - max(0, position - sum((position + 1 if w is None else w) - 1 for w in windows))
            + 1
        ),
    ),
    hints=(
        "How many steps back does one windowed layer allow? Two of them?",
        "Steps of 0 … W − 1 add up over the layers; a global layer allows any step.",
        "min(Σ(W − 1), position) + 1, or position + 1 as soon as one layer is global.",
    ),
)


# 2. What a block-sparse kernel computes -------------------------------------------------------------------------------


def _band_by_grid(T: int, W: int, t: int) -> int:
    index = torch.arange(T)
    seen = visible_keys(index, index, W)
    computed = torch.zeros(T, T, dtype=torch.bool)
    for first in range(0, T, t):
        keys = seen[first : first + t].any(0).nonzero()
        computed[first : first + t, int(keys.min()) : int(keys.max()) + 1] = True
    return int(computed.sum())


def _band(
    T: int, W: int, t: int, *, extra: int = 0, ragged: bool = True, start: bool = True
) -> int:
    total = 0
    for first in range(0, T, t):
        last = min(first + t, T) if ragged else first + t
        oldest = first - W + 1 - extra
        total += (last - first) * (last - (max(0, oldest) if start else oldest))
    return total


check_band_pairs = Exercise(
    function="band_pairs",
    title="What a block-sparse kernel computes",
    dots=2,
    minutes=15,
    reference=_band_by_grid,
    trials=(
        Trial("T = 24, W = 6, blocks of 4", lambda: (24, 6, 4)),
        Trial("T = 300, W = 128, blocks of 64, the last one shorter", lambda: (300, 128, 64)),
        Trial("T = 17, W = 5, blocks of 1", lambda: (17, 5, 1)),
        Trial("T = 10, W = 1, blocks of 4", lambda: (10, 1, 4)),
        Trial("T = 9, W = 50, blocks of 3", lambda: (9, 50, 3)),
        Trial("T = 5, W = 3, one block of 64", lambda: (5, 3, 64)),
    ),
    mistakes=(
        Mistake(
            "one key too many",
            "each block meets one key too many. The first query's oldest key is W − 1 before it: t + W − 1 keys in all.",
            lambda T, W, t: _band(T, W, t, extra=1),
        ),
        Mistake(
            "last block full",
            "the last block was counted with t queries. It may be shorter.",
            lambda T, W, t: _band(T, W, t, ragged=False),
        ),
        Mistake(
            "keys before the start",
            "the first blocks met keys at negative positions. There are none: stop at 0.",
            lambda T, W, t: _band(T, W, t, start=False),
        ),
        Mistake(
            "the approximation",
            "this is T·(t + W − 1), the chapter's approximation. Blocks near the start meet fewer keys, and so does a short last block.",
            lambda T, W, t: T * (t + W - 1),
        ),
        Mistake(
            "visible pairs only",
            "these are the visible pairs. A block multiplies a rectangle, and part of it is masked afterwards.",
            lambda T, W, t: _band(T, W, 1),
        ),
        Mistake(
            "the whole square",
            "this is what the dense form computes, T². A block needs only the keys that one of its queries sees.",
            lambda T, W, t: T * T,
        ),
    ),
    alternatives=(
        _band,
        lambda T, W, t: sum(
            min(T, (i // t + 1) * t) - max(0, i // t * t - W + 1) for i in range(T)
        ),
    ),
    hints=(
        "Go block by block. Which is the oldest key that the block's first query sees?",
        "A block of queries first … last − 1 needs the keys max(0, first − W + 1) … last − 1.",
        "Add up (last − first) · (last − oldest), with last = min(first + t, T).",
    ),
)


# 3. Write into a ring -------------------------------------------------------------------------------------------------


def _write_reference(ring: Tensor, seen: int, new: Tensor) -> Tensor:
    """Slot by slot: the newest position that belongs there, or what was there."""
    W, end = len(ring), seen + len(new)
    rows = []
    for slot in range(W):
        newest = end - 1 - (end - 1 - slot) % W
        rows.append(new[newest - seen] if newest >= seen else ring[slot])
    return torch.stack(rows)


def _write(
    ring: Tensor,
    seen: int,
    new: Tensor,
    *,
    shift: int = 0,
    head: bool = False,
    restart: bool = False,
    wrap: bool = True,
) -> Tensor:
    W, end = len(ring), seen + len(new)
    kept = new[:W] if head else new[max(0, len(new) - W) :]
    positions = torch.arange(len(kept)) + (0 if restart else end - len(kept)) + shift
    slots = positions % W if wrap else positions.clamp(max=W - 1)
    out = list(ring.unbind(0))
    for row, slot in enumerate(slots.tolist()):
        out[slot] = kept[row]
    return torch.stack(out)


def _write_by_shifting(ring: Tensor, seen: int, new: Tensor) -> Tensor:
    """The last W in order of time, as a queue that moves: no ring at all."""
    return torch.cat((ring, new))[len(new) :]


def _write_whole(ring: Tensor, seen: int, new: Tensor) -> Tensor:
    """Every row at once, also where two of them share a slot."""
    out = ring.clone()
    out[torch.arange(seen, seen + len(new)) % len(ring)] = new
    return out


def _write_one_by_one(ring: Tensor, seen: int, new: Tensor) -> Tensor:
    rows = list(ring.unbind(0))
    for place, row in enumerate(new.unbind(0)):
        rows[(seen + place) % len(rows)] = row
    return torch.stack(rows)


def _write_trial(
    label: str, W: int, seen: int, T: int, seed: int, dtype: torch.dtype = torch.float32
) -> Trial:
    def make() -> tuple[Tensor, int, Tensor]:
        ring = _numbers(W, 3, seed=seed, dtype=dtype).requires_grad_()
        new = _numbers(T, 3, seed=seed + 1, dtype=dtype).requires_grad_()
        return ring, seen, new

    return Trial(label, make)


check_ring_write = Exercise(
    function="ring_write",
    title="Write into a ring",
    dots=2,
    minutes=20,
    reference=_write_reference,
    trials=(
        _write_trial("W = 5, 3 new after 0", 5, 0, 3, 0),
        _write_trial("W = 5, one new after 5: the ring is full", 5, 5, 1, 10),
        _write_trial("W = 8, 5 new after 6: over the end", 8, 6, 5, 20),
        _write_trial("W = 4, 7 new after 0: longer than the ring", 4, 0, 7, 30),
        _write_trial("W = 4, 16 new after 9", 4, 9, 16, 40),
        _write_trial("W = 8, 8 new after 3, float64", 8, 3, 8, 50, torch.float64),
        _write_trial("W = 1, 2 new after 1", 1, 1, 2, 60),
        _write_trial("nothing new", 6, 4, 0, 70),
    ),
    mistakes=(
        Mistake(
            "one slot on",
            "everything stands one slot too far. The first of the new positions is position number `seen`, and goes to slot seen mod W.",
            lambda ring, seen, new: _write(ring, seen, new, shift=1),
        ),
        Mistake(
            "the head of a long chunk",
            "of a chunk longer than the ring the first W stayed. The last W are needed.",
            lambda ring, seen, new: _write(ring, seen, new, head=True),
        ),
        Mistake(
            "from slot 0",
            "the write starts at slot 0 each time. It goes on where the last one ended.",
            lambda ring, seen, new: _write(ring, seen, new, restart=True),
        ),
        Mistake(
            "no wrap",
            "behind the last slot comes slot 0 again.",
            lambda ring, seen, new: _write(ring, seen, new, wrap=False),
        ),
        Mistake(
            "shifted",
            "the old keys were moved. A ring moves nothing: position p stays in slot p mod W until p + W overwrites it.",
            _write_by_shifting,
        ),
        Mistake(
            "a long chunk whole",
            "all rows of a chunk longer than the ring were written, several into one slot. Which of them stays is not promised, and all get the slot's gradient. Write the last W alone.",
            _write_whole,
        ),
    ),
    alternatives=(_write, _write_one_by_one),
    hints=(
        "Which positions do the new keys have, and which of them will still be needed?",
        "The new positions are seen … seen + T − 1; only the last W of them stay.",
        "ring.index_copy(0, positions % W, new[-W:]) returns a new tensor.",
    ),
)


# 4. Read a ring in order of time --------------------------------------------------------------------------------------


def _read_reference(ring: Tensor, seen: int) -> Tensor:
    store = LayerStore(len(ring), len(ring), ring[None, None, :0])
    store.k = store.v = ring[None, None]
    store.seen = seen
    return store.read()[0][0, 0]


def _read_rolled(ring: Tensor, seen: int) -> Tensor:
    return ring[:seen] if seen <= len(ring) else ring.roll(-(seen % len(ring)), 0)


def _read_backwards(ring: Tensor, seen: int) -> Tensor:
    return ring[:seen] if seen <= len(ring) else ring.roll(seen % len(ring), 0)


def _read_one_late(ring: Tensor, seen: int) -> Tensor:
    return ring[:seen] if seen <= len(ring) else ring.roll(-((seen + 1) % len(ring)), 0)


def _read_trial(
    label: str, W: int, seen: int, seed: int, dtype: torch.dtype = torch.float32
) -> Trial:
    def make() -> tuple[Tensor, int]:
        return _numbers(W, 2, seed=seed, dtype=dtype).requires_grad_(), seen

    return Trial(label, make)


check_ring_read = Exercise(
    function="ring_read",
    title="Read a ring in order of time",
    dots=1,
    minutes=10,
    reference=_read_reference,
    trials=(
        _read_trial("W = 5 after 7 positions", 5, 7, 0),
        _read_trial("W = 5 after 3: two slots were never written", 5, 3, 1),
        _read_trial("W = 8 after 8: exactly full", 8, 8, 2),
        _read_trial("W = 8 after 9: the first wrap", 8, 9, 3),
        _read_trial("W = 4 after 103, float64", 4, 103, 4, torch.float64),
        _read_trial("W = 1 after 9", 1, 9, 5),
        _read_trial("nothing written yet", 4, 0, 6),
    ),
    mistakes=(
        Mistake(
            "memory order",
            "the keys came back as they lie in memory. After a wrap the oldest stands in slot seen mod W.",
            lambda ring, seen: ring[:seen],
        ),
        Mistake(
            "turned the wrong way",
            "the ring was turned the wrong way. Slot seen mod W must come to the front.",
            _read_backwards,
        ),
        Mistake(
            "one late",
            "the oldest key came out last. After `seen` positions the next write would go to slot seen mod W: that slot holds the oldest.",
            _read_one_late,
        ),
        Mistake(
            "empty slots too",
            "slots that nothing was written to came back as keys. Before the ring is full there are only `seen` of them.",
            lambda ring, seen: ring.roll(-(seen % len(ring)), 0) if seen > len(ring) else ring,
        ),
    ),
    alternatives=(
        _read_rolled,
        lambda ring, seen: torch.cat((ring[seen % len(ring) :], ring[: seen % len(ring)]))[
            max(0, len(ring) - seen) :
        ],
    ),
    hints=(
        "Which positions does the ring hold? Write them down for W = 5 and seen = 7.",
        "Positions max(0, seen − W) … seen − 1, position p in slot p mod W.",
        "Index the ring with a tensor of slots.",
    ),
)


# 5. A prompt in chunks ------------------------------------------------------------------------------------------------


def _chunks_reference(q: Tensor, k: Tensor, v: Tensor, window: int, chunk: int) -> Tensor:
    heads = (x[None, None] for x in (q, k, v))
    return causal_attention(*heads, window, backend="reference")[0, 0]


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    chunk: int,
    *,
    cut_first: bool = False,
    keep: int = 0,
    aligned: str = "last",
    extra: int = 0,
    scale: bool = True,
) -> Tensor:
    keys, values, out = k[:0], v[:0], []
    for first in range(0, len(q), chunk):
        last = min(first + chunk, len(q))
        keys = torch.cat((keys, k[first:last]))
        values = torch.cat((values, v[first:last]))
        stays = window + keep
        if cut_first:
            keys, values = keys[-stays:], values[-stays:]
        start = last - len(keys) if aligned == "last" else first
        distance = torch.arange(first, last)[:, None] - torch.arange(start, start + len(keys))
        visible = (distance >= 0) & (distance < window + extra)
        scores = q[first:last] @ keys.T * (q.shape[1] ** -0.5 if scale else 1.0)
        out.append(torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ values)
        keys, values = (
            keys[len(keys) - min(stays, len(keys)) :],
            values[len(values) - min(stays, len(values)) :],
        )
    return torch.cat(out)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, window: int, chunk: int) -> Tensor:
    """Right, and written differently: one query at a time over its own slice of the keys."""
    rows = []
    for i in range(len(q)):
        band = slice(max(0, i - window + 1), i + 1)
        p = torch.softmax(k[band] @ q[i] / math.sqrt(q.shape[1]), 0)
        rows.append(p @ v[band])
    return torch.stack(rows)


def _chunk_trial(
    label: str,
    T: int,
    window: int,
    chunk: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
    size: float = 1.0,
) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor, int, int]:
        q, k, v = (size * _numbers(T, 6, seed=seed + n, dtype=dtype) for n in range(3))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), window, chunk

    return Trial(label, make)


check_attend_in_chunks = Exercise(
    function="attend_in_chunks",
    title="A prompt in chunks",
    dots=3,
    minutes=30,
    reference=_chunks_reference,
    trials=(
        _chunk_trial("12 tokens, W = 4, one chunk of 12", 12, 4, 12, 0),
        _chunk_trial("11 tokens, W = 4, chunks of 3", 11, 4, 3, 10),
        _chunk_trial("16 tokens, W = 4, chunks of 7: longer than the window", 16, 4, 7, 20),
        _chunk_trial("9 tokens, W = 4, one at a time, float32", 9, 4, 1, 30, torch.float32),
        _chunk_trial("7 tokens, W = 1, chunks of 2", 7, 1, 2, 40),
        _chunk_trial("6 tokens, W = 50, chunks of 4", 6, 50, 4, 50),
        _chunk_trial("large scores, chunks of the window's size", 15, 5, 5, 60, size=5.0),
    ),
    mistakes=(
        Mistake(
            "cut before attending",
            "the keys were cut to the last W before the chunk's own queries had looked. Its first queries still need older ones: attend over old and new, then cut.",
            lambda q, k, v, window, chunk: _in_chunks(q, k, v, window, chunk, cut_first=True),
        ),
        Mistake(
            "window off by one",
            "the window has one key too many. W keys, the query's own included: 0 ≤ i − j < W. (And keep as many as that needs.)",
            lambda q, k, v, window, chunk: _in_chunks(q, k, v, window, chunk, extra=1, keep=1),
        ),
        Mistake(
            "nothing kept",
            "each chunk saw its own keys alone. The last W of what came before belong in front of them.",
            lambda q, k, v, window, chunk: _in_chunks(q, k, v, window, chunk, keep=-window),
        ),
        Mistake(
            "positions of the keys",
            "right for the first chunk only: after it the first key at hand no longer stands where the chunk's first query stands. Number the keys by position, from last − len(keys).",
            lambda q, k, v, window, chunk: _in_chunks(q, k, v, window, chunk, aligned="first"),
        ),
        Mistake(
            "no scale",
            "the scores were not divided by √D.",
            lambda q, k, v, window, chunk: _in_chunks(q, k, v, window, chunk, scale=False),
        ),
    ),
    alternatives=(
        _in_chunks,
        _by_rows,
        lambda q, k, v, window, chunk: _in_chunks(q, k, v, window, chunk, keep=-1),
    ),
    hints=(
        "Carry two tensors from chunk to chunk: the keys and the values of the last W positions, empty at first.",
        "In a chunk: put the new keys behind the old ones, mask by true positions, attend. Then cut to the last W.",
        "With `last` tokens done, the keys at hand have the positions last − len(keys) … last − 1.",
    ),
)


# 6. Find the bug ------------------------------------------------------------------------------------------------------


def _windowed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    extra: int = 0,
    aligned: str = "last",
    causal: bool = True,
) -> Tensor:
    T, S = q.shape[-2], k.shape[-2]
    start = S - T if aligned == "last" else 0
    distance = torch.arange(start, start + T)[:, None] - torch.arange(S)
    visible = distance < window + extra
    if causal:
        visible = visible & (distance >= 0)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ v


def _by_slices(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    T, S, rows = q.shape[-2], k.shape[-2], []
    for i in range(T):
        band = slice(max(0, i + S - T - window + 1), i + S - T + 1)
        s = torch.einsum("bhd,bhsd->bhs", q[:, :, i], k[:, :, band]) / math.sqrt(q.shape[-1])
        rows.append(torch.einsum("bhs,bhsd->bhd", s.softmax(-1), v[:, :, band]))
    return torch.stack(rows, 2)


def _bug_trial(
    label: str,
    T: int,
    S: int,
    window: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
    strided: bool = False,
) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor, int]:
        tensors = []
        for place, length in enumerate((T, S, S)):
            shape = (2, length, 3, 8) if strided else (2, 3, length, 8)
            x = _numbers(*shape, seed=seed + place, dtype=dtype)
            tensors.append((x.transpose(1, 2) if strided else x).requires_grad_())
        return tensors[0], tensors[1], tensors[2], window

    return Trial(label, make)


check_repaired_attention = Exercise(
    function="repaired_attention",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=lambda q, k, v, window: causal_attention(q, k, v, window, backend="blocked"),
    trials=(
        _bug_trial("9 tokens through a window of 4", 9, 9, 4, 0),
        _bug_trial("3 tokens through a window of 8: it hides nothing", 3, 3, 8, 10),
        _bug_trial("a window of 1: each token sees itself alone", 5, 5, 1, 20),
        _bug_trial("one new query over 9 keys, W = 4", 1, 9, 4, 30),
        _bug_trial(
            "strided, float32, 3 queries over 11 keys, W = 5", 3, 11, 5, 40, torch.float32, True
        ),
    ),
    mistakes=(
        Mistake(
            "window off by one",
            "the window has one key too many; short texts hide it. With a window of 1 a token must see itself alone: which distances are allowed then?",
            lambda q, k, v, window: _windowed(q, k, v, window, extra=1),
        ),
        Mistake(
            "window one short",
            "now the window has one key too few. W keys, the query's own included.",
            lambda q, k, v, window: _windowed(q, k, v, max(window - 1, 1)),
        ),
        Mistake(
            "the future seen",
            "the window is right, but the keys after the query are visible now. Both bounds are needed.",
            lambda q, k, v, window: _windowed(q, k, v, window, causal=False),
        ),
        Mistake(
            "window removed",
            "the window is gone: every earlier key is visible.",
            lambda q, k, v, window: _windowed(q, k, v, k.shape[-2] + 1),
        ),
    ),
    alternatives=(_windowed, _by_slices),
    hints=(
        "Write the mask down for T = S = 3 and window = 1.",
        "How many whole numbers d satisfy 0 ≤ d ≤ W?",
        "0 ≤ i − j < W.",
    ),
)
