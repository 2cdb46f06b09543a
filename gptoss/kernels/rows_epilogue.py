"""What the grouped row product does with a finished tile: store it, or go on to the SwiGLU's derivative.

Shapes: M rows of a tile, N columns of a tile, R routed rows.
"""

import triton
import triton.language as tl

from gptoss.kernels.swiglu_epilogue import load_weights, store_derivative

PLAIN, DERIVATIVE = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def finish_rows(
    y, rows, first_row, end, first_column, part, gate_up_desc, out, hidden, row_weights, parts, n_rows, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EPILOGUE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    if (
        PIECES > 1
    ):  # one column half after the other, so that fewer registers and less shared memory are in use at once
        HALF: tl.constexpr = WIDTH // 2
        y_0, y_1 = y.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        finish_rows(
            y_0, rows, first_row, end, first_column, part, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, ROWS, HALF, EPILOGUE, PIECES // 2,
        )  # fmt: skip
        finish_rows(
            y_1, rows, first_row, end, first_column + HALF, part + PIECES // 2, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, ROWS, HALF, EPILOGUE, PIECES // 2,
        )  # fmt: skip
    else:
        _finish_piece(
            y, rows, first_row, end, first_column, part, gate_up_desc, out, hidden,
            row_weights, parts, n_rows, width, WIDTH, EPILOGUE,
        )  # fmt: skip


@triton.jit
def _finish_piece(
    y, rows, first_row, end, first_column, part, gate_up_desc, out, hidden,
    row_weights, parts, n_rows, width,
    WIDTH: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    columns = first_column + tl.arange(0, WIDTH)
    in_run = rows < end
    mask = in_run[:, None] & (columns < width)[None, :]
    if EPILOGUE == DERIVATIVE:
        weight = load_weights(row_weights, rows, in_run)
        both = gate_up_desc.load([0, first_row, first_column])  # (2, M, N): one wait for the two
        gate, up = both.permute(1, 2, 0).to(tl.float32).split()
        gate, up = _tied(gate, y), _tied(up, y)
        store_derivative(
            gate, up, y, weight, rows, in_run, columns, mask, part, hidden, out, parts, n_rows, width
        )  # fmt: skip
    else:
        at = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tied(value, anchor):
    """The value itself, in a form that hangs on the anchor.

    Left free, the compiler computes all that follows from ``value`` twice, once for each layout that is stored.
    """
    return tl.where(
        anchor == anchor, value, value + 0.0
    )  # a move in assembly is free, but makes the stores spill
