"""Version 2: the source documents' kernel, 16×32×32, kept as the lesson of chapter 10.

One program computes 16 rows × 32 hidden columns and walks the model width in steps of 32, without software pipelining. Its
grid is (experts, row tiles of the fullest expert, column tiles), so the host must first wait for the largest count.

The forward pass follows the documents, with one repair: addresses are 64-bit. Their backward pass recomputes the oracle and
differentiates it; as they write it, it cannot run (`documents_backward_as_written`), so one call takes the three gradients.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.reference import grouped_swiglu_reference

BLOCK_T, BLOCK_M, BLOCK_N = 16, 32, 32  # rows, reduction step, hidden columns: the documents' names
WARPS, STAGES = 4, 1


def swiglu_documents(
    x_sorted: Float[Tensor, "R C"],
    counts: Int[Tensor, "E"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
) -> Float[Tensor, "R F"]:
    """Apply the gated half of each expert to its own run of rows, with the documents' tiles; no gradient.

        h[r] = silu(W1[e] x[r]) * (W3[e] x[r])

    Args:
        x_sorted: (R, C) token rows sorted by expert; any strides.
        counts: (E,) integer, rows per expert; their maximum is read on the host.
        w1: (E, F, C) gate weights; any strides.
        w3: (E, F, C) up weights; any strides.

    Returns:
        (R, F) hidden rows in the order of ``x_sorted``.

    Source: the source documents, "Triton MoE kernels", sections 5 to 10; chapter 10, version 2.
    """
    n_experts, ffn, width = w1.shape
    out = x_sorted.new_empty(x_sorted.shape[0], ffn)
    fullest = int(counts.max())  # the host waits for the device here
    offsets = counts.cumsum(0) - counts
    grid = (n_experts, triton.cdiv(fullest, BLOCK_T), triton.cdiv(ffn, BLOCK_N))
    if fullest:
        _documents_kernel[grid](
            x_sorted, counts, offsets, w1, w3, out, width, ffn,
            *x_sorted.stride(), *w1.stride(), *w3.stride(), *out.stride(),
            BLOCK_T=BLOCK_T, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


def documents_backward(
    grad: Tensor, x_sorted: Tensor, counts: Tensor, w1: Tensor, w3: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute the oracle and take its three gradients in one call: the documents' backward, mended."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x_sorted, w1, w3)]
        hidden = grouped_swiglu_reference(inputs[0], counts, inputs[1], inputs[2])
    dx, dw1, dw3 = torch.autograd.grad(hidden, inputs, grad)
    return dx, dw1, dw3


def documents_backward_as_written(
    grad: Tensor, x_sorted: Tensor, counts: Tensor, w1: Tensor, w3: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate one recomputed graph three times, as the documents do.

    The first call frees the graph's saved tensors, so the second raises. Kept for chapter 10, which shows it fail.

    Raises:
        RuntimeError: always, "Trying to backward through the graph a second time".

    Source: the source documents, "Triton MoE kernels", section 8.
    """
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x_sorted, w1, w3)]
        hidden = grouped_swiglu_reference(inputs[0], counts, inputs[1], inputs[2])
    dx, dw1, dw3 = (torch.autograd.grad(hidden, leaf, grad)[0] for leaf in inputs)
    return dx, dw1, dw3


@triton.jit
def _documents_kernel(
    x_ptr, counts_ptr, offsets_ptr, w1_ptr, w3_ptr, out_ptr, width, ffn,
    stride_xr, stride_xc, stride_1e, stride_1f, stride_1c, stride_3e, stride_3f, stride_3c, stride_or, stride_of,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_run = row < tl.load(counts_ptr + e)
    in_ffn = column < ffn
    row = tl.load(offsets_ptr + e) + row.to(tl.int64)  # rows of the whole sorted array
    column = column.to(tl.int64)

    gate = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, width, BLOCK_M):
        k = k0 + tl.arange(0, BLOCK_M)
        in_width = k < width
        x = tl.load(
            x_ptr + row[:, None] * stride_xr + k[None, :] * stride_xc,
            mask=in_run[:, None] & in_width[None, :],
            other=0.0,
        )  # (BLOCK_T, BLOCK_M)
        weight_mask = in_ffn[:, None] & in_width[None, :]
        w1 = tl.load(
            w1_ptr + e * stride_1e + column[:, None] * stride_1f + k[None, :] * stride_1c,
            mask=weight_mask,
            other=0.0,
        )  # (BLOCK_N, BLOCK_M)
        w3 = tl.load(
            w3_ptr + e * stride_3e + column[:, None] * stride_3f + k[None, :] * stride_3c,
            mask=weight_mask,
            other=0.0,
        )
        gate += tl.dot(x, tl.trans(w1), input_precision="ieee")
        up += tl.dot(x, tl.trans(w3), input_precision="ieee")

    hidden = gate * tl.sigmoid(gate) * up
    tl.store(
        out_ptr + row[:, None] * stride_or + column[None, :] * stride_of,
        hidden.to(out_ptr.dtype.element_ty),
        mask=in_run[:, None] & in_ffn[None, :],
    )
