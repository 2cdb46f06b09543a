"""Rows times rows: the weight gradients of all experts, and of all three matrices, in one launch.

Each expert's gradient is a product over its own rows alone. The last rows of a run share a tile with the next expert's, so
that step is blanked by hand; every other step is a plain fetch. Work is handed out from the heaviest expert down, and W1, W3
and W2 together: 288 tiles of W2 alone would fill 132 multiprocessors 2.2 times, that is 3 rounds, and 576 of W1 and W3 take 5;
864 take 7.

Shapes: R routed rows sorted by expert, E experts, P pairs (1 or 2), M and N the two widths of a gradient.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from gptoss.kernels.descriptors import describable, describe
from gptoss.kernels.expert_tiles import TileTable
from gptoss.kernels.tuning import Tiles


class Product(NamedTuple):
    """P gradients to fill: outs[p][e] = a[run of e, pM:(p+1)M]ᵀ · b[run of e], each (E, M, N) and contiguous."""

    a: Float[Tensor, "R PM"]
    b: Float[Tensor, "R N"]
    outs: tuple[Tensor, ...]


def grouped_weight_gradients(products: tuple[Product, ...], table: TileTable, tiles: Tiles) -> None:
    """Fill the weight gradients of one or two products; an idle expert gets zeros.

    Args:
        products: at least one row; the first may have P = 2 (gate and up), a second one (down) has P = 1; all widths are whole multiples of
            16 bytes.
        table: only its runs are used.
        tiles: block sizes.

    Source: chapter 10, version 5.
    """
    args, counts = [], []
    for a, b, outs in products:
        pairs, (_, m, n) = len(outs), outs[0].shape
        a = describable(a).unflatten(1, (pairs, m)).transpose(0, 1)  # (P, R, M), the same memory
        args.append(
            (describe(a, [1, tiles.k, tiles.m]), describe(describable(b), [tiles.k, tiles.n]), m, n)
        )
        counts.append(pairs * triton.cdiv(m, tiles.m) * triton.cdiv(n, tiles.n))
    first, second = args[0], args[-1]
    both = len(products) == 2
    n_experts = products[0].outs[0].shape[0]
    _weight_gradients_kernel[(n_experts * sum(counts),)](
        *first, products[0].outs[0], products[0].outs[-1],
        *second, products[-1].outs[0],
        table.start, table.heavy_first, products[0].a.shape[0], n_experts, counts[0], sum(counts),
        PAIRS=len(products[0].outs), BOTH=both,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "n_experts", "first_tiles", "tiles"])
def _weight_gradients_kernel(
    a_desc, b_desc, m, n, out, pair_out, a2_desc, b2_desc, m2, n2, out2,
    run_start, heavy_first, n_rows, n_experts, first_tiles, tiles,
    PAIRS: tl.constexpr, BOTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    within = tl.program_id(0) % tiles
    e = tl.load(heavy_first + tl.program_id(0) // tiles)
    start = tl.load(run_start + e)
    end = tl.load(run_start + e + 1, mask=e + 1 < n_experts, other=n_rows)
    if BOTH:
        if within < first_tiles:
            _one_tile(a_desc, b_desc, m, n, out, pair_out, e, start, end, within, PAIRS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        else:
            _one_tile(a2_desc, b2_desc, m2, n2, out2, out2, e, start, end, within - first_tiles, 1, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
    else:
        _one_tile(a_desc, b_desc, m, n, out, pair_out, e, start, end, within, PAIRS, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip


@triton.jit
def _one_tile(
    a_desc, b_desc, m, n, out, pair_out, e, start, end, tile,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    pair = tile // (tiles_m * tiles_n) if PAIRS == 2 else 0
    first_m = (tile - pair * tiles_m * tiles_n) // tiles_n * BLOCK_M
    first_n = tile % tiles_n * BLOCK_N

    gradient = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    whole = (end - start) // BLOCK_K * BLOCK_K
    for row in range(start, start + whole, BLOCK_K):
        a = a_desc.load([pair, row, first_m]).reshape(BLOCK_K, BLOCK_M)
        b = b_desc.load([row, first_n])  # (K, N)
        gradient = tl.dot(a.T, b, gradient, input_precision="ieee")
    if start + whole < end:
        # Blank the next expert's rows in both tiles: one of them may be NaN.
        row = start + whole
        mine = (row + tl.arange(0, BLOCK_K) < end)[:, None]
        a = a_desc.load([pair, row, first_m]).reshape(BLOCK_K, BLOCK_M)
        b = b_desc.load([row, first_n])
        a = tl.where(mine, a, 0.0).to(a.dtype)
        b = tl.where(mine, b, 0.0).to(b.dtype)
        gradient = tl.dot(a.T, b, gradient, input_precision="ieee")

    rows = first_m + tl.arange(0, BLOCK_M)
    columns = first_n + tl.arange(0, BLOCK_N)
    if PAIRS == 2:  # noqa: SIM102  # the outer test is decided when compiling
        if pair == 1:
            out = pair_out
    at = out + (e.to(tl.int64) * m + rows[:, None]) * n + columns[None, :]
    tl.store(
        at, gradient.to(out.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :]
    )
