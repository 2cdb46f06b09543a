"""Which rotary mode a sequence is read with: plain RoPE or YaRN, one for its whole length (chapters 8, 15).

Cached keys are already rotated, so the mode cannot change once the first key is cached.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gptoss.config import ROPE_MODES


def choose_rope_mode(rope: str, own_mode: str, n_tokens: int, original_max_seq_len: int) -> str:
    """The mode for a sequence of known greatest length.

    auto: YaRN when the sequence outgrows the trained length or the model itself is set to YaRN, else plain.

    Args:
        rope: "auto", "plain" or "yarn".
        own_mode: the model's mode, as its trainer set it.
        n_tokens: prompt and new tokens together (tokens).
        original_max_seq_len: the length up to which plain RoPE was trained (tokens).

    Returns:
        "plain" or "yarn".

    Raises:
        ValueError: another name.

    Source: Peng et al. 2023, section 3; chapter 8.
    """
    if rope == "auto":
        return "yarn" if own_mode == "yarn" or n_tokens > original_max_seq_len else "plain"
    if rope not in ROPE_MODES:
        raise ValueError(f"rope must be one of auto, {', '.join(ROPE_MODES)}, got {rope!r}")
    return rope


@contextmanager
def rope_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Set the model's rotary mode inside a with-block and put the old one back, also after an error.

    Args:
        model: a GPTOSS.
        mode: "plain" or "yarn".
    """
    gptoss: Any = model  # nn.Module types every attribute as a tensor or a module
    own_mode = gptoss.rope_mode
    if mode == own_mode:
        yield
        return
    gptoss.set_rope_mode(mode)
    try:
        yield
    finally:
        gptoss.set_rope_mode(own_mode)
