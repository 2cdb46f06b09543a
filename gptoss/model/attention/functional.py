"""`causal_attention`: one function, several ways to compute it.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, D head_dim.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.config import ATTENTION_BACKENDS
from gptoss.kernels.attention import triton_attention

from .blocked import blocked_attention
from .flex import flex_causal_attention
from .masks import check_attention_shapes
from .reference import manual_causal_attention


def causal_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S D"],
    window: int | None = None,
    sink_bias: Float[Tensor, "H"] | None = None,
    *,
    scale: float | None = None,
    key_start: Int[Tensor, "B"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B H T D"]:
    """Causal attention with grouped heads, an optional window and an optional sink.

    With scores s_j = scale·q·k_j over the visible keys, lse = log Σ_j exp s_j and the sink's logit b:

        out = (Σ_j exp(s_j − lse)·v_j) · σ(lse − b)

    Args:
        q: queries, the last T of the S positions (T = S in training, T = 1 in decoding).
        k, v: keys and values; query head h reads kv head h // (H/K). No copy is made.
        window: W in tokens, the query itself included; None for all earlier keys.
        sink_bias: b, one logit a query head, used as given; None for no sink.
        scale: factor on the scores; 1/√D unless given.
        key_start: keys before this index are padding, one number a row. A query that sees no key gets zeros.
        backend: "reference" (dense, fp32), "blocked" (any device), "flex" and "triton" (CUDA), or "auto": see
            `resolve_backend`. The choice changes rounding, never the function.

    Returns:
        (B, H, T, D) in q's dtype.

    Raises:
        ValueError: shapes that do not fit, or an unknown backend.

    Source: Vaswani et al. (2017); Ainslie et al. (2023); OpenAI (2025); chapters 4 to 7.
    """
    check_attention_shapes(q, k, v, window, sink_bias, key_start)
    if window is not None and window >= k.shape[2]:
        window = None  # it hides nothing
    chosen = resolve_backend(backend, q.device, q.dtype)
    attend = {
        "reference": manual_causal_attention,
        "blocked": blocked_attention,
        "flex": flex_causal_attention,
        "triton": triton_attention,
    }[chosen]
    return attend(q, k, v, window, sink_bias, scale=scale, key_start=key_start)


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that "auto" stands for: "triton" on CUDA in bf16, fp16 or fp32, "blocked" everywhere else.

    Raises:
        ValueError: an unknown name.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(
            f"attention backend {backend!r}: expected one of {', '.join(ATTENTION_BACKENDS)}"
        )
    if backend != "auto":
        return backend
    return "triton" if device.type == "cuda" and dtype != torch.float64 else "blocked"
