"""Grouped-query heads: which key head serves which query head.

Shapes: B batch, T tokens, H query heads, K kv heads, G = H/K, D head_dim.
"""

from jaxtyping import Float
from torch import Tensor


def repeat_kv(x: Float[Tensor, "B K T D"], n_rep: int) -> Float[Tensor, "B H T D"]:
    """Give each query head its own copy of the key or value head that it shares: head h reads kv head h // G.

    The expand is a view with stride 0, but merging it into the head dimension copies: n_rep times the bytes. The
    attention kernels of this package take grouped heads as they are and never call it.

    Args:
        x: keys or values.
        n_rep: G, query heads a kv head; 1 returns x itself.

    Raises:
        ValueError: n_rep is not positive.

    Source: Ainslie et al. (2023), section 2.2; chapter 5.
    """
    if n_rep < 1:
        raise ValueError(f"n_rep = {n_rep}: expected at least one query head a kv head")
    if n_rep == 1:
        return x
    B, K, T, D = x.shape
    return x[:, :, None].expand(B, K, n_rep, T, D).reshape(B, K * n_rep, T, D)
