"""A request to generate, checked as a whole before the model is touched (chapter 15).

B batch, T prompt tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gptoss.model.prefill_chunk import choose_chunk_size

from .prompts import PromptBatch, Prompts, batch_prompts
from .rope_mode import choose_rope_mode
from .sampling import check_sampling
from .text import Tokenizer


@dataclass(frozen=True)
class Request:
    """What to generate and how, checked: the arguments of `generate.stream` made ready for its loop."""

    batch: PromptBatch
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    use_cache: bool
    stop_ids: Int[Tensor, "n"]
    generator: torch.Generator | None
    mode: str
    prefill_chunk: int
    pad_id: int
    tokenizer: Tokenizer | None


def check_request(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    use_cache: bool = True,
    top_k: int | None = None,
    min_new_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    seed: int | None = None,
    rope: str = "auto",
    prefill_chunk: int | None = None,
    key_start: Int[Tensor, "B"] | Sequence[int] | None = None,
    pad_id: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Request:
    """Refuse what cannot be done before any work starts.

    Args, Raises: as in `generate.stream`.

    Returns:
        The request.
    """
    gptoss: Any = model  # nn.Module types every attribute as a tensor or a module
    cfg = gptoss.cfg
    device = next(model.parameters()).device
    if device.type == "meta":
        raise ValueError("the model is on the meta device, without weights: load them first")
    check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise ValueError(
            f"min_new_tokens must lie in [0, max_new_tokens = {max_new_tokens}], got {min_new_tokens}"
        )
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed = {seed!r}: expected an integer of 64 bits, or None")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    if not isinstance(stop_ids, Iterable):
        raise ValueError(f"stop_ids = {stop_ids!r}: expected a sequence of token ids, as in [0]")
    stop_ids = list(stop_ids)  # read more than once below
    for name, ids in (("stop_ids", stop_ids), ("pad_id", (pad_id,))):
        if any(token is None or not 0 <= token < cfg.vocab_size for token in ids):
            raise ValueError(
                f"{name} {tuple(ids)}: expected ids in the vocabulary [0, {cfg.vocab_size})"
            )
    if min_new_tokens and len(set(stop_ids)) == cfg.vocab_size:
        raise ValueError(
            "every id is a stop id, so min_new_tokens cannot be reached; leave one out"
        )
    batch = batch_prompts(
        input_ids,
        vocab_size=cfg.vocab_size,
        tokenizer=tokenizer,
        key_start=key_start,
        pad_id=pad_id,
        device=device,
    )
    if prefill_chunk is None:
        prefill_chunk = choose_chunk_size(device, batch.ids.shape[0])
    total = batch.ids.shape[1] + max_new_tokens
    if total > cfg.eval_max_seq_len:
        raise ValueError(
            f"{batch.ids.shape[1]} prompt tokens + {max_new_tokens} new ones = {total} exceed eval_max_seq_len = "
            f"{cfg.eval_max_seq_len}; shorten the prompt or ask for fewer"
        )
    return Request(
        batch=batch,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        use_cache=use_cache,
        stop_ids=torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=device),
        generator=None if seed is None else torch.Generator(device).manual_seed(seed),
        mode=choose_rope_mode(rope, gptoss.rope_mode, total, cfg.yarn_original_max_seq_len),
        prefill_chunk=prefill_chunk,
        pad_id=pad_id,
        tokenizer=tokenizer,
    )
