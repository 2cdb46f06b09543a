"""What every expert kernel does with a finished tile of gate and up, forward and backward.

With a the gate, u the up row, w the routing weight and g = dL/dh for h = w · a·σ(a)·u:

    s = a·σ(a)               dw = Σ g·s·u over the hidden units
    du = w·g · s             da = w·g · u · σ(a)·(1 + a·(1 − σ(a)))

All of it in float32, whatever the rows' dtype.

Shapes: M rows of a tile, N columns of a tile, R routed rows, F ffn width.
"""

import triton
import triton.language as tl


@triton.jit
def load_weights(row_weights, rows, in_run):
    """(M,) routing weights of a tile's rows; 1 where there are none."""
    if row_weights is None:
        weight = tl.full(rows.shape, 1.0, tl.float32)
    else:
        weight = tl.load(row_weights + rows, mask=in_run, other=0.0)
    return weight


@triton.jit
def store_hidden(gate, up, weight, rows, columns, mask, hidden, ffn):
    """Write w · a·σ(a)·u."""
    value = gate * tl.sigmoid(gate) * up * weight[:, None]
    at = hidden + rows.to(tl.int64)[:, None] * ffn + columns[None, :]
    tl.store(at, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def store_derivative(
    gate, up, grad, weight, rows, in_run, columns, mask, part, hidden, d_gate_up, parts, n_rows, ffn
):
    """Write [da | du]; where there are routing weights also h and this tile's part of dw, row ``part`` of (parts, R)."""
    grad = grad.to(tl.float32)
    sigma = tl.sigmoid(gate)
    silu = gate * sigma
    scaled = grad * weight[:, None]
    at = d_gate_up + rows.to(tl.int64)[:, None] * (2 * ffn) + columns[None, :]
    kind = d_gate_up.dtype.element_ty
    d_gate = scaled * up * sigma * (1 + gate * (1 - sigma))
    tl.store(at, d_gate.to(kind), mask=mask)
    tl.store(at + ffn, (scaled * silu).to(kind), mask=mask)
    if parts is not None:
        product = silu * up
        at = hidden + rows.to(tl.int64)[:, None] * ffn + columns[None, :]
        tl.store(at, (product * weight[:, None]).to(kind), mask=mask)
        d_weight = tl.sum(tl.where(mask, grad * product, 0.0), 1)  # (M,)
        tl.store(parts + part.to(tl.int64) * n_rows + rows, d_weight, mask=in_run)
