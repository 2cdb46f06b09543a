"""Checks of chapter 14: assembling GPTOSS.

Shapes: C model width, F ffn width, E experts, T tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss.model.attention import count_visible_pairs

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "14_assembly"

State = dict[str, Tensor]
Windows = Sequence[int | None]


# 1. Find the bug ------------------------------------------------------------------------------------------------------


def _state(layers: int, experts: int, seed: int, backwards: bool = False) -> State:
    """Separate experts with their neighbours in a state dict, in the order of construction or in the opposite one."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {"embed.weight": torch.randn(5, 2, generator=generator)}
    for layer in range(layers):
        state[f"blocks.{layer}.moe.router.weight"] = torch.randn(experts, 2, generator=generator)
        for e in range(experts):
            for name, shape in (("w1", (3, 2)), ("w3", (3, 2)), ("w2", (2, 3))):
                key = f"blocks.{layer}.moe.experts.{e}.{name}.weight"
                state[key] = torch.randn(shape, generator=generator)
        for name, shape in (("w1", (3, 2)), ("w3", (3, 2)), ("w2", (2, 3))):
            key = f"blocks.{layer}.moe.shared.0.{name}.weight"
            state[key] = torch.randn(shape, generator=generator)
    return dict(reversed(state.items())) if backwards else state


def _stack(state: State, layer: int, which: str) -> Tensor:
    prefix = f"blocks.{layer}.moe.experts."
    count = 1 + max(int(n[len(prefix) :].split(".")[0]) for n in state if n.startswith(prefix))
    return torch.stack([state[f"{prefix}{e}.{which}.weight"] for e in range(count)])


def _stack_as_given(state: State, layer: int, which: str) -> Tensor:
    names = sorted(n for n in state if n.startswith(f"blocks.{layer}"))
    return torch.stack([state[n] for n in names if ".experts." in n and n.endswith(f"{which}.weight")])  # fmt: skip


def _stack_sorted_words(state: State, layer: int, which: str) -> Tensor:
    names = sorted(n for n in state if n.startswith(f"blocks.{layer}.moe.experts."))
    return torch.stack([state[n] for n in names if n.endswith(f"{which}.weight")])


def _stack_without_dot(state: State, layer: int, which: str) -> Tensor:
    names = [n for n in state if n.startswith(f"blocks.{layer}") and ".experts." in n]
    names = sorted(names, key=lambda n: [int(p) if p.isdigit() else p for p in n.split(".")])
    return torch.stack([state[n] for n in names if n.endswith(f"{which}.weight")])


def _stack_in_order_of_the_dictionary(state: State, layer: int, which: str) -> Tensor:
    prefix = f"blocks.{layer}.moe.experts."
    return torch.stack([t for n, t in state.items() if n.startswith(prefix) and n.endswith(f"{which}.weight")])  # fmt: skip


def _stack_by_counting_up(state: State, layer: int, which: str) -> Tensor:
    """Right, and written differently: asks for expert after expert until there is none."""
    found: list[Tensor] = []
    while (key := f"blocks.{layer}.moe.experts.{len(found)}.{which}.weight") in state:
        found.append(state[key])
    return torch.stack(found)


def _stack_trial(
    label: str, layers: int, experts: int, layer: int, which: str, backwards: bool = False
) -> Trial:
    return Trial(label, lambda: (_state(layers, experts, 0, backwards), layer, which))


check_stacked_experts = Exercise(
    function="stacked_experts",
    title="Find the bug",
    dots=2,
    minutes=15,
    reference=_stack,
    trials=(
        _stack_trial("2 layers of 4 experts", 2, 4, 1, "w1"),
        _stack_trial("2 layers of 12 experts", 2, 12, 0, "w3"),
        _stack_trial("layer 1 of 12, 4 experts", 12, 4, 1, "w2"),
        _stack_trial("layer 1 of 12, 12 experts", 12, 12, 1, "w1"),
        _stack_trial("one expert", 1, 1, 0, "w2"),
        _stack_trial("a dictionary in another order", 2, 12, 1, "w1", backwards=True),
    ),
    mistakes=(
        Mistake(
            "as given",
            "two things are wrong for large models. Print the names that it stacks for layer 1 of 12 layers with 12 experts.",
            _stack_as_given,
        ),
        Mistake(
            "sorted as words",
            "sorted as words, expert 10 comes before expert 2.",
            _stack_sorted_words,
        ),
        Mistake(
            "prefix without its dot",
            "blocks.1 is also the beginning of blocks.10 and blocks.11.",
            _stack_without_dot,
        ),
        Mistake(
            "order of the dictionary",
            "a dictionary's order is that in which it was filled. The expert's number is in its name.",
            _stack_in_order_of_the_dictionary,
        ),
    ),
    alternatives=(_stack_by_counting_up,),
    hints=(
        "Try it with 12 layers, and with 12 experts.",
        "Take the expert's number out of the name, as an int.",
        "End the prefix with a dot: blocks.1. is no beginning of blocks.10.",
    ),
)


