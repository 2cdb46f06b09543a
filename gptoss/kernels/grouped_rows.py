"""Rows times weights: each run of rows with its expert's matrix.

The down projection; the input gradient, one product over gate and up together; and the product with W2 that opens the
backward pass, whose epilogue goes on to the SwiGLU's derivative. Tiles are fetched by descriptors, as in version 4.

Shapes: R routed rows sorted by expert, E experts, P pairs (1 or 2), K reduction width, N result width.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from gptoss.kernels.descriptors import describable, describe, describe_pair
from gptoss.kernels.expert_tiles import TileTable, grouped_order
from gptoss.kernels.launch import programs
from gptoss.kernels.rows_epilogue import DERIVATIVE, PLAIN, finish_rows
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
    out = a.new_empty(a.shape[0], weights[0].shape[1 if transposed else 2])
    _launch_rows(a, table, weights, tiles, transposed, out, PLAIN)
    return out


def swiglu_derivative_kept(
    d_y: Float[Tensor, "R C"],
    table: TileTable,
    w2: Float[Tensor, "E C F"],
    gate_up: Float[Tensor, "R 2F"],
    row_weights: Float[Tensor, "R"],
    tiles: Tiles,
) -> tuple[Float[Tensor, "R 2F"], Float[Tensor, "R F"], Float[Tensor, "parts R"]]:
    """Multiply dL/dy with W2 and, before it leaves the registers, turn dL/dh into the gradients of gate and up.

    Args:
        d_y: (R, C) gradient of the weighted expert outputs, in sorted order.
        table: tiles of ``tiles.m`` rows.
        w2: (E, C, F) down weights.
        gate_up: (R, 2F) gate and up rows kept by the forward pass.
        row_weights: (R,) float32 routing weights.
        tiles: block sizes.

    Returns:
        (R, 2F) gradients of gate and up, (R, F) weighted hidden rows, (parts, R) float32 parts of the row weights'
        gradient, to be added up.

    Source: chapter 10, version 5.
    """
    n_rows, ffn = d_y.shape[0], w2.shape[2]
    d_gate_up = torch.empty_like(gate_up)
    hidden = gate_up.new_empty(n_rows, ffn)
    n_parts = triton.cdiv(ffn, tiles.n) * tiles.pieces
    parts = torch.empty(n_parts, n_rows, dtype=torch.float32, device=d_y.device)
    # Fetched by descriptor: their tiles then take whatever layout the accumulators have, and nothing is shuffled for them.
    pair = gate_up.unflatten(1, (2, ffn)).transpose(0, 1)  # (2, R, F), the same memory
    gate_up_desc = describe(pair, [2, tiles.m, tiles.n // tiles.pieces])
    args = (gate_up_desc, hidden, row_weights, parts)
    _launch_rows(d_y, table, (w2,), tiles, False, d_gate_up, DERIVATIVE, *args)
    return d_gate_up, hidden, parts


def _launch_rows(
    a, table, weights, tiles, transposed, out, epilogue, gate_up_desc=None, hidden=None, row_weights=None, parts=None
):  # fmt: skip
    n_rows, pairs = a.shape[0], len(weights)
    if n_rows == 0:
        return
    depth, width = weights[0].shape[1:][::-1] if transposed else weights[0].shape[1:]
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
        a_desc, b_desc, gate_up_desc, out, hidden, row_weights, parts,
        table.expert, table.row, table.end, table.used, n_rows, depth, width,
        PAIRS=pairs, SWAPPED=swapped, TRANSPOSED=transposed, EPILOGUE=epilogue,
        BLOCK_M=tiles.m, BLOCK_N=tiles.n, BLOCK_K=tiles.k, GROUP=tiles.group,
        PIECES=tiles.pieces, FLATTEN=tiles.flatten,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _rows_kernel(
    a_desc, b_desc, gate_up_desc, out, hidden, row_weights, parts,
    tile_expert, tile_row, tile_end, tiles_used, n_rows, depth, width,
    PAIRS: tl.constexpr, SWAPPED: tl.constexpr, TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr,
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
        finish_rows(
            y, rows, first_row, end, first_column, column_tile * PIECES, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, BLOCK_M, BLOCK_N, EPILOGUE, PIECES,
        )  # fmt: skip
