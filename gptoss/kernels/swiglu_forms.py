"""Two other forms of version 4's forward pass: warps with separate tasks, and tiles of half as many rows again.

``specialized``: one warp group fetches, the others compute, so that no computing warp waits to issue a fetch.
``tall``: m + m/2 rows against one weight tile; at 128 + 64 rows and 256 columns a ninth fewer bytes from L2 a product\nthan 128 rows.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.descriptors import describable, describe, describe_pair
from gptoss.kernels.expert_tiles import TileTable, grouped_order
from gptoss.kernels.launch import programs
from gptoss.kernels.swiglu_epilogue import HIDDEN, HIDDEN_AND_KEEP, finish_swiglu, sigmoid
from gptoss.kernels.tuning import Tiles


def swiglu_specialized(
    x_sorted: Tensor,
    table: TileTable,
    w1: Tensor,
    w3: Tensor,
    tiles: Tiles,
    row_weights: Tensor | None,
    hidden: Tensor,
    gate_up: Tensor | None,
) -> None:
    """Fill ``hidden`` (and ``gate_up``) as ``swiglu_persistent`` does, with copying and computing given to different warps."""
    n_rows, (_, ffn, width) = x_sorted.shape[0], w1.shape
    block = [tiles.n, tiles.k]
    grid = programs(x_sorted.device, tiles, table.bound * triton.cdiv(ffn, tiles.n))
    _specialized_kernel[grid](
        describe(describable(x_sorted), [tiles.m, tiles.k]),
        describe(describable(w1).flatten(0, 1), block), describe(describable(w3).flatten(0, 1), block),
        hidden, gate_up, row_weights,
        table.expert, table.row, table.end, table.used, n_rows, width, ffn,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip


def swiglu_tall(
    x_sorted: Tensor,
    table: TileTable,
    w1: Tensor,
    w3: Tensor,
    tiles: Tiles,
    row_weights: Tensor | None,
    hidden: Tensor,
    gate_up: Tensor | None,
) -> None:
    """Fill ``hidden`` (and ``gate_up``) as ``swiglu_persistent`` does, with tiles of 1.5 · ``tiles.m`` rows; the table must be cut in such tiles."""
    n_rows, (_, ffn, width) = x_sorted.shape[0], w1.shape
    x = describable(x_sorted)
    w1, w3 = describable(w1), describable(w3)  # named: the pair must outlive the launch
    w_desc, swapped = describe_pair(w1, w3, [2, 1, tiles.n, tiles.k])
    grid = programs(x.device, tiles, table.bound * triton.cdiv(ffn, tiles.n))
    _tall_kernel[grid](
        describe(x, [tiles.m, tiles.k]), describe(x, [tiles.m // 2, tiles.k]), w_desc,
        hidden, gate_up, row_weights,
        table.expert, table.row, table.end, table.used, n_rows, width, ffn,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        MODE=HIDDEN if gate_up is None else HIDDEN_AND_KEEP, SWAPPED=swapped, PIECES=tiles.pieces, FLATTEN=tiles.flatten,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _specialized_kernel(
    x_desc, w1_desc, w3_desc, hidden, gate_up, row_weights,
    tile_expert, tile_row, tile_end, tiles_used, n_rows, width, ffn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tiles_used)
    column_tiles = tl.cdiv(ffn, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), warp_specialize=True
    ):
        row_tile, column_tile = grouped_order(tile, row_tiles, column_tiles, GROUP)
        e = tl.load(tile_expert + row_tile)
        first_row = tl.load(tile_row + row_tile)
        end = tl.load(tile_end + row_tile)
        first_column = column_tile * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, width, BLOCK_K):
            x = x_desc.load([first_row, k])
            w1 = w1_desc.load([e * ffn + first_column, k])
            w3 = w3_desc.load([e * ffn + first_column, k])
            gate = tl.dot(x, w1.T, gate, input_precision="ieee")
            up = tl.dot(x, w3.T, up, input_precision="ieee")
        rows = first_row + tl.arange(0, BLOCK_M)
        columns = first_column + tl.arange(0, BLOCK_N)
        mask = (rows < end)[:, None] & (columns < ffn)[None, :]
        value = gate * sigmoid(gate) * up
        if row_weights is not None:
            value = value * tl.load(row_weights + rows, mask=rows < end, other=0.0)[:, None]
        kind = hidden.dtype.element_ty
        tl.store(
            hidden + rows.to(tl.int64)[:, None] * ffn + columns[None, :], value.to(kind), mask=mask
        )
        if gate_up is not None:
            at = gate_up + rows.to(tl.int64)[:, None] * (2 * ffn) + columns[None, :]
            tl.store(at, gate.to(kind), mask=mask)
            tl.store(at + ffn, up.to(kind), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _tall_kernel(
    x_desc, x_half_desc, w_desc, hidden, gate_up, row_weights,
    tile_expert, tile_row, tile_end, tiles_used, n_rows, width, ffn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    MODE: tl.constexpr, SWAPPED: tl.constexpr, PIECES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tiles_used)
    column_tiles = tl.cdiv(ffn, BLOCK_N)
    HALF: tl.constexpr = BLOCK_M // 2
    tl.assume(width > 0)
    for tile in tl.range(
        tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN
    ):
        row_tile, column_tile = grouped_order(tile, row_tiles, column_tiles, GROUP)
        e = tl.load(tile_expert + row_tile)
        first_row = tl.load(tile_row + row_tile)
        end = tl.load(tile_end + row_tile)
        first_column = column_tile * BLOCK_N
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        rest = tl.zeros((HALF, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, width, BLOCK_K):
            x = x_desc.load([first_row, k])
            x_rest = x_half_desc.load([first_row + BLOCK_M, k])
            w = w_desc.load([0, e, first_column, k]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x, w.T, both, input_precision="ieee")
            rest = tl.dot(x_rest, w.T, rest, input_precision="ieee")
        gate, up = rest.reshape(HALF, 2, BLOCK_N).permute(0, 2, 1).split()
        if SWAPPED:
            gate, up = up, gate
        rows = first_row + BLOCK_M + tl.arange(0, HALF)
        finish_swiglu(
            gate, up, rows, first_row, end, first_column, column_tile * PIECES, None, hidden, gate_up,
            row_weights, None, n_rows, ffn, HALF, BLOCK_N, MODE, PIECES,
        )  # fmt: skip
        gate, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        if SWAPPED:
            gate, up = up, gate
        rows = first_row + tl.arange(0, BLOCK_M)
        finish_swiglu(
            gate, up, rows, first_row, end, first_column, column_tile * PIECES, None, hidden, gate_up,
            row_weights, None, n_rows, ffn, BLOCK_M, BLOCK_N, MODE, PIECES,
        )  # fmt: skip
