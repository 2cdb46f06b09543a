"""Reading a prompt into the cache, chunk by chunk (chapter 15).

B batch, T prompt tokens, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gptoss.model.cache import MixedKVCache
from gptoss.model.prefill_chunk import choose_chunk_size


@torch.no_grad()
def prefill(
    model: nn.Module,
    ids: Int[Tensor, "B T"],
    cache: MixedKVCache,
    *,
    key_start: Int[Tensor, "B"] | None = None,
    chunk_size: int | None = None,
) -> Float[Tensor, "B V"]:
    """Read tokens into the cache chunk by chunk and return the logits after the last one.

    Only one chunk's activations exist at a time and no logits but the last ones, so that memory beside the cache does
    not grow with T. In a cache with `max_len`, global layers write each chunk in place and attend over a view of their
    buffer: nothing of the old keys is moved.

    Args:
        model: a GPTOSS, already in the rotary mode that is wanted.
        ids: (B, T) token ids, T ≥ 1.
        cache: takes the keys and values; may hold earlier ones.
        key_start: (B,) padding tokens of each row, or None.
        chunk_size: tokens read at once; `choose_chunk_size` when left out. The result does not depend on it.

    Returns:
        (B, V) logits of the next token.

    Raises:
        ValueError: chunk_size < 1.

    Source: chapter 15.
    """
    if chunk_size is None:
        chunk_size = choose_chunk_size(ids.device, ids.shape[0])
    if chunk_size < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {chunk_size}")
    for chunk in ids.split(chunk_size, dim=1):
        logits, _ = model(chunk, cache=cache, key_start=key_start, last_only=True)
    return logits[:, -1]  # (B, 1, V) -> (B, V)
