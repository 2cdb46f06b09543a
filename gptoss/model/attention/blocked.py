"""Attention in blocks of queries: exact, linear in memory, on any device and in any precision.

A block of queries meets only the band of keys that it can see, so windowed attention costs W·T and not T². The
backward pass recomputes each block's probabilities from the saved log-sum-exp instead of keeping them.

torch.compile sees one opaque operation: its loop may run any number of blocks without a recompile or a graph break.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim; t, s the sizes of one block.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .masks import full_precision, key_range, visible_keys

SCORE_BLOCK_ELEMENTS = 1 << 24  # scores alive at once: 64 MiB in fp32


def blocked_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S D"],
    window: int | None = None,
    sink_bias: Float[Tensor, "H"] | None = None,
    *,
    scale: float | None = None,
    key_start: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """The function of `manual_causal_attention`, never holding more than one block of scores.

    With L' = log(Σ_j exp s_j + exp b): out = Σ_j exp(s_j − L')·v_j. Backward, with P = exp(s − L') and D = dO·O:
    dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − D), dQ = scale·dS K, dK = scale·dSᵀ Q, db = −Σ exp(b − L')·D.

    Args and shapes as in `manual_causal_attention`.

    Source: Rabe and Staats (2021); Dao et al. (2022), section 3.1 and appendix B; chapters 4, 6 and 7.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _blocked_attention(q, k, v, sink_bias, key_start, window, scale)[0]


def _blocks(
    q: Tensor, k: Tensor, key_start: Tensor | None, window: int | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Slices of queries with the slice of keys that they can see, and the mask between the two."""
    (B, H, T, _), S = q.shape, k.shape[2]
    reach = S if window is None else min(S, window)
    size = max(16, min(64, SCORE_BLOCK_ELEMENTS // max(1, B * H * reach)))
    index = torch.arange(S, device=q.device)
    for first in range(0, T, size):
        last = min(first + size, T)
        low, high = key_range(first + S - T, last + S - T, window)
        mask = visible_keys(index[first + S - T : last + S - T], index[low:high], window, key_start)
        yield slice(first, last), slice(low, high), mask


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Scaled scores of one block, −∞ where a key is not visible: (B, K, G, t, D), (B, K, s, D) -> (B, K, G, t, s)."""
    return (_times(q, k.transpose(-1, -2)) * scale).masked_fill(~mask, -torch.inf)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """(B, K, G, t, m) · (B, K, m, n) -> (B, K, G, t, n), the heads of a group as rows of one product.

    Broadcasting over G would make matmul copy b for every head of the group.
    """
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


def _summed_over_group(a: Tensor, b: Tensor) -> Tensor:
    """Σ_g aᵀ b: (B, K, G, t, m), (B, K, G, t, n) -> (B, K, m, n)."""
    return a.flatten(2, 3).transpose(-1, -2) @ b.flatten(2, 3)


@torch.library.custom_op("gptoss::blocked_attention", mutates_args=())
def _blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_bias: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the output in q's dtype and L' (B, H, T), which is 0 where a query sees nothing at all."""
    (B, H, T, _), K, dtype = q.shape, k.shape[1], full_precision(q.dtype)
    grouped = q.unflatten(1, (K, H // K))  # (B, K, G, T, D)
    keys, values = k.to(dtype), v.to(dtype)
    out = q.new_empty(B, K, H // K, T, v.shape[-1])
    lse = torch.empty(B, K, H // K, T, dtype=dtype, device=q.device)
    sink = None if sink_bias is None else sink_bias.to(dtype).view(K, H // K, 1)
    with torch.autocast(q.device.type, enabled=False):  # or it multiplies in bf16
        for rows, band, mask in _blocks(q, k, key_start, window):
            scores = _scores(grouped[:, :, :, rows].to(dtype), keys[:, :, band], mask, scale)
            total = scores.logsumexp(dim=-1)  # (B, K, G, t)
            if sink is not None:
                total = torch.logaddexp(total, sink)
            # Where a query sees nothing, exp(−∞ − 0) = 0: zeros, not NaN.
            total = total.masked_fill(total == -torch.inf, 0.0)
            weights = (scores - total.unsqueeze(-1)).exp_()
            out[:, :, :, rows] = _times(weights, values[:, :, band]).to(q.dtype)
            lse[:, :, :, rows] = total
    return out.flatten(1, 2), lse.flatten(1, 2)


@_blocked_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_bias: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    return q.new_empty(B, H, T, v.shape[-1]), q.new_empty(B, H, T, dtype=full_precision(q.dtype))


@torch.library.custom_op("gptoss::blocked_attention_backward", mutates_args=())
def _blocked_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink_bias: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, heads = full_precision(q.dtype), (k.shape[1], q.shape[1] // k.shape[1])
    grouped, dout = q.unflatten(1, heads), dout.to(dtype).unflatten(1, heads)  # (B, K, G, T, D)
    lse = lse.unflatten(1, heads)  # (B, K, G, T)
    keys, values = k.to(dtype), v.to(dtype)
    delta = (dout * out.to(dtype).unflatten(1, heads)).sum(-1)  # (B, K, G, T)
    dq = grouped.new_empty(grouped.shape)
    dk, dv = keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    with torch.autocast(q.device.type, enabled=False):  # as in the forward pass
        for rows, band, mask in _blocks(q, k, key_start, window):
            queries, douts = grouped[:, :, :, rows].to(dtype), dout[:, :, :, rows]
            scores = _scores(queries, keys[:, :, band], mask, scale)
            weights = (scores - lse[:, :, :, rows].unsqueeze(-1)).exp_()  # (B, K, G, t, s)
            dweights = _times(douts, values[:, :, band].transpose(-1, -2))
            dscores = weights * (dweights - delta[:, :, :, rows].unsqueeze(-1)) * scale
            dq[:, :, :, rows] = _times(dscores, keys[:, :, band]).to(q.dtype)
            dk[:, :, band] += _summed_over_group(dscores, queries)
            dv[:, :, band] += _summed_over_group(weights, douts)
    if sink_bias is None:
        dsink = q.new_zeros(0)
    else:
        share = (sink_bias.to(dtype).view(*heads, 1) - lse).exp()  # p_sink, (B, K, G, T)
        dsink = -(share * delta).sum(dim=(0, 3)).flatten().to(sink_bias.dtype)  # (H,)
    return dq.flatten(1, 2), dk.to(k.dtype), dv.to(v.dtype), dsink


@_blocked_attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink_bias: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = q.new_empty(0) if sink_bias is None else torch.empty_like(sink_bias)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
        torch.empty_like(v, memory_format=torch.contiguous_format),
        dsink,
    )


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, sink_bias, key_start, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, sink_bias, key_start)


def _backward(ctx, dout, _dlse):
    q, k, v, out, lse, sink_bias, key_start = ctx.saved_tensors
    dq, dk, dv, dsink = _blocked_attention_backward(
        dout, q, k, v, out, lse, sink_bias, key_start, ctx.window, ctx.scale
    )
    return dq, dk, dv, None if sink_bias is None else dsink, None, None, None


_blocked_attention.register_autograd(_backward, setup_context=_setup_context)
