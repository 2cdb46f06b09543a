"""What the grouped row product does with a finished tile: store it, or go on to the SwiGLU's derivative.

Shapes: M rows of a tile, N columns of a tile, R routed rows.
"""

import triton
import triton.language as tl

from gptoss.kernels.run_store import store_tile
from gptoss.kernels.swiglu_epilogue import INTERPRETED, load_weights, store_derivative

PLAIN, DERIVATIVE = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def finish_rows(
    y, rows, first_row, end, first_column, part, gate_up_desc, out, hidden, row_weights, parts, n_rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EPILOGUE: tl.constexpr, PIECES: tl.constexpr, ENGINE: tl.constexpr,
):  # fmt: skip
    if (
        PIECES > 1
    ):  # one column half after the other, so that fewer registers and less shared memory are in use at once
        HALF: tl.constexpr = WIDTH // 2
        y_0, y_1 = y.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        finish_rows(
            y_0, rows, first_row, end, first_column, part, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, ROWS, HALF, EPILOGUE, PIECES // 2, ENGINE,
        )  # fmt: skip
        finish_rows(
            y_1, rows, first_row, end, first_column + HALF, part + PIECES // 2, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, ROWS, HALF, EPILOGUE, PIECES // 2, ENGINE,
        )  # fmt: skip
    else:
        _finish_piece(
            y, rows, first_row, end, first_column, part, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, EPILOGUE, ENGINE,
        )  # fmt: skip


@triton.jit
def _finish_piece(
    y, rows, first_row, end, first_column, part, gate_up_desc, out, hidden,
    row_weights, parts, n_rows, width,
    EPILOGUE: tl.constexpr, ENGINE: tl.constexpr,
):  # fmt: skip
    columns = first_column + tl.arange(0, y.shape[1])
    in_run = rows < end
    mask = in_run[:, None] & (columns < width)[None, :]
    if EPILOGUE == DERIVATIVE:
        weight = load_weights(row_weights, rows, in_run)
        both = gate_up_desc.load([0, first_row, first_column])  # (2, M, N): one wait for the two
        gate, up = both.permute(1, 2, 0).to(tl.float32).split()
        gate, up = _tied(gate, y, ENGINE), _tied(up, y, ENGINE)
        store_derivative(
            gate, up, y, weight, rows, columns, mask, first_row, end, first_column, part, hidden, out, parts,
            n_rows, width, ENGINE,
        )  # fmt: skip
    else:
        store_tile(out, y, rows, columns, mask, first_row, end, first_column, width, 0, 1, ENGINE)


@triton.jit
def _tied(value, anchor, ENGINE: tl.constexpr):
    """The value itself, in a form that hangs on the anchor.

    Left free, the compiler computes all that follows from ``value`` twice, once for each layout that is stored.
    """
    if INTERPRETED:
        tied = value
    elif ENGINE:
        tied = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [value, anchor], tl.float32, is_pure=True, pack=1
        )
    else:  # three instructions more, but beside addresses of threads the move above spills registers
        tied = tl.where(anchor == anchor, value, value + 0.0)
    return tied
