"""The projections of a decoding step as operators: q, k and v with norm, rotary and cache; and any other linear layer.

Shapes: N tokens or sequences, C model width, O outputs, H query heads, K kv heads, D head_dim, M capacity of the cache.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.decode_checks import check_rows, require_decode_kernels


def decode_qkv(
    x: Float[Tensor, "N C"],
    norm_weight: Float[Tensor, "C"],
    q_weight: Float[Tensor, "HD C"],
    kv_weight: Float[Tensor, "2KD C"],
    cos: Float[Tensor, "N D_half"],
    sin: Float[Tensor, "N D_half"],
    slots: Int[Tensor, "N"],
    k_cache: Float[Tensor, "N K M D"],
    v_cache: Float[Tensor, "N K M D"],
    eps: float = 1e-5,
    overlap: bool = False,
) -> Float[Tensor, "N H 1 D"]:
    """Normalise, project, rotate; keys and values are written into row `slots[n]` of sequence n's caches.

    q = R·W_q·norm(x),  k = R·W_k·norm(x),  v = W_v·norm(x), with R turning the pair (2i, 2i+1) by its angle.

    Args:
        x: residual stream, one row a sequence.
        norm_weight: γ of the RMSNorm in front; `eps` its ε.
        q_weight, kv_weight: the layer's projections, keys before values in the second.
        cos, sin: of each sequence's position, as this layer wants them (pruned or not).
        slots: the cache row to write, on the device: the position, or the position modulo W in a ring.
        k_cache, v_cache: changed in place.
        overlap: start before the kernel in front has ended, where the GPU can; `decode_overlap.py` says what that asks.

    Returns:
        The rotated queries.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        ImportError: Triton is not installed.

    Source: chapter 15.
    """
    check_rows(x, q_weight, kv_weight, norm_weight)
    (N, C), (K, D) = x.shape, k_cache.shape[1::2]
    if q_weight.shape[0] % D or kv_weight.shape != (2 * K * D, C) or D % 4:
        raise ValueError(
            f"expected q_weight (H·D, C) and kv_weight (2·K·D, C) for caches {tuple(k_cache.shape)} and D a multiple of 4; "
            f"got {tuple(q_weight.shape)}, {tuple(kv_weight.shape)}"
        )
    if k_cache.shape[0] != N or v_cache.shape != k_cache.shape or slots.shape != (N,):
        raise ValueError(
            f"expected caches (N, K, M, D) and slots (N,) for {N} rows; got {tuple(k_cache.shape)}, {tuple(v_cache.shape)}, "
            f"{tuple(slots.shape)}"
        )
    if cos.shape != (N, D // 2) or sin.shape != (N, D // 2):
        raise ValueError(
            f"expected cos and sin ({N}, {D // 2}); got {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    require_decode_kernels()
    return _decode_qkv(
        x, norm_weight, q_weight, kv_weight, cos, sin, slots, k_cache, v_cache, eps, overlap
    ).unsqueeze(2)


def decode_linear(
    x: Float[Tensor, "N C"],
    weight: Float[Tensor, "O C"],
    norm_weight: Float[Tensor, "C"] | None = None,
    residual: Float[Tensor, "N O"] | None = None,
    eps: float = 1e-5,
    overlap: bool = False,
) -> Float[Tensor, "N O"]:
    """y = residual + norm(x)·Wᵀ for a few rows, the weight read once.

    Args:
        x: up to 8 rows.
        weight: W.
        norm_weight: γ of an RMSNorm in front, `eps` its ε; None for none.
        residual: added to the product, in x's dtype; None for none.
        overlap: start before the kernel in front has ended, where the GPU can; `decode_overlap.py` says what that asks.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        ImportError: Triton is not installed.

    Source: chapter 15.
    """
    check_rows(x, weight, *(() if norm_weight is None else (norm_weight,)))
    if residual is not None and residual.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(
            f"expected residual ({x.shape[0]}, {weight.shape[0]}), got {tuple(residual.shape)}"
        )
    require_decode_kernels()
    return _decode_linear(x, weight, norm_weight, residual, eps, overlap)


@torch.library.custom_op("gptoss::decode_qkv", mutates_args=("k_cache", "v_cache"))
def _decode_qkv(
    x: Tensor,
    norm_weight: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    overlap: bool = False,
) -> Tensor:
    from gptoss.kernels.decode_rows import launch_qkv

    x, q_weight, kv_weight, cos, sin = (t.contiguous() for t in (x, q_weight, kv_weight, cos, sin))
    return launch_qkv(
        x, q_weight, kv_weight, norm_weight, cos, sin, slots, k_cache, v_cache, eps, overlap=overlap
    )


@_decode_qkv.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    overlap: bool = False,
) -> Tensor:
    D = k_cache.shape[3]
    return x.new_empty((x.shape[0], q_weight.shape[0] // D, D))


@torch.library.custom_op("gptoss::decode_linear", mutates_args=())
def _decode_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    overlap: bool = False,
) -> Tensor:
    from gptoss.kernels.decode_rows import launch_linear

    if residual is not None:
        residual = residual.contiguous()
    x, weight = x.contiguous(), weight.contiguous()
    return launch_linear(x, weight, norm_weight, residual, eps, overlap=overlap)


@_decode_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    overlap: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
