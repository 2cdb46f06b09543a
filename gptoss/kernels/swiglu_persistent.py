"""Version 4: programs that stay, tiles fetched by the copy engine, and one wide product for gate and up.

As many programs start as the GPU holds at once; each walks many tiles, and the fetches for its next tile begin while it still
computes the last one's SwiGLU. W1 and W3 are described as one tensor (2, E, F, C) without copying, so that each step is one
product of x with [W1 tile; W3 tile], twice as wide. Gate and up of a hidden unit then lie in the same thread's registers.

The kernel serves three ends by one compile-time MODE: the hidden rows alone; the hidden rows with gate and up kept; and the
derivative by recomputation, where gate and up are made again and dL/dh becomes dL/dgate and dL/dup (version 5).

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from gptoss.kernels.descriptors import describable, describe, describe_pair
from gptoss.kernels.expert_tiles import TileTable, grouped_order
from gptoss.kernels.launch import programs
from gptoss.kernels.swiglu_epilogue import (
    DERIVATIVE,
    HIDDEN,
    HIDDEN_AND_KEEP,
    finish_swiglu,
)
from gptoss.kernels.tuning import Tiles


def swiglu_persistent(
    x_sorted: Float[Tensor, "R C"],
    table: TileTable,
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    tiles: Tiles,
    *,
    row_weights: Float[Tensor, "R"] | None = None,
    keep: bool = False,
) -> tuple[Float[Tensor, "R F"], Float[Tensor, "R 2F"] | None]:
    """Apply the gated half of each expert to its own run of rows, times the row's routing weight; no gradient.

        h[r] = weight[r] · silu(W1[e] x[r]) * (W3[e] x[r])

    Args:
        x_sorted: (R, C) token rows sorted by expert; C and F whole multiples of 16 bytes.
        table: tiles of ``tiles.m`` rows.
        w1: (E, F, C) gate weights.
        w3: (E, F, C) up weights.
        tiles: block sizes.
        row_weights: (R,) float32 routing weights in sorted order; None is 1.
        keep: also return gate and up, side by side, for the backward pass.

    Returns:
        (R, F) hidden rows, and (R, 2F) gate and up rows or None.

    Source: chapter 10, version 4.
    """
    n_rows, ffn = x_sorted.shape[0], w1.shape[1]
    hidden = x_sorted.new_empty(n_rows, ffn)
    gate_up = x_sorted.new_empty(n_rows, 2 * ffn) if keep else None
    if n_rows == 0:
        return hidden, gate_up
    mode = HIDDEN_AND_KEEP if keep else HIDDEN
    _launch(x_sorted, table, w1, w3, tiles, mode, row_weights, hidden, gate_up, None, None)
    return hidden, gate_up


def swiglu_derivative_recomputed(
    d_hidden: Float[Tensor, "R F"],
    x_sorted: Float[Tensor, "R C"],
    table: TileTable,
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    tiles: Tiles,
    *,
    row_weights: Float[Tensor, "R"] | None = None,
) -> tuple[Float[Tensor, "R 2F"], Float[Tensor, "R F"] | None, Float[Tensor, "parts R"] | None]:
    """Make gate and up again and turn dL/dh into [dL/dgate | dL/dup]; the equations stand in ``swiglu_epilogue``.

    Args:
        d_hidden: (R, F) incoming gradient.
        x_sorted, table, w1, w3, tiles, row_weights: as in the forward pass.

    Returns:
        (R, 2F) gradients of gate and up; with row weights also the (R, F) hidden rows and the (parts, R) float32
        parts of the row weights' gradient, to be added up; else None twice.

    Source: chapter 10, version 5.
    """
    n_rows, ffn = x_sorted.shape[0], w1.shape[1]
    d_gate_up = x_sorted.new_empty(n_rows, 2 * ffn)
    hidden = parts = None
    if row_weights is not None:
        hidden = x_sorted.new_empty(n_rows, ffn)
        n_parts = triton.cdiv(ffn, tiles.n) * tiles.pieces
        parts = torch.empty(n_parts, n_rows, dtype=torch.float32, device=x_sorted.device)
    # Fetched by descriptor: its tile then takes whatever layout the accumulators have, and nothing is shuffled for it.
    d_desc = describe(describable(d_hidden), [tiles.m, tiles.n // tiles.pieces])
    args = (row_weights, hidden, d_gate_up, d_desc, parts)
    _launch(x_sorted, table, w1, w3, tiles, DERIVATIVE, *args)
    return d_gate_up, hidden, parts


def _launch(x, table, w1, w3, tiles, mode, row_weights, hidden, gate_up, d_desc, parts):
    n_rows, (_, ffn, width) = x.shape[0], w1.shape
    if n_rows == 0:
        return
    x_desc = describe(describable(x), [tiles.m, tiles.k])
    w1, w3 = describable(w1), describable(w3)  # named: the pair must outlive the launch
    w_desc, swapped = describe_pair(w1, w3, [2, 1, tiles.n, tiles.k])
    grid = programs(x.device, tiles, table.bound * triton.cdiv(ffn, tiles.n))
    _persistent_kernel[grid](
        x_desc, w_desc, d_desc, hidden, gate_up, row_weights, parts,
        table.expert, table.row, table.end, table.used, n_rows, width, ffn,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        MODE=mode, SWAPPED=swapped, PIECES=tiles.pieces, FLATTEN=tiles.flatten,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _persistent_kernel(
    x_desc, w_desc, d_desc, hidden, gate_up, row_weights, parts,
    tile_expert, tile_row, tile_end, tiles_used, n_rows, width, ffn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    MODE: tl.constexpr, SWAPPED: tl.constexpr, PIECES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.load(tiles_used)
    column_tiles = tl.cdiv(ffn, BLOCK_N)
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
        for k in range(0, width, BLOCK_K):
            x = x_desc.load([first_row, k])  # (M, K); rows past the run are not stored
            w = w_desc.load([0, e, first_column, k]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x, w.T, both, input_precision="ieee")

        # Columns 0..N-1 are one of gate and up, N..2N-1 the other: a split that moves nothing between threads.
        gate, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        if SWAPPED:
            gate, up = up, gate
        rows = first_row + tl.arange(0, BLOCK_M)
        finish_swiglu(
            gate, up, rows, first_row, end, first_column, column_tile * PIECES, d_desc, hidden, gate_up,
            row_weights, parts, n_rows, ffn, BLOCK_M, BLOCK_N, MODE, PIECES,
        )  # fmt: skip
