"""One layer's keys and values: a ring of the last W positions, or a growing buffer of all (chapters 6, 15).

B batch, T new positions of one call, S stored positions, K kv heads, D head_dim, W window.
"""

import torch
from jaxtyping import Float
from torch import Tensor

GROWTH = 1.5


class LayerStore:
    """Storage for one layer of a `MixedKVCache`, which checks what comes in.

    A ring keeps position p in slot p mod W, so that writing moves nothing; reading puts the positions in order. It grows
    like a buffer until it has W slots and wraps only then, so that until then slot = position.

    Args:
        window: W of a ring (tokens); None keeps every position.
        limit: the most slots that will ever be needed; None when unknown.
        empty: (B, K, 0, D), whose dtype and device the store takes.
    """

    def __init__(
        self, window: int | None, limit: int | None, empty: Float[Tensor, "B K 0 D"]
    ) -> None:
        self.window = window
        self.limit = limit
        self.seen = 0  # positions written so far, also those that the ring has overwritten
        self.k = empty  # (B, K, capacity, D)
        self.v = empty.clone()

    def reserve(self, length: int) -> None:
        """Make room for `length` positions (tokens), or for `limit` if that is less."""
        needed = length if self.limit is None else min(length, self.limit)
        capacity = self.k.shape[2]
        if needed <= capacity:
            return
        grown = max(needed, int(GROWTH * capacity))
        if self.limit is not None:
            grown = min(grown, self.limit)
        self.k, self.v = _extended(self.k, grown), _extended(self.v, grown)

    def write(self, k: Float[Tensor, "B K T D"], v: Float[Tensor, "B K T D"]) -> None:
        """Store T new positions in the store's dtype, without their history of gradients."""
        n_new = k.shape[2]
        self.reserve(self.seen + n_new)
        start, end = self.seen, self.seen + n_new
        k, v = k.detach().to(self.k.dtype), v.detach().to(self.v.dtype)
        if self.window is None:
            self.k[:, :, start:end] = k
            self.v[:, :, start:end] = v
        else:
            kept = min(n_new, self.window)  # of a long chunk, only its end stays
            slots = torch.arange(end - kept, end, device=k.device) % self.window  # (kept,)
            self.k.index_copy_(2, slots, k[:, :, n_new - kept :])
            self.v.index_copy_(2, slots, v[:, :, n_new - kept :])
        self.seen = end

    def read(self) -> tuple[Float[Tensor, "B K S D"], Float[Tensor, "B K S D"]]:
        """What is stored, oldest position first: a copy of a ring, a view of a buffer."""
        if self.window is None:
            return self.k[:, :, : self.seen], self.v[:, :, : self.seen]
        if self.seen <= self.window:
            return self.k[:, :, : self.seen].clone(), self.v[:, :, : self.seen].clone()
        positions = torch.arange(self.seen - self.window, self.seen, device=self.k.device)
        slots = positions % self.window  # (W,)
        return self.k.index_select(2, slots), self.v.index_select(2, slots)


def _extended(old: Tensor, capacity: int) -> Tensor:
    new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
