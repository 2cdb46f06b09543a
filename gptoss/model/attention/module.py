"""One attention layer: projections, rotary positions, causal attention with a sink, output projection.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, D head_dim, C model width.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gptoss.config import ModelConfig
from gptoss.model.cache import MixedKVCache
from gptoss.model.rotary import apply_rope

from .functional import causal_attention

SINK_CLAMP_MIN = -10.0
SINK_CLAMP_MAX = 15.0


class GPTOSSAttention(nn.Module):
    """Grouped-query attention of layer `layer_idx`: windowed on even layers, global on odd ones.

    The sink's logit is a learned number a head, clamped to [SINK_CLAMP_MIN, SINK_CLAMP_MAX] in the forward pass; its
    gradient is zero outside that range.

    Source: chapters 5 to 8.
    """

    def __init__(self, cfg: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.n_heads, self.n_kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        self.is_windowed = cfg.is_windowed(layer_idx)
        self.window = cfg.window_size if self.is_windowed else None
        self.n_pruned_pairs = cfg.n_pruned_pairs(layer_idx)
        self.backend = cfg.attention_backend
        self.q_proj = nn.Linear(cfg.d_model, cfg.n_heads * cfg.head_dim, bias=False)
        self.kv_proj = nn.Linear(cfg.d_model, 2 * cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.n_heads * cfg.head_dim, cfg.d_model, bias=False)
        self.sink_bias = nn.Parameter(torch.zeros(cfg.n_heads)) if cfg.sink_bias else None

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        rotary: tuple[Float[Tensor, "*B T D_half"], Float[Tensor, "*B T D_half"]],
        cache: MixedKVCache | None = None,
        key_start: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        """Attend from each position of x to those before it, in x and in the cache.

        Args:
            x: normalised activations.
            rotary: cos and sin for these positions, pruned as this layer wants (`GPTOSS` makes both kinds once).
            cache: earlier keys and values; it takes up the new ones.
            key_start: left-padding keys of each row, counted from the first key ever cached.
        """
        q = (
            self.q_proj(x).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)
        )  # (B, H, T, D)
        kv = self.kv_proj(x).unflatten(-1, (2, self.n_kv_heads, self.head_dim))  # (B, T, 2, K, D)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, K, T, D)
        q, k = apply_rope(q, *rotary), apply_rope(k, *rotary)
        if cache is not None:
            k, v = cache.update(self.layer_idx, k, v, self.is_windowed, self.window)
            k, v = k.to(q.dtype), v.to(q.dtype)
            if key_start is not None:  # the buffer's first key is absolute key n_seen − S
                key_start = key_start - (cache.n_seen - k.shape[2])
        out = causal_attention(
            q, k, v, self.window, self.clamped_sink(), key_start=key_start, backend=self.backend
        )
        return self.o_proj(
            out.transpose(1, 2).flatten(2)
        )  # (B, H, T, D) -> (B, T, H·D) -> (B, T, C)

    def clamped_sink(self) -> Float[Tensor, "H"] | None:
        """The sink logits that enter the softmax, or None in a model without sinks."""
        return (
            None if self.sink_bias is None else self.sink_bias.clamp(SINK_CLAMP_MIN, SINK_CLAMP_MAX)
        )

    def extra_repr(self) -> str:
        kind = "SWA" if self.is_windowed else "Full"
        pruned = f", pruned={self.n_pruned_pairs}" if self.n_pruned_pairs else ""
        window = f", window={self.window}" if self.window else ""
        return (
            f"layer={self.layer_idx} ({kind}{pruned}), H={self.n_heads}/{self.n_kv_heads}, D={self.head_dim}"
            f"{window}, backend={self.backend}"
        )
