"""The routed experts whole: gather, gated half, down projection and weighted sum as one operator.

Forward, with the routing weight w multiplied into the hidden rows where they leave the registers (so that neither the down
projection nor the sum over the k experts needs it):

    xs = x[token]        h = w · silu(xs W1ᵀ) * (xs W3ᵀ)        y = h W2ᵀ        out[n] = Σ_j y[row of (n, j)]

Backward, given g = dL/dout:

    gs = g[token]        dh = gs W2        [da | du], h, dw from dh and gate, up, in one pass
    dW2 = gsᵀ h          [dW1; dW3] = [da | du]ᵀ xs             dx[n] = Σ_j ([da | du] · [W1; W3])[row of (n, j)]

Kept for the backward pass: x, xs, the plan, and gate and up (in 16-bit, xs is 2·R·C bytes, gate and up 4·R·F). h is made again
on the way, y is not needed. With ``recompute`` neither xs nor gate and up are kept: 4·R·C·F more FLOPs, two ninths of the layer's.

Shapes: N tokens, k experts a token, R = N·k routed rows, C model width, F ffn width, E experts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.checks import autocast_together, check_layer
from gptoss.kernels.versions import choose, require_triton


def grouped_experts(
    x: Float[Tensor, "N C"],
    weights: Float[Tensor, "N k"],
    order: Int[Tensor, "R"],
    inverse: Int[Tensor, "R"],
    counts: Int[Tensor, "E"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    w2: Float[Tensor, "E C F"],
    *,
    recompute: bool = False,
) -> Float[Tensor, "N C"]:
    """Send each token through its k experts and add up their answers, weighted.

        out[n] = Σ_j weights[n, j] · W2[e] (silu(W1[e] x[n]) * (W3[e] x[n])),     e = expert of slot (n, j)

    Args:
        x: (N, C) token rows; any strides.
        weights: (N, k) routing weights, any floating dtype; they get a gradient.
        order: (R,) integer, slot token·k + choice of each row sorted by expert.
        inverse: (R,) integer, sorted row of each slot.
        counts: (E,) integer, rows per expert.
        w1, w3: (E, F, C); w2: (E, C, F), dtype of x (under autocast all are cast to its dtype).
        recompute: keep neither the gathered rows nor gate and up for the backward pass.

    Returns:
        (N, C) in the dtype of x. The same inputs give the same bits: nothing is added atomically.

    Raises:
        ImportError: without Triton.
        ValueError: on shapes or dtypes that do not fit, or a GPU or dtype that the kernels do not run on.
        RuntimeError: for CPU tensors without Triton's interpreter.

    Source: chapter 10, version 5.
    """
    require_triton()
    x, w1, w3, w2 = autocast_together(x, w1, w3, w2)
    check_layer(x, weights, order, inverse, counts, w1, w3, w2)
    return _experts(x, weights, order, inverse, counts, w1, w3, w2, recompute)[0]


@torch.library.custom_op("gptoss::grouped_experts", mutates_args=())
def _experts(
    x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, counts: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out, gathered rows and gate and up, both empty if not kept, row weights); all but out are for the backward pass."""
    from gptoss.kernels.expert_tiles import tile_table
    from gptoss.kernels.grouped_rows import grouped_rows
    from gptoss.kernels.rows import gather_rows, sum_rows
    from gptoss.kernels.swiglu_persistent import swiglu_persistent

    with torch.cuda.device_of(x):  # Triton launches on the current device
        tiles, k, width = choose(x).tiles, weights.shape[1], x.shape[1]
        x, w1, w3, w2 = _padded(x, w1, w3, w2)
        rows, row_weights = gather_rows(x, order, k, weights)
        assert row_weights is not None
        table = tile_table(counts, rows.shape[0], tiles["swiglu"].m)
        hidden, gate_up = swiglu_persistent(
            rows, table, w1, w3, tiles["swiglu"], row_weights=row_weights, keep=not recompute
        )
        if tiles["down"].m != table.tile_rows:
            table = tile_table(counts, rows.shape[0], tiles["down"].m)
        y = grouped_rows(hidden, table, (w2,), tiles["down"], transposed=True)
        out = sum_rows(y, inverse, k)[:, :width].contiguous()
        if gate_up is None:
            return out, x.new_empty(0), x.new_empty(0), row_weights
        return out, rows, gate_up, row_weights


