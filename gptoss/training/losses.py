"""Cross-entropy over logits that already exist, a chunk of positions at a time (chapter 12).

B batch, T queries (positions), N = B·T, V vocabulary.

The source documents present this function as the way to keep the (B, T, V) logits out of memory. It is not: the logits
are its input, and autograd keeps every chunk's log-softmax for the backward pass. It stays as the reference that the
chunked head (`gptoss.model.head.linear_cross_entropy`) is held against.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100


def chunked_cross_entropy(
    logits: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    chunk_size: int = 4096,
    ignore_index: int = IGNORE_INDEX,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of next-token logits, summed chunk by chunk in fp32 (fp64 stays fp64).

        L = -(1/n) Σ_{i: t_i ≠ ignore} log softmax(z_i)[t_i],   n = max(1, number of such i)

    The sum runs over all chunks and is divided once, so that chunks with many ignored positions weigh no more than
    others. With every position ignored the loss is 0 and its gradient is 0, where `F.cross_entropy` gives NaN.

    Args:
        logits: (..., V), any floating dtype, unnormalised.
        targets: (...), token ids in [0, V) or `ignore_index`.
        chunk_size: positions a chunk.
        ignore_index: the target that marks a position without a loss.

    Returns:
        the mean loss in nats a token, a scalar.

    Raises:
        ValueError: shapes that do not belong together, or a chunk size below 1.

    Source: the source documents, OPT-21; chapter 12 of this book.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: expected at least 1 position a chunk")
    if logits.ndim < 2 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: expected (..., V) and (...)"
        )
    flat_logits = logits.reshape(-1, logits.shape[-1])  # (N, V)
    flat_targets = targets.reshape(-1)  # (N,)
    total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32)).to(
        logits.device
    )
    for chunk, wanted in zip(
        flat_logits.split(chunk_size), flat_targets.split(chunk_size), strict=True
    ):
        total = total + F.cross_entropy(
            chunk.to(total.dtype), wanted, ignore_index=ignore_index, reduction="sum"
        )
    counted = (flat_targets != ignore_index).sum().clamp(min=1)
    return total / counted
