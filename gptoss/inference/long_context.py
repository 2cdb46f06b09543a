"""How well a model predicts at each place of a long text: does the loss go on falling beyond the trained length?

B batch, L predicted tokens, V vocabulary (chapter 16).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gptoss.model.cache import MixedKVCache

from .rope_mode import choose_rope_mode, rope_mode


@torch.no_grad()
def loss_by_position(
    model: nn.Module,
    ids: Int[Tensor, "B L_plus_1"],
    *,
    rope: str = "auto",
    chunk_size: int = 1024,
) -> Float[Tensor, "B L"]:
    """Cross-entropy of each next token, read in chunks through the KV cache.

    loss[b, i] = −log p(ids[b, i+1] | ids[b, 0 … i]). Memory beside the cache does not grow with L.

    Args:
        model: a GPTOSS; wrap the call in torch.autocast for mixed precision.
        ids: (B, L + 1) token ids of held-out text.
        rope: "auto", "plain" or "yarn", as in `generate`.
        chunk_size: tokens whose logits exist at once.

    Returns:
        (B, L) in fp32 (nats).

    Raises:
        ValueError: fewer than two tokens, chunk_size < 1, or more tokens than eval_max_seq_len.

    Source: chapter 16.
    """
    gptoss: Any = model  # nn.Module types every attribute as a tensor or a module
    cfg = gptoss.cfg
    B, L = ids.shape[0], ids.shape[1] - 1
    if L < 1 or chunk_size < 1:
        raise ValueError(
            f"expected at least 2 tokens a row and chunk_size >= 1, got {L + 1} and {chunk_size}"
        )
    if cfg.eval_max_seq_len < L:
        raise ValueError(
            f"{L} tokens exceed eval_max_seq_len = {cfg.eval_max_seq_len}; shorten the text"
        )
    ids = ids.to(next(model.parameters()).device)
    cache = MixedKVCache.for_model(model, B, max_len=L)
    losses = []
    with rope_mode(
        model, choose_rope_mode(rope, gptoss.rope_mode, L, cfg.yarn_original_max_seq_len)
    ):
        for start in range(0, L, chunk_size):
            end = min(start + chunk_size, L)
            logits, _ = model(ids[:, start:end], cache=cache)  # (B, chunk, V)
            losses.append(
                F.cross_entropy(
                    logits.transpose(1, 2).float(), ids[:, start + 1 : end + 1], reduction="none"
                )
            )
    return torch.cat(losses, dim=1)


def mean_between(losses: Float[Tensor, "B L"], edges: Sequence[int]) -> list[float]:
    """Mean loss between neighbouring edges.

    Args:
        losses: (B, L) from `loss_by_position` (nats).
        edges: rising positions (tokens); n + 1 of them give n means.

    Returns:
        One mean for each half-open stretch [edge, next edge) (nats).

    Raises:
        ValueError: edges that do not rise inside [0, L].
    """
    L = losses.shape[1]
    pairs = list(pairwise(edges))
    if not pairs or edges[0] < 0 or edges[-1] > L or any(a >= b for a, b in pairs):
        raise ValueError(f"expected rising edges in [0, {L}], got {list(edges)}")
    return [float(losses[:, a:b].double().mean()) for a, b in pairs]
