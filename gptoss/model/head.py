"""The vocabulary head and its cross-entropy, in chunks: (N, V) logits never exist whole.

    loss = reduce_n [ lse(W h_n) - (W h_n)_{y_n} ]

The gradients with respect to h and W need the softmax of every row, and autograd would keep it. Here each chunk of rows
goes through the head, becomes its own gradient in place, and is multiplied into dh and dW at once; the backward pass
only scales what is already there by the incoming gradient.

Shapes: N tokens, C model width, V vocabulary, n rows of one chunk.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.cross_entropy import (
    cross_entropy_forward_backward_,
    cross_entropy_forward_backward_reference_,
)


def linear_cross_entropy(
    hidden: Float[Tensor, "N C"],
    weight: Float[Tensor, "V C"],
    targets: Int[Tensor, " N"],
    ignore_index: int = -100,
    chunk_size: int = 4096,
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    """Cross-entropy of hidden · weightᵀ against the targets with at most `chunk_size` rows of logits alive.

    loss = Σ_n (lse(W h_n) - (W h_n)_{y_n}) over the rows that are not ignored, divided by their number for "mean".

    Under autocast the matrix products run in the autocast dtype (the weight is cast once); dW is accumulated over the
    chunks in float32 whatever that dtype is. Second derivatives are not available.

    Args:
        hidden: (N, C).
        weight: (V, C), the head's or the tied embedding's matrix.
        targets: (N,) labels in [0, V), or `ignore_index`.
        ignore_index: label of rows that do not count. If no row counts, loss and gradients are 0.
        chunk_size: rows of logits alive at once.
        reduction: "mean" over the rows that count, or "sum".

    Returns:
        The loss in nats, a scalar: float64 for float64 input, else float32.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, chunk_size < 1, or (on CPU) a label outside the
            vocabulary. On CUDA looking at the labels would stall the device, so there such a row makes the loss NaN.

    Source: chapter 12.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden (N, C) and weight (V, C), got {tuple(hidden.shape)} and {tuple(weight.shape)}: "
            "flatten batch and time, and pass the head's matrix untransposed"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected one target per row of hidden, ({hidden.shape[0]},), got {tuple(targets.shape)}: flatten them alike"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f'expected reduction "mean" or "sum", got {reduction!r}: use one of the two'
        )
    if chunk_size < 1:
        raise ValueError(f"expected chunk_size >= 1, got {chunk_size}: 4096 suits a large GPU")

    device = hidden.device.type
    compute_dtype = (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        else hidden.dtype
    )
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    scale = torch.ones((), dtype=wide, device=hidden.device)
    if reduction == "mean":
        scale = scale / (targets != ignore_index).sum().clamp_min(1)
    training = torch.is_grad_enabled()
    loss, _, _ = _linear_cross_entropy(
        hidden,
        weight,
        targets,
        scale,
        ignore_index,
        chunk_size,
        compute_dtype,
        training and hidden.requires_grad,
        training and weight.requires_grad,
    )
    return loss


@torch.library.custom_op("gptoss::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    ignore_index: int,
    chunk_size: int,
    compute_dtype: torch.dtype,
    wants_dhidden: bool,
    wants_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dloss/dhidden, dloss/dweight); a gradient that is not wanted comes back empty."""
    if not targets.is_cuda:
        _check_labels(targets, weight.shape[0], ignore_index)
    wide = scale.dtype
    softmax_of = (
        cross_entropy_forward_backward_
        if hidden.is_cuda and wide == torch.float32
        else cross_entropy_forward_backward_reference_
    )
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(compute_dtype)  # (V, C)
        dhidden = torch.empty_like(hidden if wants_dhidden else hidden[:0])
        dweight = torch.zeros_like(weight if wants_dweight else weight[:0], dtype=wide)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            h = hidden[rows].to(compute_dtype)  # (n, C)
            logits = h @ w.T  # (n, V)
            loss += softmax_of(
                logits, targets[rows], scale, ignore_index, wants_dhidden or wants_dweight
            ).sum()
            if wants_dhidden:
                dhidden[rows] = logits @ w
            if wants_dweight:
                _add_product_(dweight, logits.T, h)
            del logits  # before the next chunk's are made
    return loss * scale, dhidden, dweight.to(weight.dtype)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's dtype."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _check_labels(targets: Tensor, vocab_size: int, ignore_index: int) -> None:
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
    if wrong.any():
        raise ValueError(
            f"expected labels in [0, {vocab_size}) or {ignore_index}, got {targets[wrong][0].item()}: "
            "was the text encoded with another tokenizer?"
        )


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    ignore_index: int,
    chunk_size: int,
    compute_dtype: torch.dtype,
    wants_dhidden: bool,
    wants_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(scale),
        torch.empty_like(hidden if wants_dhidden else hidden[:0]),
        torch.empty_like(weight if wants_dweight else weight[:0]),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad: Tensor | None, *second_order: Tensor | None) -> tuple:
    if any(g is not None for g in second_order):
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: use F.cross_entropy for it"
        )
    dhidden, dweight = ctx.saved_tensors
    needs_dhidden, needs_dweight = ctx.needs_input_grad[:2]
    return (
        (dhidden * grad).to(dhidden.dtype) if needs_dhidden and grad is not None else None,
        (dweight * grad).to(dweight.dtype) if needs_dweight and grad is not None else None,
        *[None] * 7,
    )


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)
