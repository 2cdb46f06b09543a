"""What every expert kernel does with a finished tile of gate and up, forward and backward.

With a the gate, u the up row, w the routing weight and g = dL/dh for h = w · a·σ(a)·u:

    s = a·σ(a)               dw = Σ g·s·u over the hidden units
    du = w·g · s             da = w·g · u · (σ(a) + s·(1 − σ(a)))

All of it in float32, whatever the rows' dtype.

The sigmoid is where an epilogue's time goes: a multiprocessor takes 16 exponentials or reciprocals a cycle, and Triton's own
sigmoid adds range handling around each. Here two neighbours share one reciprocal, 1/p = q·(1/pq) and 1/q = p·(1/pq): three
special functions for two values instead of four, no branches. The exponent is held at 60 so that pq cannot overflow: below
a = −41 the sigmoid is 2⁻⁶⁰ instead of less.

Shapes: M rows of a tile, N columns of a tile, R routed rows, F ffn width.
"""

import triton
import triton.language as tl

HIDDEN, HIDDEN_AND_KEEP, DERIVATIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# The interpreter knows no assembly. Triton itself decides by this knob, at import, whether to interpret.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
TWO_SIGMOIDS = tl.constexpr(
    """{
    .reg .f32 p, q, r;
    mul.f32 p, $2, 0fBFB8AA3B;        // -x log2(e)
    mul.f32 q, $3, 0fBFB8AA3B;
    min.f32 p, p, 0f42700000;         // 60
    min.f32 q, q, 0f42700000;
    ex2.approx.ftz.f32 p, p;
    ex2.approx.ftz.f32 q, q;
    add.f32 p, p, 0f3F800000;         // 1
    add.f32 q, q, 0f3F800000;
    mul.f32 r, p, q;
    rcp.approx.ftz.f32 r, r;
    mul.f32 $0, q, r;
    mul.f32 $1, p, r;
    }"""
)


@triton.jit
def sigmoid(x):
    """σ(x) of a float32 tile to a few units in the last place."""
    if INTERPRETED:
        y = tl.sigmoid(x)
    else:
        y = tl.inline_asm_elementwise(
            TWO_SIGMOIDS, "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2
        )
    return y


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
    value = gate * sigmoid(gate) * up * weight[:, None]
    at = hidden + rows.to(tl.int64)[:, None] * ffn + columns[None, :]
    tl.store(at, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def derivative(gate, up, grad, weight):
    """da, du, and h before its weight; ``weight`` is a column, all float32."""
    sigma = sigmoid(gate)
    silu = gate * sigma
    scaled = grad * weight
    return scaled * up * (sigma + silu * (1 - sigma)), scaled * silu, silu * up


@triton.jit
def store_derivative(
    gate, up, grad, weight, rows, in_run, columns, mask, part, hidden, d_gate_up, parts, n_rows, ffn
):
    """Write [da | du]; where there are routing weights also h and this tile's part of dw, row ``part`` of (parts, R)."""
    grad = grad.to(tl.float32)
    d_gate, d_up, product = derivative(gate, up, grad, weight[:, None])
    at = d_gate_up + rows.to(tl.int64)[:, None] * (2 * ffn) + columns[None, :]
    kind = d_gate_up.dtype.element_ty
    tl.store(at, d_gate.to(kind), mask=mask)
    tl.store(at + ffn, d_up.to(kind), mask=mask)
    if parts is not None:
        at = hidden + rows.to(tl.int64)[:, None] * ffn + columns[None, :]
        tl.store(at, (product * weight[:, None]).to(kind), mask=mask)
        d_weight = tl.sum(grad * product, 1)  # (M,); columns past F add zeros
        tl.store(parts + part.to(tl.int64) * n_rows + rows, d_weight, mask=in_run)


@triton.jit
def finish_swiglu(
    gate, up, rows, first_row, end, first_column, part, d_desc, hidden, gate_up, row_weights, parts, n_rows, ffn,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    if (
        PIECES > 1
    ):  # one column half after the other, so that fewer registers and less shared memory are in use at once
        HALF: tl.constexpr = WIDTH // 2
        gate_0, gate_1 = gate.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        up_0, up_1 = up.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        finish_swiglu(
            gate_0, up_0, rows, first_row, end, first_column, part, d_desc, hidden, gate_up,
            row_weights, parts, n_rows, ffn, ROWS, HALF, MODE, PIECES // 2,
        )  # fmt: skip
        finish_swiglu(
            gate_1, up_1, rows, first_row, end, first_column + HALF, part + PIECES // 2, d_desc, hidden, gate_up,
            row_weights, parts, n_rows, ffn, ROWS, HALF, MODE, PIECES // 2,
        )  # fmt: skip
    else:
        _finish_piece(
            gate, up, rows, first_row, end, first_column, part, d_desc, hidden, gate_up,
            row_weights, parts, n_rows, ffn, WIDTH, MODE,
        )  # fmt: skip


@triton.jit
def _finish_piece(
    gate, up, rows, first_row, end, first_column, part, d_desc, hidden, gate_up,
    row_weights, parts, n_rows, ffn,
    WIDTH: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    columns = first_column + tl.arange(0, WIDTH)
    in_run = rows < end
    mask = in_run[:, None] & (columns < ffn)[None, :]
    weight = load_weights(row_weights, rows, in_run)
    if MODE == DERIVATIVE:
        d = d_desc.load([first_row, first_column])
        store_derivative(
            gate,
            up,
            d,
            weight,
            rows,
            in_run,
            columns,
            mask,
            part,
            hidden,
            gate_up,
            parts,
            n_rows,
            ffn,
        )
    else:
        if MODE == HIDDEN_AND_KEEP:
            at = gate_up + rows.to(tl.int64)[:, None] * (2 * ffn) + columns[None, :]
            tl.store(at, gate.to(gate_up.dtype.element_ty), mask=mask)
            tl.store(at + ffn, up.to(gate_up.dtype.element_ty), mask=mask)
        store_hidden(gate, up, weight, rows, columns, mask, hidden, ffn)
