"""Softmax cross-entropy over one block of logits, its gradient written over the logits.

For a row z with label y:  loss = lse(z) - z_y,   dloss/dz = softmax(z) - onehot(y).
The gradient has the logits' own shape, and nobody needs the logits once it is known, so it takes their place: one
buffer of n·V values is all that ever exists (chapter 12).

Shapes: n rows of this block, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy_forward_backward_(
    logits: Float[Tensor, "n V"],
    targets: Int[Tensor, " n"],
    scale: float | Float[Tensor, ""] = 1.0,
    ignore_index: int = -100,
    write_gradient: bool = True,
) -> Float[Tensor, " n"]:
    """Cross-entropy of every row in one Triton kernel; `logits` is overwritten with scale · dloss/dlogits.

    The arguments and the result are those of `cross_entropy_forward_backward_reference_`, with float32 inside whatever
    the logits' dtype (not float64). A label outside the vocabulary gives the loss NaN: looking at the labels from the
    host would stall the device.

    Raises:
        ValueError: shapes that do not fit, float64 logits, or logits whose rows are not contiguous.
        ImportError: Triton is not installed.

    Source: chapter 12.
    """
    from gptoss.kernels.cross_entropy_kernel import launch_cross_entropy

    _check(logits, targets)
    if logits.dtype == torch.float64:
        raise ValueError("expected logits in float32 or narrower, got float64: use the reference")
    if logits.stride(1) != 1:
        raise ValueError(
            f"expected logits with contiguous rows, got strides {logits.stride()}: the gradient is written in place"
        )
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=logits.device)
    return launch_cross_entropy(logits, targets.contiguous(), scale, ignore_index, write_gradient)


def cross_entropy_forward_backward_reference_(
    logits: Float[Tensor, "n V"],
    targets: Int[Tensor, " n"],
    scale: float | Float[Tensor, ""] = 1.0,
    ignore_index: int = -100,
    write_gradient: bool = True,
) -> Float[Tensor, " n"]:
    """Cross-entropy of every row, in PyTorch; `logits` is overwritten with scale · dloss/dlogits.

    Args:
        logits: (n, V), any float dtype; overwritten when `write_gradient`, otherwise left alone.
        targets: (n,) labels in [0, V), or `ignore_index`.
        scale: number or 0-dim tensor that multiplies the gradient, not the losses.
        ignore_index: label of rows that have loss 0 and gradient 0.
        write_gradient: whether the gradient is wanted.

    Returns:
        (n,) losses in nats; float64 for float64 logits, else float32.

    Source: chapter 12.
    """
    _check(logits, targets)
    z = logits if logits.dtype == torch.float64 else logits.float()  # (n, V)
    ignored = targets == ignore_index  # (n,)
    labels = targets.masked_fill(ignored, 0)[:, None]  # (n, 1)
    lse = z.logsumexp(-1)  # (n,)
    losses = (lse - z.gather(-1, labels)[:, 0]).masked_fill(ignored, 0.0)
    if write_gradient:
        gradient = (z - lse[:, None]).exp_()  # (n, V)
        gradient.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=gradient.dtype))
        gradient *= scale
        logits.copy_(gradient.masked_fill_(ignored[:, None], 0.0))
    return losses


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"expected logits (n, V) and targets (n,), got {tuple(logits.shape)} and {tuple(targets.shape)}: "
            "flatten the leading dimensions first"
        )
