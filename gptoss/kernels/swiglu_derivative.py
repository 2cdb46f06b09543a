"""The SwiGLU's derivative where gate and up were kept: one pass over memory.

Three (R, F) streams come in, dL/dh, gate and up; three go out, dL/dgate, dL/dup and the hidden rows, which the gradient of W2
reads. The equations stand in ``swiglu_epilogue``. As the epilogue of the product that makes dL/dh it would save two of the
streams; so it was at first, and took as long as this pass and that product together, with its loads pipelined too. A kernel
that only moves rows comes near to the memory's pace.

Shapes: N tokens, k experts a token, R = N·k routed rows sorted by expert, F ffn width.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.swiglu_epilogue import derivative

BLOCK_ROWS, BLOCK_COLUMNS = 2, 512


def swiglu_derivative(
    d_hidden: Float[Tensor, "R F"],
    gate_up: Float[Tensor, "R 2F"],
    row_weights: Float[Tensor, "R"],
    order: Int[Tensor, "R"],
    weights: Float[Tensor, "N k"],
) -> tuple[Float[Tensor, "R 2F"], Float[Tensor, "N k"]]:
    """Turn dL/dh into the gradients of gate, up and routing weights; h = w · silu(a)·u takes its place.

    Args:
        d_hidden: (R, F) contiguous gradient of the weighted hidden rows; overwritten with the hidden rows themselves.
        gate_up: (R, 2F) contiguous gate and up rows, side by side, kept by the forward pass.
        row_weights: (R,) float32 routing weights in sorted order.
        order: (R,) slot of each sorted row.
        weights: (N, k) routing weights; they give their gradient's shape and dtype.

    Returns:
        (R, 2F) gradients of gate and up, (N, k) gradient of the routing weights.

    Source: chapter 10, version 5.
    """
    n_rows, ffn = d_hidden.shape
    d_gate_up = torch.empty_like(gate_up)
    d_weights = weights.new_empty(weights.shape)
    if n_rows:
        _derivative_kernel[(triton.cdiv(n_rows, BLOCK_ROWS),)](
            d_hidden, gate_up, row_weights, order, d_gate_up, d_weights, n_rows, ffn,
            BLOCK_R=BLOCK_ROWS, BLOCK_F=BLOCK_COLUMNS,
        )  # fmt: skip
    return d_gate_up, d_weights


@triton.jit(do_not_specialize=["n_rows"])
def _derivative_kernel(
    d_hidden, gate_up, row_weights, order, d_gate_up, d_weights, n_rows, ffn,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mine = r < n_rows
    weight = tl.load(row_weights + r, mask=mine, other=0.0)[:, None]
    kind = d_gate_up.dtype.element_ty
    row = r.to(tl.int64)[:, None] * ffn
    d_weight = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for first in range(0, ffn, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)[None, :]
        mask = mine[:, None] & (f < ffn)
        grad = tl.load(d_hidden + row + f, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + 2 * row + f, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + 2 * row + ffn + f, mask=mask, other=0.0).to(tl.float32)
        d_gate, d_up, hidden = derivative(gate, up, grad, weight)
        tl.store(d_gate_up + 2 * row + f, d_gate.to(kind), mask=mask)
        tl.store(d_gate_up + 2 * row + ffn + f, d_up.to(kind), mask=mask)
        tl.store(d_hidden + row + f, (hidden * weight).to(kind), mask=mask)
        d_weight += tl.sum(grad * hidden, 1)
    slot = tl.load(order + r, mask=mine, other=0)
    tl.store(d_weights + slot, d_weight.to(d_weights.dtype.element_ty), mask=mine)
