"""Rows times weights: each run of rows with its expert's matrix.

The down projection; the product with W2 that opens the backward pass; and the input gradient, one product over gate and up
together. Tiles are fetched by descriptors, as in version 4.

Shapes: R routed rows sorted by expert, E experts, P pairs (1 or 2), K reduction width, N result width.
"""

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from gptoss.kernels.descriptors import describable, describe, describe_pair
from gptoss.kernels.expert_tiles import TileTable, grouped_order
from gptoss.kernels.launch import programs
from gptoss.kernels.tuning import Tiles


def grouped_rows(
    a: Float[Tensor, "R PK"],
    table: TileTable,
    weights: tuple[Tensor, ...],
    tiles: Tiles,
    *,
    transposed: bool,
) -> Float[Tensor, "R N"]:
    """Multiply each run of rows with its expert's matrices and add up: y[r] = Σ_p a[r, pK:(p+1)K] · B_p[e].

    Args:
        a: (R, P·K) rows; every width a whole multiple of 16 bytes.
        table: tiles of ``tiles.m`` rows.
        weights: P tensors; B_p[e] is (K, N), or (N, K) when ``transposed`` (then y = a · B_pᵀ).
        tiles: block sizes.
        transposed: how the weights are stored.

    Returns:
        (R, N) in the rows' dtype.

    Source: chapter 10, version 5.
    """
    n_rows, pairs = a.shape[0], len(weights)
    depth, width = weights[0].shape[1:][::-1] if transposed else weights[0].shape[1:]
    out = a.new_empty(n_rows, width)
    if n_rows == 0:
        return out
    a = describable(a).unflatten(1, (pairs, depth)).transpose(0, 1)  # (P, R, K), the same memory
    a_desc = describe(a, [1, tiles.m, tiles.k])
    block = [1, 1, tiles.n, tiles.k] if transposed else [1, 1, tiles.k, tiles.n]
    if pairs == 1:
        b_desc, swapped = describe(describable(weights[0])[None], block), False
    else:
        first, second = map(describable, weights)  # named: the pair must outlive the launch
        b_desc, swapped = describe_pair(first, second, block)
    grid = programs(a.device, tiles, table.bound * triton.cdiv(width, tiles.n))
    _rows_kernel[grid](
        a_desc, b_desc, out, table.expert, table.row, table.end, table.used, depth, width,
        PAIRS=pairs, SWAPPED=swapped, TRANSPOSED=transposed,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        PIECES=tiles.pieces, FLATTEN=tiles.flatten,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


@triton.jit
def _rows_kernel(
    a_desc, b_desc, out, tile_expert, tile_row, tile_end, tiles_used, depth, width,
    PAIRS: tl.constexpr, SWAPPED: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tiles_used)
    column_tiles = tl.cdiv(width, BLOCK_N)
    steps = tl.cdiv(depth, BLOCK_K)
    tl.assume(steps > 0)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row_tile, column_tile = grouped_order(tile, row_tiles, column_tiles, GROUP)
        e = tl.load(tile_expert + row_tile)
        first_row = tl.load(tile_row + row_tile)
        end = tl.load(tile_end + row_tile)
        first_column = column_tile * BLOCK_N

        y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(0, PAIRS * steps):
            pair = (step >= steps).to(tl.int32) if PAIRS == 2 else 0
            k = (step - pair * steps) * BLOCK_K
            weight_pair = 1 - pair if SWAPPED else pair
            a = a_desc.load([pair, first_row, k]).reshape(BLOCK_M, BLOCK_K)
            if TRANSPOSED:
                b = b_desc.load([weight_pair, e, first_column, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = b_desc.load([weight_pair, e, k, first_column]).reshape(BLOCK_K, BLOCK_N)
            y = tl.dot(a, b, y, input_precision="ieee")

        rows = first_row + tl.arange(0, BLOCK_M)
        _store_rows(y, out, rows, end, first_column, width, BLOCK_M, BLOCK_N, PIECES)


@triton.jit
def _store_rows(
    y, out, rows, end, first_column, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    if PIECES > 1:  # one column half after the other, so that less shared memory is in use at once
        HALF: tl.constexpr = WIDTH // 2
        y_0, y_1 = y.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        _store_rows(y_0, out, rows, end, first_column, width, ROWS, HALF, PIECES // 2)
        _store_rows(y_1, out, rows, end, first_column + HALF, width, ROWS, HALF, PIECES // 2)
    else:
        columns = first_column + tl.arange(0, WIDTH)
        mask = (rows < end)[:, None] & (columns < width)[None, :]
        at = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=mask)
