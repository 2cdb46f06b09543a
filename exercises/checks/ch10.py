"""Checks for chapter 10, "One kernel, five versions"."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.kernels.reference import grouped_swiglu_reference

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "10_kernel"
TILE = 16  # rows of a tile in exercise 2


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. The table of row tiles --------------------------------------------------------------------------------------------


def _table(counts: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    tiles, start = (counts + m - 1) // m, counts.cumsum(0) - counts
    expert = torch.repeat_interleave(torch.arange(len(counts)), tiles)
    within = torch.arange(len(expert)) - (tiles.cumsum(0) - tiles)[expert]
    return expert, start[expert] + within * m, (start + counts)[expert]


def _table_by_hand(counts: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    found, first = [], 0
    for expert, n in enumerate(counts.tolist()):
        found += [(expert, first + place, first + n) for place in range(0, n, m)]
        first += n
    columns = torch.tensor(found, dtype=torch.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _boundary(counts: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    tiles = (counts + m - 1) // m
    last_row, last_tile = counts.cumsum(0), tiles.cumsum(0)
    i = torch.arange(int(tiles.sum()))
    expert = (last_tile[None, :] < i[:, None]).sum(1)
    first_row, first_tile = (last_row - counts)[expert], (last_tile - tiles)[expert]
    return expert, first_row + (i - first_tile) * m, last_row[expert]


def _with_tiles(tiles: Tensor, counts: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    start = counts.cumsum(0) - counts
    expert = torch.repeat_interleave(torch.arange(len(counts)), tiles)
    within = torch.arange(len(expert)) - (tiles.cumsum(0) - tiles)[expert]
    return expert, start[expert] + within * m, (start + counts)[expert]


def _table_trial(label: str, counts: list[int], m: int) -> Trial:
    return Trial(label, lambda: (torch.tensor(counts, dtype=torch.int64), m))


check_tiles_of = Exercise(
    function="tiles_of",
    title="Find the bug",
    dots=2,
    minutes=15,
    reference=_table,
    trials=(
        _table_trial("one expert with 40 rows, tiles of 16", [40], 16),
        _table_trial("three experts with 16, 5 and 33 rows", [16, 5, 33], 16),
        _table_trial("idle experts first, between and last", [0, 4, 0, 0, 7, 0], 4),
        _table_trial("one row each", [1, 1, 1, 1], 16),
        _table_trial("no rows at all", [0, 0], 16),
    ),
    mistakes=(
        Mistake(
            "a run that ends here still counted",
            "the first tile of an expert went to the expert before. If runs end one past their last tile, is a run "
            "that ends at tile i over when tile i begins?",
            _boundary,
        ),
        Mistake(
            "rounded down",
            "the last rows of a run that no tile divides have no tile. Round the number of tiles up.",
            lambda counts, m: _with_tiles(counts // m, counts, m),
        ),
        Mistake(
            "one tile too many",
            "a run that tiles divide, and an expert without rows, got a tile with nothing in it.",
            lambda counts, m: _with_tiles(counts // m + 1, counts, m),
        ),
        Mistake(
            "end of the tile",
            "the third result is the end of the expert's run, not of the tile: a program masks with row < end.",
            lambda counts, m: (*_table(counts, m)[:2], _table(counts, m)[1] + m),
        ),
        Mistake(
            "rows counted from the run's start",
            "rows are counted in the whole sorted array: an expert's run begins where the one before ended.",
            lambda counts, m: (
                _table(counts, m)[0],
                _table(counts, m)[1] - (counts.cumsum(0) - counts)[_table(counts, m)[0]],
                _table(counts, m)[2],
            ),
        ),
    ),
    alternatives=(_table_by_hand,),
    hints=(
        "Write down the tiles for 16 and 5 rows by hand. Whose is tile 1, and what does the function say?",
        "last_tile is 1 and 2 there. Tile 1 belongs to the second expert, because the first one's run is over at 1.",
        "Count the runs that end at or before tile i.",
    ),
)


# 2. An epilogue -------------------------------------------------------------------------------------------------------


def _sums(x: Tensor, expert: Tensor, row: Tensor, end: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    gate_up = x.new_zeros(2, x.shape[0], w1.shape[1])
    for e, first, last in zip(expert.tolist(), row.tolist(), end.tolist(), strict=True):
        mine = slice(first, min(first + TILE, last))
        gate_up[0, mine], gate_up[1, mine] = x[mine] @ w1[e].T, x[mine] @ w3[e].T
    return gate_up


def _clamped(
    x: Tensor, expert: Tensor, row: Tensor, end: Tensor, w1: Tensor, w3: Tensor, weights: Tensor
) -> Tensor:
    gate, up = _sums(x, expert, row, end, w1, w3)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return weights[:, None] * (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _clamped_slip(slip: str) -> Callable[..., Tensor]:
    def answer(
        x: Tensor, expert: Tensor, row: Tensor, end: Tensor, w1: Tensor, w3: Tensor, weights: Tensor
    ) -> Tensor:
        gate, up = _sums(x, expert, row, end, w1, w3)
        if slip != "no clamp":
            gate = gate.clamp(-7.0 if slip == "both sides" else None, 7.0)
            up = up.clamp(-7.0, 7.0)
        one = 0.0 if slip == "no one" else 1.0
        slope = 1.0 if slip == "plain sigmoid" else 1.702
        scale, out = weights[:, None], torch.zeros_like(gate)
        if slip == "no weight":
            scale = torch.ones_like(scale)
        if slip == "store past the run":
            for first, last in zip(row.tolist(), end.tolist(), strict=True):
                mine = slice(first, min(first + TILE, last))
                out[mine] = (weights[:, None] * (up + 1) * gate * torch.sigmoid(1.702 * gate))[mine]
                out[last : first + TILE] = 0.0  # loads past the run are masked, so both sums are 0
            return out
        if slip == "weight of the lane":
            lane = torch.zeros(x.shape[0], dtype=torch.int64)
            for first, last in zip(row.tolist(), end.tolist(), strict=True):
                mine = slice(first, min(first + TILE, last))
                lane[mine] = torch.arange(x.shape[0])[: len(lane[mine])]
            scale = weights[lane][:, None]
        return scale * (up + one) * gate * torch.sigmoid(slope * gate)

    return answer


def _one_by_one(
    x: Tensor, expert: Tensor, row: Tensor, end: Tensor, w1: Tensor, w3: Tensor, weights: Tensor
) -> Tensor:
    owner = torch.zeros(x.shape[0], dtype=torch.int64)
    for e, first, last in zip(expert.tolist(), row.tolist(), end.tolist(), strict=True):
        owner[first:last] = e
    gate = torch.einsum("rc,rfc->rf", x, w1[owner]).clamp(max=7.0)
    up = torch.einsum("rc,rfc->rf", x, w3[owner]).clamp(-7.0, 7.0)
    return torch.einsum("r,rf,rf->rf", weights, up + 1, gate / (1 + torch.exp(-1.702 * gate)))


def _epilogue_trial(
    label: str, counts: list[int], C: int, hidden: int, seed: int, backwards: bool = False
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        table = _table(torch.tensor(counts), TILE)
        if backwards:
            table = tuple(column.flip(0) for column in table)
        x = 1.5 * _numbers(sum(counts), C, seed=seed)
        w1, w3 = (_numbers(len(counts), hidden, C, seed=seed + i) for i in (1, 2))
        return x, *table, w1, w3, _numbers(sum(counts), seed=seed + 3).abs() + 0.1

    return Trial(label, make)


check_clamped_swiglu = Exercise(
    function="clamped_swiglu",
    title="An epilogue of your own",
    dots=3,
    minutes=30,
    reference=_clamped,
    margins=True,
    trials=(
        _epilogue_trial("one expert, 16 rows, whole tiles", [16], 16, 16, 0),
        _epilogue_trial("rows 5, 0 and 18; C = 21, F = 19", [5, 0, 18], 21, 19, 10),
        _epilogue_trial("one row", [0, 1], 7, 3, 20),
        _epilogue_trial(
            "rows 5, 0 and 18, the last tile first", [5, 0, 18], 21, 19, 30, backwards=True
        ),
    ),
    mistakes=(
        Mistake(
            "gate clamped from below",
            "the gate is clamped from above only: a large negative gate must stay closed.",
            _clamped_slip("both sides"),
        ),
        Mistake("no clamp", "nothing is clamped yet.", _clamped_slip("no clamp")),
        Mistake("without the one", "the up projection enters as u′ + 1.", _clamped_slip("no one")),
        Mistake(
            "plain sigmoid",
            "the sigmoid's argument is 1.702·a′; the factor before it is a′ alone.",
            _clamped_slip("plain sigmoid"),
        ),
        Mistake("no weight", "the routing weight is missing.", _clamped_slip("no weight")),
        Mistake(
            "weight of the lane",
            "weights were read at 0 … 15 in every tile. They belong to rows of the whole array: weights_ptr + row.",
            _clamped_slip("weight of the lane"),
        ),
        Mistake(
            "store past the run",
            "a tile wrote over the first rows of the next run. In the order of the table the next tile puts them "
            "right; in another order it does not. The store's mask is row < end.",
            _clamped_slip("store past the run"),
        ),
    ),
    alternatives=(_one_by_one,),
    hints=(
        "The epilogue is elementwise, apart from the weight, of which a row has one.",
        "tl.minimum(gate, 7.0); the weight is loaded as a tile of M numbers and used as weight[:, None].",
        "Store with mask (row < end)[:, None] & (column < F)[None, :]; the grid is (number of tiles, ⌈F / 16⌉).",
    ),
)


# 3. A backward by hand ------------------------------------------------------------------------------------------------


def _gradients(dh: Tensor, x: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(t.detach().requires_grad_() for t in (x, w1, w3))
    hidden = grouped_swiglu_reference(
        leaves[0], torch.tensor([x.shape[0]]), leaves[1][None], leaves[2][None]
    )
    return torch.autograd.grad(hidden, leaves, dh)


def _gradients_slip(slip: str) -> Callable[..., tuple[Tensor, ...]]:
    def answer(dh: Tensor, x: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
        gate, up = x @ w1.T, x @ w3.T
        sigma = torch.sigmoid(gate)
        slope = sigma * (1 + gate * (1 - sigma))
        if slip == "sigmoid alone":
            slope = sigma
        if slip == "derivative of the sigmoid":
            slope = sigma * (1 - sigma)
        d_up, d_gate = dh * gate * sigma, dh * up * slope
        if slip == "exchanged":
            d_up, d_gate = d_gate, d_up
        if slip == "up's factor missing":
            d_gate = dh * slope
        dx = d_gate @ w1 + d_up @ w3
        if slip == "one path":
            dx = d_gate @ w1
        return dx, d_gate.T @ x, d_up.T @ x

    return answer


def _gradients_trial(
    label: str, R: int, C: int, hidden: int, seed: int, scale: float = 1.0, double: bool = True
) -> Trial:
    dtype = torch.float64 if double else torch.float32

    def make() -> tuple[Tensor, ...]:
        shapes = ((R, hidden), (R, C), (hidden, C), (hidden, C))
        dh, x, w1, w3 = (_numbers(*s, seed=seed + i, dtype=dtype) for i, s in enumerate(shapes))
        return dh, scale * x, w1, w3

    return Trial(label, make)


check_swiglu_gradients = Exercise(
    function="swiglu_gradients",
    title="A backward by hand",
    dots=2,
    minutes=25,
    reference=_gradients,
    trials=(
        _gradients_trial("5 rows of 4, 6 hidden units", 5, 4, 6, 0),
        _gradients_trial("gates of size 40", 3, 4, 5, 10, scale=20.0),
        _gradients_trial("no rows", 0, 4, 6, 20),
        _gradients_trial("C = F = 3, where a wrong transpose has the right shape", 2, 3, 3, 30),
        _gradients_trial("float32", 7, 5, 4, 40, double=False),
    ),
    mistakes=(
        Mistake(
            "sigmoid alone",
            "the derivative of a·σ(a) has two terms, by the product rule; one is missing.",
            _gradients_slip("sigmoid alone"),
        ),
        Mistake(
            "derivative of the sigmoid",
            "that is the derivative of σ(a); the SiLU is a·σ(a).",
            _gradients_slip("derivative of the sigmoid"),
        ),
        Mistake(
            "gate and up exchanged",
            "the gradients of the gate and of the up projection are exchanged.",
            _gradients_slip("exchanged"),
        ),
        Mistake(
            "up's factor missing",
            "h is a product: the gate's gradient carries the factor u.",
            _gradients_slip("up's factor missing"),
        ),
        Mistake(
            "one path",
            "x reaches h through W1 and through W3; its gradient is the sum over both.",
            _gradients_slip("one path"),
        ),
    ),
    alternatives=(
        lambda dh, x, w1, w3: (
            (
                dh
                * (x @ w3.T)
                * (torch.sigmoid(x @ w1.T) + F.silu(x @ w1.T) * torch.sigmoid(-x @ w1.T))
            )
            @ w1
            + (dh * F.silu(x @ w1.T)) @ w3,
            torch.einsum(
                "rf,rc->fc",
                dh
                * (x @ w3.T)
                * (torch.sigmoid(x @ w1.T) + F.silu(x @ w1.T) * torch.sigmoid(-x @ w1.T)),
                x,
            ),
            torch.einsum("rf,rc->fc", dh * F.silu(x @ w1.T), x),
        ),
    ),
    hints=(
        "First the elementwise part: dL/da and dL/du, both (R, F). Then four matrix products.",
        "du = dh · silu(a); da = dh · u · silu′(a), and silu′(a) = σ(a)(1 + a(1 − σ(a))).",
        "dx = da W1 + du W3, dW1 = daᵀ x, dW3 = duᵀ x.",
    ),
)


# 4. Recompute or keep -------------------------------------------------------------------------------------------------


def _prices(R: int, C: int, F: int, b: int, rate: float, bandwidth: float) -> tuple[float, float]:
    return 4 * R * C * F / rate, 4 * R * F * b / bandwidth


def _prices_trial(label: str, *sizes: float) -> Trial:
    return Trial(label, lambda: sizes)


check_backward_prices = Exercise(
    function="backward_prices",
    title="Recompute or keep",
    dots=1,
    minutes=10,
    reference=_prices,
    trials=(
        _prices_trial("65,536 rows, 768 to 1,536, 16-bit", 65536, 768, 1536, 2, 600e12, 4e12),
        _prices_trial("one row, 32-bit", 1, 5, 7, 4, 10.0, 3.0),
        _prices_trial("a narrow model", 1000, 64, 512, 2, 1e12, 1e11),
    ),
    mistakes=(
        Mistake(
            "half the FLOPs",
            "the FLOPs are half: two products, W1's and W3's, and 2 FLOPs for each multiply-add.",
            lambda R, C, F, b, rate, bandwidth: (2 * R * C * F / rate, 4 * R * F * b / bandwidth),
        ),
        Mistake(
            "written, not read",
            "what is kept costs two trips: the forward pass writes it, the backward pass reads it.",
            lambda R, C, F, b, rate, bandwidth: (4 * R * C * F / rate, 2 * R * F * b / bandwidth),
        ),
        Mistake(
            "elements for bytes",
            "bandwidth counts bytes: a number takes b of them.",
            lambda R, C, F, b, rate, bandwidth: (4 * R * C * F / rate, 4 * R * F / bandwidth),
        ),
    ),
    alternatives=(
        lambda R, C, F, b, rate, bandwidth: (
            sum(2 * R * C * F for _ in ("gate", "up")) / rate,
            sum(R * F * b for _ in range(4)) / bandwidth,
        ),
    ),
    hints=(
        "A product of (R, C) with (C, F) takes 2·R·C·F FLOPs, and there are two.",
        "Two tensors of R·F numbers, each written once and read once.",
    ),
)


# 5. Rounds ------------------------------------------------------------------------------------------------------------


def _rounds(counts: list[int], hidden: int, m: int, n: int, processors: int) -> tuple[int, int]:
    tiles = [math.ceil(rows / m) * math.ceil(hidden / n) for rows in counts]
    return sum(math.ceil(t / processors) for t in tiles), math.ceil(sum(tiles) / processors)


def _all_rows_together(
    counts: list[int], hidden: int, m: int, n: int, processors: int
) -> tuple[int, int]:
    together = math.ceil(sum(counts) / m) * math.ceil(hidden / n)
    return _rounds(counts, hidden, m, n, processors)[0], math.ceil(together / processors)


def _idle_counted(
    counts: list[int], hidden: int, m: int, n: int, processors: int
) -> tuple[int, int]:
    return _rounds([max(rows, 1) for rows in counts], hidden, m, n, processors)


def _rounded_down(
    counts: list[int], hidden: int, m: int, n: int, processors: int
) -> tuple[int, int]:
    tiles = [math.ceil(rows / m) * math.ceil(hidden / n) for rows in counts]
    return sum(t // processors for t in tiles), sum(tiles) // processors


def _part_of_a_tile(
    counts: list[int], hidden: int, m: int, n: int, processors: int
) -> tuple[int, int]:
    tiles = [rows * hidden / (m * n) for rows in counts]
    return sum(math.ceil(t / processors) for t in tiles), math.ceil(sum(tiles) / processors)


def _rounds_trial(label: str, *arguments: object) -> Trial:
    return Trial(label, lambda: arguments)


check_rounds = Exercise(
    function="rounds",
    title="Rounds",
    dots=1,
    minutes=10,
    reference=_rounds,
    trials=(
        _rounds_trial("8 experts with 8,192 rows each, an H200", [8192] * 8, 1536, 128, 128, 132),
        _rounds_trial("8 experts with 512 rows each", [512] * 8, 1536, 128, 128, 132),
        _rounds_trial("ragged, two idle", [1, 0, 1000, 0, 129, 127], 1536, 128, 128, 132),
        _rounds_trial("24 experts with 2 rows, F = 20", [2] * 24, 20, 16, 16, 4),
    ),
    mistakes=(
        Mistake(
            "rows of all experts together",
            "a tile belongs to one expert: round up the tiles of each expert before adding.",
            _all_rows_together,
        ),
        Mistake(
            "idle experts counted",
            "an expert without rows has no tile and takes no round.",
            _idle_counted,
        ),
        Mistake(
            "rounded down",
            "the last round is a round even if few multiprocessors have work in it.",
            _rounded_down,
        ),
        Mistake(
            "parts of a tile",
            "a tile that is partly empty takes as long as a full one: round up rows and hidden units.",
            _part_of_a_tile,
        ),
    ),
    alternatives=(
        lambda counts, hidden, m, n, processors: (
            sum(
                ((rows + m - 1) // m * ((hidden + n - 1) // n) + processors - 1) // processors
                for rows in counts
            ),
            (sum((rows + m - 1) // m for rows in counts) * ((hidden + n - 1) // n) + processors - 1)
            // processors,
        ),
    ),
    hints=(
        "Tiles of one expert: ⌈rows / m⌉ · ⌈F / n⌉. An idle expert has none.",
        "One by one: round up for each expert, then add. Together: add, then round up once.",
    ),
)
