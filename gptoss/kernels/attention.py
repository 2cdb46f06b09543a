"""Causal attention with grouped heads, a window and a sink, as one operator with a hand-written gradient.

The operator reads q, k and v where they lie: views transposed out of a projection are not copied. It keeps q, k, v, out
and one number a row (the log-sum-exp) for the backward pass, never a score. `torch.compile` sees one node each way.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, D head_dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.checks import autocast_together
from gptoss.kernels.versions import HAS_TRITON


def triton_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S D"],
    window: int | None = None,
    sink_bias: Float[Tensor, "H"] | None = None,
    *,
    scale: float | None = None,
    key_start: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """Causal attention in Triton kernels, forward and backward; cost and memory traffic follow the visible keys.

    out = Σ_j p_j v_j,  p = softmax([s_1 … s_S, b_h])  with s_j = scale·q·k_j over the visible keys; b_h has value 0.

    Args:
        q: queries, the last T of the S positions; bf16, fp16 or fp32. Any strides; a copy is made only when a row
            of head_dim values is not contiguous or not aligned to 16 bytes.
        k, v: keys and values in q's dtype; query head h reads kv head h // (H/K).
        window: W in tokens, the query itself included; None for all earlier keys.
        sink_bias: b, one logit a query head, used as given; None for no sink.
        scale: positive factor on the scores; 1/√D unless given.
        key_start: keys before this index are padding, one number a row, whatever they hold. A query that sees no
            key gets zeros.

    Returns:
        (B, H, T, D) in q's dtype, stored as (B, T, H, D): merging the heads afterwards needs no copy.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a scale that is not positive.
        ImportError: Triton is not installed.

    Source: Dao (2023) for the tiling; OpenAI (2025) for the sink; chapters 5 to 7 and 10.
    """
    q, k, v = autocast_together(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    _check(q, k, v, window, sink_bias, scale, key_start)
    if window is not None and window >= k.shape[2]:
        window = None  # it hides nothing
    D = q.shape[-1]
    if D % 8:  # a row's bytes must be a multiple of 16; zeros in the products change nothing
        q, k, v = (F.pad(t, (0, -D % 8)) for t in (q, k, v))
    return _attention(q, k, v, sink_bias, key_start, window, scale)[0][..., :D]


@torch.library.custom_op("gptoss::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from gptoss.kernels.attention_launch import choose_plan, launch_forward

    plan = choose_plan(q.shape[-1], window, q.dtype, q.device)
    return launch_forward(q, k, v, sink, key_start, window, scale, plan.forward)


@_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from gptoss.kernels.attention_launch import empty_rows

    return empty_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("gptoss::attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from gptoss.kernels.attention_launch import (
        choose_plan,
        launch_key_gradient,
        launch_query_gradient,
    )

    plan = choose_plan(q.shape[-1], window, q.dtype, q.device)
    dq, delta, dsink = launch_query_gradient(
        do, q, k, v, out, lse, sink, key_start, window, scale, plan.query_gradient
    )
    dk, dv = launch_key_gradient(
        do, q, k, v, lse, delta, key_start, window, scale, plan.key_gradient
    )
    return dq, dk, dv, q.new_empty(0) if dsink is None else dsink


@_attention_backward.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from gptoss.kernels.attention_launch import empty_rows

    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    return empty_rows(q), empty_rows(k), empty_rows(v), dsink


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, key_start, ctx.window, ctx.scale = inputs
    ctx.has_sink = sink is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sink, key_start)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple:
    if dlse is not None:
        raise RuntimeError(
            "the log-sum-exp of gptoss::attention carries no gradient: use out alone"
        )
    if do is None:
        return (None,) * 7
    q, k, v, out, lse, sink, key_start = ctx.saved_tensors
    dq, dk, dv, dsink = _attention_backward(
        do, q, k, v, out, lse, sink, key_start, ctx.window, ctx.scale
    )
    return dq, dk, dv, dsink if ctx.has_sink else None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sink: Tensor | None,
    scale: float,
    key_start: Tensor | None,
) -> None:
    if not HAS_TRITON:
        raise ImportError(
            "the Triton attention needs Triton: pip install triton (Linux), or choose another attention backend"
        )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape or q.shape[0] != k.shape[0]:
        raise ValueError(f"expected q (B, H, T, D), k and v (B, K, S, D); got {shapes}")
    if q.shape[3] != k.shape[3] or not 0 < q.shape[3] <= 256:
        raise ValueError(f"expected one head_dim between 1 and 256; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"expected H to be a multiple of K; got {shapes}")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"expected T <= S, the queries being the last of the keys; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ):
        raise ValueError(
            f"expected q, k and v all in bfloat16, float16 or float32; got {q.dtype}, {k.dtype}, {v.dtype}: "
            "cast them, or use the reference for float64"
        )
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1 token (the query itself); got {window}")
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"expected a positive scale; got {scale}")
    for name, tensor, wanted in (
        ("sink_bias", sink, (q.shape[1],)),
        ("key_start", key_start, (q.shape[0],)),
    ):
        if tensor is not None and (tuple(tensor.shape) != wanted or tensor.device != q.device):
            raise ValueError(
                f"expected {name} {wanted} on {q.device}; got {tuple(tensor.shape)} on {tensor.device}"
            )
