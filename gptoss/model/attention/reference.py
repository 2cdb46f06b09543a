"""The oracle: attention with a sink as it is defined, one dense score matrix and one softmax.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .heads import repeat_kv
from .masks import check_attention_shapes, full_precision, visible_keys


def manual_causal_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S D"],
    window: int | None = None,
    sink_bias: Float[Tensor, "H"] | None = None,
    *,
    scale: float | None = None,
    key_start: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """Causal attention, optionally through a window and with a sink, in fp32 or better.

    out = Σ_j p_j v_j,  p = softmax([s_1 … s_S, b_h])  with s_j = scale·q·k_j over the visible keys; the sink's logit
    b_h takes its share of the softmax and brings the value 0. A query that sees no key gets zeros.

    Args:
        q: queries, the last T of the S positions.
        k, v: keys and values; query head h reads kv head h // G.
        window: W in tokens, the query itself included; None for all earlier keys.
        sink_bias: b, one logit a query head, used as given (`GPTOSSAttention` clamps it first); None for no sink.
        scale: factor on the scores; 1/√D unless given.
        key_start: keys before this index are padding, one number a row.

    Returns:
        (B, H, T, D) in q's dtype. It builds a (T, S) score matrix a head: short sequences only.

    Raises:
        ValueError: shapes that do not fit.

    Source: Vaswani et al. (2017), equation 1; OpenAI (2025) for the sink; chapters 4 and 7.
    """
    check_attention_shapes(q, k, v, window, sink_bias, key_start)
    B, H, T, D = q.shape
    S, group, dtype = k.shape[2], H // k.shape[1], full_precision(q.dtype)
    index = torch.arange(S, device=q.device)
    visible = visible_keys(index[S - T :], index, window, key_start)
    visible = visible if key_start is None else visible[:, 0]  # (B, 1, T, S)
    with torch.autocast(q.device.type, enabled=False):  # which would multiply in bf16
        keys, values = repeat_kv(k, group).to(dtype), repeat_kv(v, group).to(dtype)
        scores = (
            q.to(dtype) @ keys.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
        )  # (B, H, T, S)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink_bias is None:
            sees_nothing = ~visible.any(dim=-1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(sees_nothing, 0.0), dim=-1)
            weights = weights.masked_fill(~visible, 0.0)
        else:
            sink = sink_bias.to(dtype)[:, None, None].expand(B, H, T, 1)
            weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :S]
        return (weights @ values).to(q.dtype)
