"""Prompts of any kind made into one left-padded batch (chapter 15).

B batch, T tokens of the longest prompt. Padding stands on the left, so that every row's last token is its own last
token and all rows decode in step; `key_start` says how many padding tokens a row has, and nothing attends to them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .text import Tokenizer, encode_text

Prompts = Int[Tensor, "B T"] | str | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class PromptBatch:
    """Prompts ready for a model: ids (B, T) and, where a row is padded, key_start (B,)."""

    ids: Int[Tensor, "B T"]
    key_start: Int[Tensor, "B"] | None


def batch_prompts(
    prompts: Prompts,
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    key_start: Int[Tensor, "B"] | Sequence[int] | None = None,
    pad_id: int = 0,
    device: torch.device | str | None = None,
) -> PromptBatch:
    """Make one batch of token ids, padded on the left.

    Args:
        prompts: ids (B, T), lists of ids of any lengths, one text, or several.
        vocab_size: V; every id must lie in [0, V).
        tokenizer: needed for text.
        key_start: for ids (B, T) that are already padded, how many padding tokens each row begins with.
        pad_id: the id to pad with; any will do, since nothing attends to it.
        device: where the batch is wanted.

    Returns:
        The batch; its key_start is None when no row is padded.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, text without a tokenizer, or a wrong shape.

    Source: chapter 15.
    """
    if isinstance(prompts, Tensor):
        ids = prompts
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(
                f"expected token ids (B, T), got {tuple(ids.shape)} of {ids.dtype}; "
                "a single prompt is ids[None]"
            )
        ids = ids.to(device=device, dtype=torch.long)
        starts = None if key_start is None else torch.as_tensor(key_start, device=device).long()
        if starts is not None and starts.shape != (ids.shape[0],):
            raise ValueError(
                f"expected key_start of shape ({ids.shape[0]},), got {tuple(starts.shape)}"
            )
        if starts is not None and not bool((starts >= 0).all()):
            raise ValueError(f"key_start counts padding tokens, got {starts.tolist()}")
    else:
        if key_start is not None:
            raise ValueError("key_start belongs to ids (B, T); lists and texts are padded here")
        rows = _rows(prompts, tokenizer)
        longest = max((len(row) for row in rows), default=0)
        ids = torch.tensor(
            [[pad_id] * (longest - len(row)) + row for row in rows], dtype=torch.long, device=device
        )  # (B, T)
        starts = torch.tensor([longest - len(row) for row in rows], device=device)
    if ids.numel() == 0 or (starts is not None and bool((starts >= ids.shape[1]).any())):
        raise ValueError("empty prompt: give at least one token a row")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the vocabulary [0, {vocab_size})")
    padded = starts is not None and bool(starts.any())
    return PromptBatch(ids, starts if padded else None)


def _rows(prompts: object, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Lists of ids, one a prompt."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not all(
        isinstance(p, Sequence | Tensor) for p in prompts
    ):
        raise ValueError(
            "expected ids (B, T), a list of lists of ids, a text or a list of texts; a single prompt is [ids]"
        )
    rows = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer; give tokenizer=..., or ids")
            rows.append(encode_text(tokenizer, prompt))
        else:
            rows.append([_token(token) for token in prompt])
    return rows


def _token(token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise ValueError(f"expected token ids as integers, got {token!r}") from None
