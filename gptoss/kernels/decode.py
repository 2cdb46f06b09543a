"""A decoding step's operators: what one new token (or one for each of up to 8 sequences) does in a layer.

    q = decode_qkv(x, …)                 norm, projections, rotary; k and v go into the caches
    a = decode_attention(q, k, v, …)     each cached key read once for its group of query heads
    x = decode_linear(a, W_o, residual=x)
    x = decode_moe(x, …)                 norm, router and experts; for several tokens decode_route, then decode_experts

At batch 1 nothing is computed twice and nothing multiplies enough to matter: the time is that of reading the weights and
the cache, plus a launch for each kernel. So the kernels are few, each starts while the one before it ends
(`decode_overlap.py`), and all that changes from step to step (lengths, slots, angles) stands in device memory: one CUDA
graph replays for every token. None of them has a gradient.

Here is the attention; the others come from `decode_linear.py` and `decode_moe.py`.

Shapes: N sequences, H query heads, K kv heads, D head_dim, T queries, M capacity of the cache, n keys in it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.decode_checks import require_decode_kernels
from gptoss.kernels.decode_linear import decode_linear, decode_qkv
from gptoss.kernels.decode_moe import decode_experts, decode_moe, decode_route

__all__ = [
    "decode_attention",
    "decode_experts",
    "decode_linear",
    "decode_moe",
    "decode_qkv",
    "decode_route",
]

MAX_QUERY_ROWS = 64


def decode_attention(
    q: Float[Tensor, "N H T D"],
    k_cache: Float[Tensor, "N K M D"],
    v_cache: Float[Tensor, "N K M D"],
    lengths: Int[Tensor, "N"],
    sink_bias: Float[Tensor, "H"] | None = None,
    *,
    scale: float | None = None,
    key_start: Int[Tensor, "N"] | None = None,
    overlap: bool = False,
) -> Float[Tensor, "N H T D"]:
    """Attention of the last T positions over the first `lengths` rows of a cache, keys split over the whole GPU.

    out = Σ_j p_j v_j,  p = softmax([s_1 … s_n, b_h]),  s_j = scale·q·k_j;  query t sees the keys j <= n - T + t.

    A window is a short cache: with T = 1 the order of its rows does not matter, so a ring serves as it stands. Rows from
    `lengths` on may hold anything.

    Args:
        q: queries, T·H/K at most 64 (longer chunks are `causal_attention`'s).
        k_cache, v_cache: in q's dtype; any strides with contiguous rows.
        lengths: keys in each sequence's cache, those of the queries included; on the device.
        sink_bias: b, one logit a query head; None for no sink.
        scale: factor on the scores; 1/√D unless given.
        key_start: rows before this index are padding.
        overlap: start before the kernel in front has ended, where the GPU can; `decode_overlap.py` says what that asks.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        ImportError: Triton is not installed.

    Source: Dao et al. (2023) for splitting the keys; chapter 15.
    """
    (N, H, T, D), K = q.shape, k_cache.shape[1]
    caches = f"caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
    if k_cache.shape != v_cache.shape or k_cache.shape[::3] != (N, D) or K == 0 or H % K:
        raise ValueError(
            f"expected caches (N, K, M, D) for q (N, H, T, D) {tuple(q.shape)}; got {caches}"
        )
    if T * H // K > MAX_QUERY_ROWS or D % 8 or D > 256:
        raise ValueError(
            f"expected at most {MAX_QUERY_ROWS} rows T·H/K and a head_dim that is a multiple of 8; got q {tuple(q.shape)}: "
            "use causal_attention for longer chunks"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype or q.dtype == torch.float64:
        raise ValueError(
            f"expected q and the caches in one dtype, float32 or narrower; got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    for name, tensor, size in (
        ("lengths", lengths, N),
        ("key_start", key_start, N),
        ("sink_bias", sink_bias, H),
    ):
        if tensor is not None and (tensor.shape != (size,) or tensor.device != q.device):
            raise ValueError(
                f"expected {name} ({size},) on {q.device}; got {tuple(tensor.shape)} on {tensor.device}"
            )
    require_decode_kernels()
    scale = D**-0.5 if scale is None else float(scale)
    return _decode_attention(q, k_cache, v_cache, lengths, sink_bias, key_start, scale, overlap)


@torch.library.custom_op("gptoss::decode_attention", mutates_args=())
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    scale: float,
    overlap: bool = False,
) -> Tensor:
    from gptoss.kernels.decode_attention import choose_splits, launch_decode_attention

    splits = choose_splits(q.shape[0], k_cache.shape[1], k_cache.shape[2], q.device)
    return launch_decode_attention(
        q, k_cache, v_cache, lengths, sink, key_start, scale, splits, overlap=overlap
    )


@_decode_attention.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    scale: float,
    overlap: bool = False,
) -> Tensor:
    return q.new_empty(q.shape)
