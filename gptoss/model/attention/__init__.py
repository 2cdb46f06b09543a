"""Attention: the oracle, the kernels behind one function, and the layer (chapters 4 to 7)."""

from .functional import causal_attention, resolve_backend
from .heads import repeat_kv
from .masks import count_visible_pairs, visible_keys
from .module import SINK_CLAMP_MAX, SINK_CLAMP_MIN, GPTOSSAttention
from .reference import manual_causal_attention

__all__ = [
    "SINK_CLAMP_MAX",
    "SINK_CLAMP_MIN",
    "GPTOSSAttention",
    "causal_attention",
    "count_visible_pairs",
    "manual_causal_attention",
    "repeat_kv",
    "resolve_backend",
    "visible_keys",
]
