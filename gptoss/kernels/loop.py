"""Version 1: the loop over experts, as operators with a hand-written backward.

Each expert runs three ordinary matrix products on its run of rows. The row counts are read on the host, once per call,
inside the operator, so ``torch.compile(fullgraph=True)`` sees one opaque node and no graph break.

Gradient of h = a·σ(a)·u with a = W1 x, u = W3 x, given g = dL/dh:

    du = g · a·σ(a)          da = g · u · σ(a)·(1 + a·(1 − σ(a)))
    dW1 = daᵀ x              dW3 = duᵀ x              dx = da W1 + du W3

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.checks import autocast_together, check_linear, check_swiglu, rows_per_expert


def grouped_swiglu_loop(
    x_sorted: Float[Tensor, "R C"],
    counts: Int[Tensor, "E"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
) -> Float[Tensor, "R F"]:
    """Apply the gated half of each expert to its own run of rows, one expert at a time.

        h[r] = silu(W1[e] x[r]) * (W3[e] x[r]),     e = the expert whose run holds row r

    An expert without rows gets zero gradients. Gate and up rows are kept for the backward pass.

    Args:
        x_sorted: (R, C) token rows sorted by expert; any strides.
        counts: (E,) integer, rows per expert; they sum to R.
        w1: (E, F, C) gate weights, same dtype as x_sorted (under autocast all are cast to its dtype); any strides.
        w3: (E, F, C) up weights, likewise.

    Returns:
        (R, F) hidden rows in the order of ``x_sorted``.

    Raises:
        ValueError: on shapes or dtypes that do not fit, or counts that do not sum to R.

    Source: chapter 10, version 1.
    """
    x_sorted, w1, w3 = autocast_together(x_sorted, w1, w3)
    check_swiglu(x_sorted, counts, w1, w3)
    return _swiglu(x_sorted, counts, w1, w3)[0]


def grouped_linear_loop(
    h: Float[Tensor, "R F"],
    counts: Int[Tensor, "E"],
    w2: Float[Tensor, "E C F"],
) -> Float[Tensor, "R C"]:
    """Apply the down projection of each expert to its own run of rows: y[r] = W2[e] h[r].

    Args:
        h: (R, F) hidden rows sorted by expert; any strides.
        counts: (E,) integer, rows per expert; they sum to R.
        w2: (E, C, F) down weights, same dtype as h (under autocast both are cast to its dtype); any strides.

    Returns:
        (R, C) expert outputs in the order of ``h``.

    Raises:
        ValueError: on shapes or dtypes that do not fit, or counts that do not sum to R.

    Source: chapter 10, version 1.
    """
    h, w2 = autocast_together(h, w2)
    check_linear(h, counts, w2)
    return _linear(h, counts, w2)


# The operators. PyTorch needs three things of each: the computation, the shape of its result ("fake"), and its gradient.


@torch.library.custom_op("gptoss::grouped_swiglu_loop", mutates_args=())
def _swiglu(x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden, gate, up), each (R, F); the last two are for the backward pass."""
    gate = x.new_empty(x.shape[0], w1.shape[1])
    up = torch.empty_like(gate)
    first = 0
    for expert, n in enumerate(rows_per_expert(counts, x.shape[0])):
        run = slice(first, first + n)
        torch.mm(x[run], w1[expert].t(), out=gate[run])
        torch.mm(x[run], w3[expert].t(), out=up[run])
        first += n
    return torch.nn.functional.silu(gate) * up, gate, up


@_swiglu.register_fake
def _(x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x.new_empty(x.shape[0], w1.shape[1])
    return hidden, torch.empty_like(hidden), torch.empty_like(hidden)


@torch.library.custom_op("gptoss::grouped_swiglu_loop_backward", mutates_args=())
def _swiglu_backward(
    grad: Tensor, x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sigma = torch.sigmoid(gate)
    d_up = grad * (gate * sigma)  # (R, F)
    d_gate = grad * up * (sigma * (1 + gate * (1 - sigma)))  # (R, F)
    dx, dw1, dw3 = x.new_empty(x.shape), w1.new_empty(w1.shape), w3.new_empty(w3.shape)
    first = 0
    for expert, n in enumerate(rows_per_expert(counts, x.shape[0])):
        run = slice(first, first + n)
        torch.mm(d_gate[run], w1[expert], out=dx[run])
        torch.addmm(dx[run], d_up[run], w3[expert], out=dx[run])
        torch.mm(d_gate[run].t(), x[run], out=dw1[expert])  # no rows: a sum over nothing, zero
        torch.mm(d_up[run].t(), x[run], out=dw3[expert])
        first += n
    return dx, dw1, dw3


@_swiglu_backward.register_fake
def _(
    grad: Tensor, x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), w1.new_empty(w1.shape), w3.new_empty(w3.shape)


def _swiglu_context(ctx, inputs, output):
    x, counts, w1, w3 = inputs
    ctx.set_materialize_grads(False)  # no zeros for gate and up, which only the backward pass reads
    ctx.save_for_backward(x, counts, w1, w3, output[1], output[2])


def _swiglu_gradient(ctx, grad, _grad_gate, _grad_up):
    x, counts, w1, w3, gate, up = ctx.saved_tensors
    dx, dw1, dw3 = _swiglu_backward(grad, x, counts, w1, w3, gate, up)
    return dx, None, dw1, dw3


_swiglu.register_autograd(_swiglu_gradient, setup_context=_swiglu_context)


@torch.library.custom_op("gptoss::grouped_linear_loop", mutates_args=())
def _linear(h: Tensor, counts: Tensor, w2: Tensor) -> Tensor:
    y = h.new_empty(h.shape[0], w2.shape[1])
    first = 0
    for expert, n in enumerate(rows_per_expert(counts, h.shape[0])):
        run = slice(first, first + n)
        torch.mm(h[run], w2[expert].t(), out=y[run])
        first += n
    return y


@_linear.register_fake
def _(h: Tensor, counts: Tensor, w2: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], w2.shape[1])


@torch.library.custom_op("gptoss::grouped_linear_loop_backward", mutates_args=())
def _linear_backward(grad: Tensor, h: Tensor, counts: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    dh, dw2 = h.new_empty(h.shape), w2.new_empty(w2.shape)
    first = 0
    for expert, n in enumerate(rows_per_expert(counts, h.shape[0])):
        run = slice(first, first + n)
        torch.mm(grad[run], w2[expert], out=dh[run])
        torch.mm(grad[run].t(), h[run], out=dw2[expert])
        first += n
    return dh, dw2


@_linear_backward.register_fake
def _(grad: Tensor, h: Tensor, counts: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), w2.new_empty(w2.shape)


def _linear_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _linear_gradient(ctx, grad):
    dh, dw2 = _linear_backward(grad, *ctx.saved_tensors)
    return dh, None, dw2


_linear.register_autograd(_linear_gradient, setup_context=_linear_context)
