"""Which keys a query sees, and how many.

The queries are the last T of S positions, so query i stands at key index i + S − T. It sees key j when
0 ≤ (i + S − T) − j < W: the window counts the query itself. Without a window every earlier key is visible.

Shapes: B batch, T queries, S keys.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def visible_keys(
    query_index: Int[Tensor, "T"],
    key_index: Int[Tensor, "S"],
    window: int | None = None,
    key_start: Int[Tensor, "B"] | None = None,
) -> Bool[Tensor, "T S"] | Bool[Tensor, "B 1 1 T S"]:
    """Whether the query at each index may attend to the key at each index.

    Args:
        query_index, key_index: positions among the S keys.
        window: W in tokens, or None for all earlier keys.
        key_start: keys before this index are padding, one number a row of the batch.

    Returns:
        (T, S), or (B, 1, 1, T, S) with `key_start`, ready to broadcast over (B, K, G, T, S).

    Source: chapter 6.
    """
    distance = query_index[:, None] - key_index[None, :]  # (T, S)
    visible = distance >= 0
    if window is not None:
        visible = visible & (distance < window)
    if key_start is None:
        return visible
    real = key_index[None, :] >= key_start[:, None]  # (B, S)
    return visible & real[:, None, None, None, :]


def count_visible_pairs(T: int, window: int | None = None) -> int:
    """Query-key pairs of one head over T tokens: T(T+1)/2, or W(W+1)/2 + (T−W)·W through a window W ≤ T.

    Source: chapter 6.
    """
    if window is None or window >= T:
        return T * (T + 1) // 2
    return window * (window + 1) // 2 + (T - window) * window


def key_range(first: int, last: int, window: int | None) -> tuple[int, int]:
    """The half-open range of keys that the queries at indices first … last−1 can see together."""
    return (0 if window is None else max(0, first - window + 1)), last


def check_attention_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sink_bias: Tensor | None,
    key_start: Tensor | None,
) -> None:
    """Raise one clear ValueError where attention inputs do not fit together."""
    if q.dim() != 4 or k.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"attention wants q (B, H, T, D), k and v (B, K, S, D); got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    (B, H, T, D), (Bk, K, S, Dk) = q.shape, k.shape
    if Bk != B or Dk != D:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head_dim")
    if D == 0 or not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise ValueError(
            f"attention wants floating inputs with head_dim >= 1; got {q.dtype}, {k.dtype}, {v.dtype} and {D}"
        )
    if K == 0 or H == 0 or H % K:
        raise ValueError(f"{H} query heads cannot share {K} kv heads evenly")
    if T > S:
        raise ValueError(f"{T} queries but only {S} keys: the queries are the last T of the S keys")
    if window is not None and window < 1:
        raise ValueError(f"window = {window}: expected at least 1 token (the query itself) or None")
    if sink_bias is not None and sink_bias.shape != (H,):
        raise ValueError(
            f"sink_bias {tuple(sink_bias.shape)}: expected one number a query head, ({H},)"
        )
    if key_start is not None and key_start.shape != (B,):
        raise ValueError(f"key_start {tuple(key_start.shape)}: expected one index a row, ({B},)")


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs: where scores and sums are kept."""
    return torch.promote_types(dtype, torch.float32)
