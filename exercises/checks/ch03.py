"""Checks of chapter 3: kernels in Triton. The checks themselves need no Triton: references and mistakes are PyTorch.

Shapes: n numbers, R rows, C columns; M × K times K × N for matrix products.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.kernels.tuning import Tiles, stage_bytes

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "03_triton"
TILE = 16  # side of the tiles that the exercises ask for


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _read_densely(x: Tensor) -> Tensor:
    """What a kernel reads that takes a strided tensor for a contiguous one."""
    dense = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, dense, x.storage_offset())


# 1. Scale and add -----------------------------------------------------------------------------------------------------


def _scale_and_add(alpha: float, x: Tensor, y: Tensor) -> Tensor:
    return alpha * x + y


def _only(result: Tensor, count: int) -> Tensor:
    return torch.where(torch.arange(result.numel()) < count, result, 0.0)


def _scale_trial(
    label: str, n: int, seed: int, step: int = 1, double: bool = False, alpha: float = 1.5
) -> Trial:
    dtype = torch.float64 if double else torch.float32

    def make() -> tuple[float, Tensor, Tensor]:
        x = _numbers(n * step, seed=seed, dtype=dtype)[::step]
        return alpha, x, _numbers(n, seed=seed + 1, dtype=dtype)

    return Trial(label, make)


check_scale_and_add = Exercise(
    function="scale_and_add",
    title="Scale and add in one kernel",
    dots=1,
    minutes=15,
    reference=_scale_and_add,
    margins=True,
    trials=(
        _scale_trial("128 numbers, two whole tiles", 128, 0),
        _scale_trial("100 numbers, alpha = −0.25", 100, 10, alpha=-0.25),
        _scale_trial("one number", 1, 20),
        _scale_trial("every third number of a longer x", 70, 30, step=3),
        _scale_trial("65 numbers, float64", 65, 40, double=True),
    ),
    mistakes=(
        Mistake(
            "last tile missing",
            "the numbers after the last whole tile stay 0: the grid was rounded down. Round it up and mask.",
            lambda alpha, x, y: _only(_scale_and_add(alpha, x, y), x.numel() // 64 * 64),
        ),
        Mistake(
            "one program",
            "only the first tile was computed. Is the grid one program, or does every program take tile 0?",
            lambda alpha, x, y: _only(_scale_and_add(alpha, x, y), 64),
        ),
        Mistake(
            "stride ignored",
            "x was read as if its numbers lay side by side. Multiply the index by x.stride(0).",
            lambda alpha, x, y: alpha * _read_densely(x) + y,
        ),
        Mistake(
            "the other one scaled",
            "alpha belongs to x; here it multiplies y.",
            lambda alpha, x, y: x + alpha * y,
        ),
    ),
    alternatives=(
        lambda alpha, x, y: torch.add(y, x, alpha=alpha),
        lambda alpha, x, y: torch.stack([a * alpha + b for a, b in zip(x, y, strict=True)]),
    ),
    hints=(
        "Program p owns the numbers 64·p to 64·p + 63; some of them may not exist.",
        "index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), and mask=index < n in both loads and in the store.",
        "The address of number i of x is x_ptr + i * stride_x. The grid is (triton.cdiv(n, 64),).",
    ),
)


# 2. The maximum of each row -------------------------------------------------------------------------------------------


def _row_trial(label: str, R: int, C: int, seed: int, shift: float, kind: str = "dense") -> Trial:
    def make() -> tuple[Tensor]:
        if kind == "transposed":
            return (_numbers(C, R, seed=seed).T + shift,)
        if kind == "cut":  # a piece of a wider matrix whose other columns are larger
            wide = _numbers(R, C + 40, seed=seed)
            wide[:, C:] += 50.0
            return (wide[:, :C],)
        dtype = torch.float64 if kind == "double" else torch.float32
        return (_numbers(R, C, seed=seed, dtype=dtype) + shift,)

    return Trial(label, make)


def _read_past_the_end(x: Tensor) -> Tensor:
    R, C = x.shape
    padded = -(-C // TILE) * TILE
    room = (x.untyped_storage().nbytes() // x.itemsize - 1 - x.storage_offset()) // x.stride(1)
    wide = torch.full((R, padded), -torch.inf, dtype=x.dtype)
    for row in range(R):
        first = row * x.stride(0)
        for column in range(padded):
            place = first + column * x.stride(1)
            if place <= room * x.stride(1):
                wide[row, column] = torch.as_strided(x, (), (), x.storage_offset() + place)
    return wide.amax(-1)


check_row_maximum = Exercise(
    function="row_maximum",
    title="The maximum of each row",
    dots=2,
    minutes=20,
    reference=lambda x: x.amax(dim=-1),
    margins=True,
    trials=(
        _row_trial("3 rows of 32, two whole tiles", 3, 32, 0, 0.0),
        _row_trial("5 rows of 37, all numbers negative", 5, 37, 10, -9.0),
        _row_trial("a transposed matrix", 4, 21, 20, 0.0, "transposed"),
        _row_trial("19 columns of a wider matrix", 3, 19, 30, 0.0, "cut"),
        _row_trial("one number, negative", 1, 1, 40, -3.0),
        _row_trial("float64", 2, 50, 50, 0.0, "double"),
    ),
    mistakes=(
        Mistake(
            "hidden numbers are 0",
            "a row of negative numbers came out as 0: the masked places won. The number that never wins a maximum is −∞.",
            lambda x: x.amax(-1).clamp(min=0.0) if x.shape[1] % TILE else x.amax(-1),
        ),
        Mistake(
            "first tile only",
            "only the first 16 columns were looked at. Walk over the row in a loop.",
            lambda x: x[:, :TILE].amax(-1),
        ),
        Mistake(
            "strides ignored",
            "right for contiguous matrices alone. The address needs the stride of the rows and that of the columns.",
            lambda x: _read_densely(x).amax(-1),
        ),
        Mistake(
            "no mask",
            "numbers behind the row's end took part: a neighbour's memory. Mask the load with column < n_columns.",
            _read_past_the_end,
        ),
    ),
    alternatives=(
        lambda x: torch.sort(x, dim=-1).values[:, -1],
        lambda x: -((-x).amin(dim=1)),
    ),
    hints=(
        "One program a row: tl.program_id(0) is the row. The number of columns is an argument, and the loop goes over it in steps of 16.",
        "Keep 16 maxima, one a lane, and take tl.max of them after the loop. They start at −∞.",
        "tl.load(address, mask=column < n_columns, other=float('-inf')), then tl.maximum(best, …).",
    ),
)


# 3. An epilogue -------------------------------------------------------------------------------------------------------


def _epilogue_reference(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w.T)


def _silu_in_the_loop(x: Tensor, w: Tensor) -> Tensor:
    total = x.new_zeros(x.shape[0], w.shape[0])
    for k in range(0, x.shape[1], TILE):
        total = F.silu(total + x[:, k : k + TILE] @ w[:, k : k + TILE].T)
    return total


def _silu_of_parts(x: Tensor, w: Tensor) -> Tensor:
    parts = range(0, x.shape[1], TILE)
    return sum(
        (F.silu(x[:, k : k + TILE] @ w[:, k : k + TILE].T) for k in parts), torch.tensor(0.0)
    )


def _product_trial(
    label: str, M: int, K: int, N: int, seed: int, transposed: bool = False
) -> Trial:
    def make() -> tuple[Tensor, Tensor]:
        if transposed:
            return _numbers(K, M, seed=seed).T, _numbers(K, N, seed=seed + 1).T
        return _numbers(M, K, seed=seed), _numbers(N, K, seed=seed + 1)

    return Trial(label, make)


check_linear_silu = Exercise(
    function="linear_silu",
    title="A product with an epilogue",
    dots=3,
    minutes=35,
    reference=_epilogue_reference,
    margins=True,
    trials=(
        _product_trial("16 × 32 times 32 × 16, whole tiles", 16, 32, 16, 0),
        _product_trial("5 × 37 times 37 × 19", 5, 37, 19, 10),
        _product_trial("a transposed x and a transposed w", 18, 20, 7, 20, transposed=True),
        _product_trial("one number each", 1, 1, 1, 30),
    ),
    mistakes=(
        Mistake(
            "no epilogue",
            "the product is right; the SiLU is missing before the store.",
            lambda x, w: x @ w.T,
        ),
        Mistake(
            "SiLU of a running sum",
            "the SiLU was taken inside the loop. It is not linear: it belongs behind the last step of the sum.",
            _silu_in_the_loop,
        ),
        Mistake(
            "SiLU of each part",
            "the SiLU of a sum is not the sum of SiLUs: take it once, behind the loop.",
            _silu_of_parts,
        ),
        Mistake(
            "sigmoid alone",
            "that is σ(z); the SiLU is z·σ(z).",
            lambda x, w: torch.sigmoid(x @ w.T),
        ),
        Mistake(
            "strides ignored",
            "right while x and w are contiguous. Use both strides of each in its address.",
            lambda x, w: F.silu(_read_densely(x) @ _read_densely(w).T),
        ),
        Mistake(
            "strides of x ignored",
            "right while x is contiguous. Use both strides of x in its address.",
            lambda x, w: F.silu(_read_densely(x) @ w.T),
        ),
        Mistake(
            "strides of w ignored",
            "right while w is contiguous. Use both strides of w in its address.",
            lambda x, w: F.silu(x @ _read_densely(w).T),
        ),
    ),
    alternatives=(
        lambda x, w: (
            torch.einsum("mk,nk->mn", x, w) * torch.sigmoid(torch.einsum("mk,nk->mn", x, w))
        ),
    ),
    hints=(
        "Start from the chapter's matmul kernel. w is (N, K): the tile that tl.dot wants is (K, N).",
        "Read the tile of w in its transposed place: k[:, None] * stride_wk + column[None, :] * stride_wn.",
        "Behind the loop: total = total * tl.sigmoid(total), then the masked store.",
    ),
)


# 4. Stages that fit ---------------------------------------------------------------------------------------------------


def _stages_reference(m: int, n: int, k: int, weights: int, itemsize: int, limit: int) -> int:
    stages = 0
    while stage_bytes(Tiles(m, n, k, 4, stages + 1), weights, itemsize) <= limit:
        stages += 1
    return stages


def _stages_trial(*sizes: int) -> Trial:
    m, n, k, weights, itemsize, limit = sizes
    label = (
        f"{m} × {n} × {k}, {weights} weight tiles, {itemsize} bytes a number, {limit // 1024} KiB"
    )
    return Trial(label, lambda: sizes)


check_stages_that_fit = Exercise(
    function="stages_that_fit",
    title="How many stages fit",
    dots=1,
    minutes=5,
    reference=_stages_reference,
    trials=(
        _stages_trial(16, 32, 32, 2, 2, 64 * 1024),
        _stages_trial(128, 128, 64, 2, 2, 227 * 1024),
        _stages_trial(128, 64, 64, 2, 2, 163 * 1024),
        _stages_trial(64, 32, 32, 1, 4, 99 * 1024),
        _stages_trial(256, 256, 128, 2, 4, 64 * 1024),
    ),
    mistakes=(
        Mistake(
            "one weight tile",
            "a step that multiplies the rows with several weights holds a tile of each.",
            lambda m, n, k, weights, itemsize, limit: limit // (k * (m + n) * itemsize),
        ),
        Mistake(
            "rounded up",
            "the last stage does not fit: round down.",
            lambda m, n, k, weights, itemsize, limit: (
                -(-limit // (k * (m + weights * n) * itemsize))
            ),
        ),
        Mistake(
            "elements for bytes",
            "that counts numbers, and the limit is in bytes.",
            lambda m, n, k, weights, itemsize, limit: limit // (k * (m + weights * n)),
        ),
        Mistake(
            "the result's tile too",
            "the m × n result is in registers while the loop runs, not among the stages in shared memory.",
            lambda m, n, k, weights, itemsize, limit: (
                limit // ((k * (m + weights * n) + m * n) * itemsize)
            ),
        ),
        Mistake(
            "rows loaded for each weight",
            "the tile of rows is loaded once and meets every weight tile.",
            lambda m, n, k, weights, itemsize, limit: limit // (k * weights * (m + n) * itemsize),
        ),
    ),
    alternatives=(
        lambda m, n, k, weights, itemsize, limit: int(
            limit / itemsize / (m * k + weights * k * n) + 1e-9
        ),
    ),
    hints=(
        "One stage holds an m × k tile of rows and, for each weight, a k × n tile.",
        "bytes of a stage = k · (m + weights · n) · itemsize",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------


def _past_the_reduction(a: Tensor, b: Tensor, mask_a: bool = False, mask_b: bool = False) -> Tensor:
    """A product whose last reduction step reads up to the tile's end, in one or both operands."""
    (M, K), N = a.shape, b.shape[1]
    padded = -(-K // TILE) * TILE
    wide_a = torch.as_strided(a, (M, padded), a.stride(), a.storage_offset()).clone()
    wide_b = torch.as_strided(b, (padded, N), b.stride(), b.storage_offset()).clone()
    if mask_a:
        wide_a[:, K:] = 0.0
    if mask_b:
        wide_b[K:] = 0.0
    return wide_a @ wide_b


def _whole_steps_only(a: Tensor, b: Tensor) -> Tensor:
    K = a.shape[1] // TILE * TILE
    return a[:, :K] @ b[:K]


def _bug_trial(label: str, M: int, K: int, N: int, seed: int, behind: str = "numbers") -> Trial:
    def make() -> tuple[Tensor, Tensor]:
        a, b = (_numbers(64, 64, seed=seed + place) for place in (0, 1))
        if behind == "NaN behind a":
            a[:, K:] = torch.nan
        elif behind == "NaN behind b":
            b[K:] = torch.nan
        return a[:M, :K], b[:K, :N]

    return Trial(label, make)


check_repaired_matmul = Exercise(
    function="repaired_matmul",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=lambda a, b: a @ b,
    margins=True,
    trials=(
        _bug_trial("K = 32, two whole steps", 20, 32, 9, 0),
        _bug_trial("K = 13, cut from a larger matrix", 20, 13, 9, 10),
        _bug_trial("K = 37", 5, 37, 17, 20),
        _bug_trial("K = 1", 3, 1, 3, 30),
        _bug_trial("K = 21, NaN behind the end of a's rows", 4, 21, 6, 40, "NaN behind a"),
        _bug_trial("K = 21, NaN behind the last row of b", 4, 21, 6, 50, "NaN behind b"),
    ),
    mistakes=(
        Mistake(
            "no mask on the reduction",
            "right only where 16 divides K. In the last step of the loop, which columns of a and rows of b does a program read?",
            _past_the_reduction,
        ),
        Mistake(
            "a masked, b not",
            "right until b's memory behind the end holds NaN: 0 × NaN is NaN. Mask both loads.",
            lambda a, b: _past_the_reduction(a, b, mask_a=True),
        ),
        Mistake(
            "b masked, a not",
            "right until a's memory behind the end holds NaN: NaN × 0 is NaN. Mask both loads.",
            lambda a, b: _past_the_reduction(a, b, mask_b=True),
        ),
        Mistake(
            "last step left out",
            "the loop ends before the last, incomplete step: numbers are missing from the sum.",
            _whole_steps_only,
        ),
    ),
    alternatives=(
        lambda a, b: torch.einsum("mk,kn->mn", a, b),
        lambda a, b: _past_the_reduction(a, b, mask_a=True, mask_b=True),
    ),
    hints=(
        "The first check is right and the second is wrong. What differs is K alone.",
        "In the last step k runs up to the next multiple of 16; nothing says k < K.",
        "mask=(row[:, None] < M) & (k[None, :] < K) for a, and the like for b.",
    ),
)