@_experts.register_fake
def _(
    x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, counts: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n_rows, multiple = order.shape[0], 16 // x.element_size()
    width, ffn = (-(-size // multiple) * multiple for size in (x.shape[1], w1.shape[1]))
    rows, gate_up = (x.new_empty(0 if recompute else (n_rows, n)) for n in (width, 2 * ffn))
    return x.new_empty(x.shape), rows, gate_up, x.new_empty(n_rows, dtype=torch.float32)


@torch.library.custom_op("gptoss::grouped_experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor, x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, counts: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, rows: Tensor, gate_up: Tensor, row_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from gptoss.kernels.expert_tiles import tile_table
    from gptoss.kernels.grouped_rows import grouped_rows
    from gptoss.kernels.grouped_weights import Product, grouped_weight_gradients
    from gptoss.kernels.rows import gather_rows, sum_parts, sum_rows
    from gptoss.kernels.swiglu_derivative import swiglu_derivative
    from gptoss.kernels.swiglu_persistent import swiglu_derivative_recomputed

    with torch.cuda.device_of(x):  # Triton launches on the current device
        tiles, k = choose(x).tiles, weights.shape[1]
        width, ffn = x.shape[1], w1.shape[1]
        if order.shape[0] == 0:
            dw1, dw3, dw2 = (w.new_zeros(w.shape) for w in (w1, w3, w2))
            return x.new_empty(x.shape), weights.new_empty(weights.shape), dw1, dw3, dw2
        x, w1, w3, w2 = _padded(x, w1, w3, w2)
        (grad,) = _padded(grad)
        d_y, _ = gather_rows(grad, order, k)
        n_rows = d_y.shape[0]
        table = tile_table(counts, n_rows, tiles["down"].m)
        d_hidden = grouped_rows(d_y, table, (w2,), tiles["down"], transposed=False)
        hidden: Tensor | None
        if gate_up.numel():
            d_gate_up, d_weights = swiglu_derivative(d_hidden, gate_up, row_weights, order, weights)
            hidden = d_hidden
        else:
            rows, _ = gather_rows(x, order, k)
            if tiles["swiglu_backward"].m != table.tile_rows:
                table = tile_table(counts, n_rows, tiles["swiglu_backward"].m)
            d_gate_up, hidden, parts = swiglu_derivative_recomputed(
                d_hidden, rows, table, w1, w3, tiles["swiglu_backward"], row_weights=row_weights
            )
            assert hidden is not None
            assert parts is not None
            d_weights = sum_parts(parts, order, weights)
            del parts
        del d_hidden
        dw2 = torch.empty(w2.shape, dtype=w2.dtype, device=w2.device)
        dw1, dw3 = (torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in (w1, w3))
        products = (Product(d_gate_up, rows, (dw1, dw3)), Product(d_y, hidden, (dw2,)))
        grouped_weight_gradients(products, table, tiles["weights"])
        del hidden, d_y, rows, products
        if tiles["input"].m != table.tile_rows:
            table = tile_table(counts, n_rows, tiles["input"].m)
        d_rows = grouped_rows(d_gate_up, table, (w1, w3), tiles["input"], transposed=False)
        return (
            sum_rows(d_rows, inverse, k)[:, :width].contiguous(),
            d_weights,
            dw1[:, :ffn, :width].contiguous(),
            dw3[:, :ffn, :width].contiguous(),
            dw2[:, :width, :ffn].contiguous(),
        )


@_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, counts: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor, rows: Tensor, gate_up: Tensor, row_weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return tuple(t.new_empty(t.shape) for t in (x, weights, w1, w3, w2))  # type: ignore[return-value]  # five of them


def _context(ctx, inputs, output):
    *tensors, _recompute = inputs
    # Else autograd fills gradients of zeros for the rows and for gate and up: 2·R·C + 4·R·F bytes.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _gradient(ctx, grad, *_):
    dx, dweights, dw1, dw3, dw2 = _experts_backward(grad, *ctx.saved_tensors)
    return dx, dweights, None, None, None, dw1, dw3, dw2, None


_experts.register_autograd(_gradient, setup_context=_context)


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows padded in width, weights in both of their widths, to whole multiples of 16 bytes."""
    from gptoss.kernels.descriptors import pad_to_engine

    return tuple(pad_to_engine(t, (1,) if t.ndim == 2 else (1, 2)) for t in tensors)
