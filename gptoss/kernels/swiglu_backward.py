"""Version 5: the backward pass of the grouped SwiGLU as three launches.

    1. gate and up again, and their gradients in the epilogue        4·R·C·F FLOPs
    2. dx = [da | du] · [W1; W3], one product over both              4·R·C·F
    3. [dW1; dW3] = [da | du]ᵀ · x, one launch for both              4·R·C·F

Recompute or keep? Keeping gate and up costs 8·R·F bytes of traffic in bf16 (written once, read once) and 4·R·F bytes of memory
until the backward pass; recomputing costs 4·R·C·F FLOPs. For 65,536 rows, C = 768 and F = 1536, an H200 that copies 4.27 TB/s
and multiplies at 716 TFLOP/s (chapter 10) needs 0.19 ms for the one and 0.43 ms for the other, and 384 MiB are kept. This
function recomputes, as the documents' does: it keeps its inputs alone.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.descriptors import describable, pad_to_engine
from gptoss.kernels.expert_tiles import tile_table
from gptoss.kernels.grouped_rows import grouped_rows
from gptoss.kernels.grouped_weights import Product, grouped_weight_gradients
from gptoss.kernels.swiglu_persistent import swiglu_derivative_recomputed
from gptoss.kernels.tuning import Tiles


def swiglu_backward(
    d_hidden: Float[Tensor, "R F"],
    x_sorted: Float[Tensor, "R C"],
    counts: Int[Tensor, "E"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    tiles: dict[str, Tiles],
) -> tuple[Float[Tensor, "R C"], Float[Tensor, "E F C"], Float[Tensor, "E F C"]]:
    """Gradients of the grouped SwiGLU with respect to rows and weights; an idle expert's are zeros.

    Args:
        d_hidden: (R, F) incoming gradient; any strides, stride 0 too.
        x_sorted, counts, w1, w3: the forward pass's inputs; any strides.
        tiles: block sizes under "swiglu_backward", "input" and "weights".

    Returns:
        dL/dx_sorted, dL/dw1, dL/dw3.

    Source: chapter 10, version 5.
    """
    (n_rows, width), ffn = x_sorted.shape, w1.shape[1]
    if n_rows == 0:
        return x_sorted.new_empty(x_sorted.shape), w1.new_zeros(w1.shape), w3.new_zeros(w3.shape)
    x = describable(pad_to_engine(x_sorted, (1,)))
    w1, w3 = (describable(pad_to_engine(w, (1, 2))) for w in (w1, w3))
    d_hidden = pad_to_engine(d_hidden, (1,))
    table = tile_table(counts, n_rows, tiles["swiglu_backward"].m)
    d_gate_up, _, _ = swiglu_derivative_recomputed(
        d_hidden, x, table, w1, w3, tiles["swiglu_backward"]
    )
    if tiles["input"].m != table.tile_rows:
        table = tile_table(counts, n_rows, tiles["input"].m)
    dx = grouped_rows(d_gate_up, table, (w1, w3), tiles["input"], transposed=False)
    dw1, dw3 = (torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in (w1, w3))
    grouped_weight_gradients((Product(d_gate_up, x, (dw1, dw3)),), table, tiles["weights"])
    return (
        dx[:, :width].contiguous(),
        dw1[:, :ffn, :width].contiguous(),
        dw3[:, :ffn, :width].contiguous(),
    )
