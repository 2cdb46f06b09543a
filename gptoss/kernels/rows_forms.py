"""Two other forms of the grouped row product; see ``swiglu_forms``.

Shapes: R routed rows sorted by expert, E experts, P pairs (1 or 2), K reduction width, N result width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.descriptors import describable, describe, describe_pair
from gptoss.kernels.expert_tiles import TileTable, grouped_order
from gptoss.kernels.launch import programs
from gptoss.kernels.rows_epilogue import PLAIN, finish_rows
from gptoss.kernels.tuning import Tiles


def rows_specialized(
    a: Tensor,
    table: TileTable,
    weights: tuple[Tensor, ...],
    tiles: Tiles,
    transposed: bool,
    out: Tensor,
) -> None:
    """Fill ``out`` as ``grouped_rows`` does, with copying and computing given to different warps; the reduction a whole number of steps."""
    # The compiler specialises one product a loop, so a pair of weights is laid side by side first.
    b = weights[0] if len(weights) == 1 else torch.cat(weights, 2 if transposed else 1)
    depth, width = b.shape[1:][::-1] if transposed else b.shape[1:]
    block = [tiles.n, tiles.k] if transposed else [tiles.k, tiles.n]
    _specialized_kernel[programs(a.device, tiles, table.bound * triton.cdiv(width, tiles.n))](
        describe(describable(a), [tiles.m, tiles.k]), describe(describable(b).flatten(0, 1), block), out,
        table.expert, table.row, table.end, table.used, depth, width,
        TRANSPOSED=transposed,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip


def rows_tall(
    a: Tensor,
    table: TileTable,
    weights: tuple[Tensor, ...],
    tiles: Tiles,
    transposed: bool,
    out: Tensor,
) -> None:
    """Fill ``out`` as ``grouped_rows`` does, with tiles of 1.5 · ``tiles.m`` rows; the table must be cut in such tiles."""
    n_rows, pairs = a.shape[0], len(weights)
    depth, width = weights[0].shape[1:][::-1] if transposed else weights[0].shape[1:]
    a = describable(a).unflatten(1, (pairs, depth)).transpose(0, 1)  # (P, R, K)
    block = [1, 1, tiles.n, tiles.k] if transposed else [1, 1, tiles.k, tiles.n]
    if pairs == 1:
        b_desc, swapped = describe(describable(weights[0])[None], block), False
    else:
        first, second = map(describable, weights)  # named: the pair must outlive the launch
        b_desc, swapped = describe_pair(first, second, block)
    _tall_kernel[programs(a.device, tiles, table.bound * triton.cdiv(width, tiles.n))](
        describe(a, [1, tiles.m, tiles.k]), describe(a, [1, tiles.m // 2, tiles.k]), b_desc, out,
        table.expert, table.row, table.end, table.used, n_rows, depth, width,
        PAIRS=pairs, SWAPPED=swapped, TRANSPOSED=transposed,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        PIECES=tiles.pieces, FLATTEN=tiles.flatten,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip


@triton.jit
def _specialized_kernel(
    a_desc, b_desc, out, tile_expert, tile_row, tile_end, tiles_used, depth, width,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tiles_used)
    column_tiles = tl.cdiv(width, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), warp_specialize=True
    ):
        row_tile, column_tile = grouped_order(tile, row_tiles, column_tiles, GROUP)
        e = tl.load(tile_expert + row_tile)
        first_row = tl.load(tile_row + row_tile)
        end = tl.load(tile_end + row_tile)
        first_column = column_tile * BLOCK_N
        y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, depth, BLOCK_K):
            a = a_desc.load([first_row, k])
            if TRANSPOSED:
                b = b_desc.load([e * width + first_column, k])
                y = tl.dot(a, b.T, y)
            else:
                b = b_desc.load([e * depth + k, first_column])
                y = tl.dot(a, b, y)
        rows = first_row + tl.arange(0, BLOCK_M)
        columns = first_column + tl.arange(0, BLOCK_N)
        tl.store(
            out + rows.to(tl.int64)[:, None] * width + columns[None, :],
            y.to(out.dtype.element_ty),
            mask=(rows < end)[:, None] & (columns < width)[None, :],
        )


@triton.jit(do_not_specialize=["n_rows"])
def _tall_kernel(
    a_desc, a_half_desc, b_desc, out,
    tile_expert, tile_row, tile_end, tiles_used, n_rows, depth, width,
    PAIRS: tl.constexpr, SWAPPED: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PIECES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tiles_used)
    column_tiles = tl.cdiv(width, BLOCK_N)
    steps = tl.cdiv(depth, BLOCK_K)
    tl.assume(steps > 0)
    HALF: tl.constexpr = BLOCK_M // 2
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row_tile, column_tile = grouped_order(tile, row_tiles, column_tiles, GROUP)
        e = tl.load(tile_expert + row_tile)
        first_row = tl.load(tile_row + row_tile)
        end = tl.load(tile_end + row_tile)
        first_column = column_tile * BLOCK_N
        y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        rest = tl.zeros((HALF, BLOCK_N), dtype=tl.float32)
        for step in range(0, PAIRS * steps):
            pair = (step >= steps).to(tl.int32) if PAIRS == 2 else 0
            k = (step - pair * steps) * BLOCK_K
            weight_pair = 1 - pair if SWAPPED else pair
            a = a_desc.load([pair, first_row, k]).reshape(BLOCK_M, BLOCK_K)
            a_rest = a_half_desc.load([pair, first_row + BLOCK_M, k]).reshape(HALF, BLOCK_K)
            if TRANSPOSED:
                b = b_desc.load([weight_pair, e, first_column, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                b = b_desc.load([weight_pair, e, k, first_column]).reshape(BLOCK_K, BLOCK_N)
            y = tl.dot(a, b, y)
            rest = tl.dot(a_rest, b, rest)
        rows = first_row + BLOCK_M + tl.arange(0, HALF)
        finish_rows(
            rest, rows, first_row, end, first_column, column_tile * PIECES, None, out, None,
            None, None, n_rows, width, HALF, BLOCK_N, PLAIN, PIECES,
        )  # fmt: skip
        rows = first_row + tl.arange(0, BLOCK_M)
        finish_rows(
            y, rows, first_row, end, first_column, column_tile * PIECES, None, out, None,
            None, None, n_rows, width, BLOCK_M, BLOCK_N, PLAIN, PIECES,
        )  # fmt: skip