# 2. The FLOPs of another model ----------------------------------------------------------------------------------------


def _flops(
    V: int, C: int, H: int, K: int, D: int, F: int, E: int, k: int,
    windows: Windows, T: int, tied: bool,
) -> float:  # fmt: skip
    layer = 2 * H * D * C + 2 * K * D * C + E * C + (k + 1) * 3 * C * F
    pairs = sum(count_visible_pairs(T, None if w is None else min(w, T)) for w in windows)
    return 6 * (V * C + len(windows) * layer) + 12 * H * D * pairs / T


def _flops_slip(kind: str, *sizes) -> float:  # type: ignore[no-untyped-def]  # the exercise's arguments
    V, C, H, K, D, F, E, k, windows, T, tied = sizes
    right = _flops(*sizes)
    layers = len(windows)
    if kind == "embedding":
        return right + (0 if tied else 6 * V * C)
    if kind == "square":
        return _flops(V, C, H, K, D, F, E, k, (), T, tied) + 6 * layers * (
            2 * H * D * C + 2 * K * D * C + E * C + (k + 1) * 3 * C * F
        ) + 12 * H * D * layers * T  # fmt: skip
    if kind == "forward":
        return right / 3
    if kind == "stored":
        return right + 6 * layers * (E - k) * 3 * C * F
    if kind == "shared":
        return right - 6 * layers * 3 * C * F
    if kind == "width":
        return right + 12 * (C - H * D) * sum(count_visible_pairs(T, None if w is None else min(w, T)) for w in windows) / T  # fmt: skip
    long = sum(count_visible_pairs(T, None) if w is None else w * (w + 1) // 2 + (T - w) * w for w in windows)  # fmt: skip
    short = sum(count_visible_pairs(T, None if w is None else min(w, T)) for w in windows)
    return right + 12 * H * D * (long - short) / T


def _flops_slow(
    V: int, C: int, H: int, K: int, D: int, F: int, E: int, k: int,
    windows: Windows, T: int, tied: bool,
) -> float:  # fmt: skip
    """Right, and written differently: forward FLOPs of each product and query, three times."""
    forward = 2.0 * V * C
    for w in windows:
        forward += 2 * C * (H * D + 2 * K * D) + 2 * H * D * C + 2 * C * E
        forward += (k + 1) * (2 * C * F + 2 * C * F + 2 * F * C)
        seen = sum(i + 1 if w is None else min(i + 1, w) for i in range(T)) / T
        forward += 2 * H * D * seen + 2 * seen * H * D
    return 3 * forward


def _slip(kind: str):  # type: ignore[no-untyped-def]  # a function with the exercise's arguments
    def answer(V, C, H, K, D, F, E, k, windows, T, tied):  # type: ignore[no-untyped-def]  # as above
        return _flops_slip(kind, V, C, H, K, D, F, E, k, windows, T, tied)

    return answer


_PRODUCTION = (128_000, 768, 8, 4, 96, 1536, 8, 2)

check_flops_per_token = Exercise(
    function="flops_per_token",
    title="The FLOPs of another model",
    dots=2,
    minutes=15,
    reference=_flops,
    trials=(
        Trial("the production model", lambda: (*_PRODUCTION, (128, None) * 6, 4096, True)),
        Trial("a head of its own", lambda: (*_PRODUCTION, (128, None) * 6, 4096, False)),
        Trial("a window longer than the text", lambda: (*_PRODUCTION, (128, 64, None), 100, True)),
        Trial(
            "heads wider than the model", lambda: (50, 24, 4, 2, 8, 40, 4, 1, (7, None), 33, True)
        ),
        Trial("one token", lambda: (50, 32, 4, 4, 8, 40, 4, 4, (None,), 1, False)),
    ),
    mistakes=(
        Mistake(
            "embedding counted",
            "an embedding that is not the head is looked up, and a look-up multiplies nothing.",
            _slip("embedding"),
        ),
        Mistake(
            "all pairs",
            "T keys for each query are too many: a query sees itself and what is before it, through its window.",
            _slip("square"),
        ),
        Mistake(
            "forward only",
            "the backward pass makes two products for each one of the forward pass.",
            _slip("forward"),
        ),
        Mistake("all experts", "a token goes through k of the E routed experts.", _slip("stored")),
        Mistake(
            "shared expert missing",
            "every token goes through the shared expert too.",
            _slip("shared"),
        ),
        Mistake(
            "C for H·D",
            "scores and weighed values are products over H·D numbers, which need not be C.",
            _slip("width"),
        ),
        Mistake(
            "window longer than the text",
            "a window that is longer than the text shows no more than the text.",
            _slip("long window"),
        ),
    ),
    alternatives=(_flops_slow,),
    hints=(
        "6 FLOPs for each parameter of a matrix that one token is multiplied with.",
        "12·H·D FLOPs for each visible pair; divide the pairs of a sequence by T.",
        "Matrices of a layer: q, k, v, o, the router, and three for each of k + 1 experts.",
    ),
)


# 3. How much faster must a part be? -----------------------------------------------------------------------------------


def _needed(step: float, part: float, factor: float) -> float:
    share = part / step
    rest = 1 / factor - (1 - share)
    return share / rest if rest > 0 else 0.0


def _needed_amdahl(step: float, part: float, factor: float) -> float:
    """Right, and written differently: the formula for the whole, solved for the part."""
    s = part / step
    bottom = 1 - factor * (1 - s)
    return factor * s / bottom if bottom > 0 else 0.0


def _needed_at_the_limit(step: float, part: float, factor: float) -> float:
    left = step / factor - (step - part)
    return 0.0 if left < 0 else part / left


check_needed_speedup = Exercise(
    function="needed_speedup",
    title="How much faster must a part be?",
    dots=1,
    minutes=5,
    reference=_needed,
    trials=(
        Trial("a third of the step, 1.25 times", lambda: (240.0, 80.0, 1.25)),
        Trial("a tenth of the step, 1.05 times", lambda: (100.0, 10.0, 1.05)),
        Trial("a tenth of the step, twice", lambda: (100.0, 10.0, 2.0)),
        Trial("half of the step, twice: the part may take no time", lambda: (100.0, 50.0, 2.0)),
        Trial("the part is the step", lambda: (100.0, 100.0, 3.0)),
    ),
    mistakes=(
        Mistake(
            "the factor itself",
            "a part that is a share of the step must gain more than the step.",
            lambda step, part, factor: factor,
        ),
        Mistake(
            "factor divided by the share",
            "dividing by the share is right for small gains only; write down what the part may still take.",
            lambda step, part, factor: 1 + (factor - 1) * step / part,
        ),
        Mistake(
            "impossible not noticed",
            "when the rest alone takes longer than the new step, no speed of the part is enough: return 0.",
            lambda step, part, factor: part / (step / factor - (step - part)),
        ),
        Mistake(
            "the limit itself",
            "when the rest alone takes as long as the new step, the part would have to take no time: no speed is "
            "enough, return 0.",
            _needed_at_the_limit,
        ),
    ),
    alternatives=(_needed_amdahl,),
    hints=(
        "The new step is step / factor. The rest, step − part, stays as it is.",
        "What the part may still take is the difference of the two; if it is not positive, return 0.",
    ),
)


# 4. Somebody else's utilisation ---------------------------------------------------------------------------------------


def _mfu(
    claimed: float, sheet: float, P: int, active: int, C: int, L: int, T: int, pairs: int, rate: float
) -> float:  # fmt: skip
    forward = 2 * P + 4 * C * T * L
    return claimed * sheet / (4 * forward) * (6 * active + 12 * C * pairs / T) / rate


def _mfu_in_steps(
    claimed: float, sheet: float, P: int, active: int, C: int, L: int, T: int, pairs: int, rate: float
) -> float:  # fmt: skip
    """Right, and written differently: seconds of one sequence."""
    seconds = T * (8 * P + 16 * C * T * L) / (claimed * sheet)
    return (6 * active * T + 12 * C * pairs) / seconds / rate


_PAIRS = 6 * count_visible_pairs(4096, None) + 6 * count_visible_pairs(4096, 128)
_SIZES = (501_836_640, 247_032_672, 768, 12, 4096, _PAIRS)

check_book_mfu = Exercise(
    function="book_mfu",
    title="Somebody else's utilisation",
    dots=2,
    minutes=15,
    reference=_mfu,
    trials=(
        Trial("the production model", lambda: (0.9, 989e12, *_SIZES, 790e12)),
        Trial("another card", lambda: (0.5, 312e12, *_SIZES, 270e12)),
        Trial("a small model", lambda: (0.3, 1e12, 90_000, 60_000, 48, 4, 29, 1100, 9e11)),
        Trial(
            "a dense one, nearly all attention",
            lambda: (0.4, 1e12, 1000, 1000, 64, 2, 512, 2 * 131_328, 1e12),
        ),
    ),
    mistakes=(
        Mistake(
            "data sheet kept",
            "their share was of the data sheet's rate; yours is of the rate that was reached.",
            lambda claimed, sheet, P, active, C, L, T, pairs, rate: (
                _mfu(claimed, sheet, P, active, C, L, T, pairs, rate) * rate / sheet
            ),
        ),
        Mistake(
            "recomputation left in",
            "they counted four passes' worth, forward, twice that backward, and forward again; you count three.",
            lambda claimed, sheet, P, active, C, L, T, pairs, rate: (
                _mfu(claimed, sheet, P, active, C, L, T, pairs, rate) * 4 / 3
            ),
        ),
        Mistake(
            "stored parameters kept",
            "this book counts the parameters that a token uses.",
            lambda claimed, sheet, P, active, C, L, T, pairs, rate: _mfu(
                claimed, sheet, P, P, C, L, T, pairs, rate
            ),
        ),
        Mistake(
            "pairs not divided by T",
            "pairs are those of a whole sequence: divide by T for one token.",
            lambda claimed, sheet, P, active, C, L, T, pairs, rate: _mfu(
                claimed, sheet, P, active, C, L, T, pairs * T, rate
            ),
        ),
    ),
    alternatives=(_mfu_in_steps,),
    hints=(
        "First find the tokens a second: their FLOP/s are claimed · sheet.",
        "What they count for a token: forward 2P + 4CTL, and four times that in all.",
        "What you count: 6 · active + 12C · pairs / T.",
    ),
)


# 5. Needed, or done? --------------------------------------------------------------------------------------------------


def _done(T: int, window: int | None, block: int) -> float:
    W = T if window is None else min(window, T)
    tiles = math.ceil(T / block)
    done = 0
    for i in range(tiles):
        rows = min(block, T - i * block)
        first = max(i * block - W + 1, 0) // block
        done += rows * (min((i + 1) * block, T) - first * block)
    return done / count_visible_pairs(T, None if window is None else W)


def _done_by_tile(T: int, window: int | None, block: int, slip: str = "") -> float:
    """By asking every tile of a row: right without a slip, and written differently."""
    W = T if window is None else window
    edges = [(start, min(start + block, T)) for start in range(0, T, block)]
    done = 0
    for q0, q1 in edges:
        lowest = max(0, q0 - W + (0 if slip == "window one longer" else 1))
        for k0, k1 in edges[lowest // block : q0 // block + 1]:
            if slip == "whole last tiles":
                done += block * block
            elif slip == "only full rows":
                done += (q1 - q0) * (k1 - k0) if k0 >= q1 - W or k0 == q0 else 0
            else:
                done += (q1 - q0) * (k1 - k0)
    return done / count_visible_pairs(T, None if window is None else min(window, T))


def _done_slip(slip: str):  # type: ignore[no-untyped-def]  # a function with the exercise's arguments
    return lambda T, window, block: _done_by_tile(T, window, block, slip)


check_done_by_needed = Exercise(
    function="done_by_needed",
    title="Needed, or done?",
    dots=3,
    minutes=25,
    reference=_done,
    trials=(
        Trial("a global layer, 4,096 tokens, tiles of 64", lambda: (4096, None, 64)),
        Trial("a window of 128, tiles of 64", lambda: (4096, 128, 64)),
        Trial("a window of 129, tiles of 64", lambda: (4096, 129, 64)),
        Trial("a last tile that is smaller", lambda: (1000, 100, 64)),
        Trial("a window longer than the text", lambda: (50, 128, 16)),
        Trial("tiles longer than the text", lambda: (10, 4, 64)),
        Trial("tiles of one pair", lambda: (77, 9, 1)),
        Trial("100,000 tokens", lambda: (100_000, 128, 128)),
    ),
    mistakes=(
        Mistake(
            "whole last tiles",
            "at the end of the text a tile is smaller: count its rows and columns.",
            _done_slip("whole last tiles"),
        ),
        Mistake(
            "window one longer",
            "the first query of a tile sees W keys, itself included: the earliest is at start − W + 1.",
            _done_slip("window one longer"),
        ),
        Mistake(
            "tiles of the last query only",
            "a tile counts if any of its queries sees any of its keys; the first query sees furthest back.",
            _done_slip("only full rows"),
        ),
        Mistake(
            "nothing skipped",
            "tiles without a visible pair are skipped.",
            lambda T, window, block: T * T / count_visible_pairs(T, None if window is None else min(window, T)),
        ),
    ),
    alternatives=(_done_by_tile,),
    hints=(
        "Go through the rows of tiles. A row's queries are start to end − 1, with end = min(start + block, T).",
        "Its keys reach from the tile that holds start − W + 1 (or 0) to the tile of the queries themselves.",
        "Round the earliest key down to a multiple of block; the last key is end − 1.",
    ),
)  # fmt: skip
