"""OPT-11, OPT-12 and OPT-13: the ring, the growing buffer, and the output tensor of a generation.

Shapes: B batch, T new tokens, S stored tokens, K kv heads, D head_dim, W window.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gptoss.config import ModelConfig
from gptoss.model.cache import MixedKVCache, kv_cache_bytes

from .decoding import DecodeStep
from .largest import LONG
from .reading import Place, Row, compare, compare_times


class Sizes(NamedTuple):
    """Of one layer's decode: S keys already there, and how many tokens are added in one measurement."""

    kv_heads: int
    head_dim: int
    window: int
    stored: int
    added: int

    @classmethod
    def at(cls, place: Place) -> "Sizes":
        return cls(4, 96, 128, LONG, 256) if place.cuda else cls(2, 32, 16, 512, 64)


class Ring:
    """The documents' windowed store: W slots, a head pointer, and an order restored at each read."""

    def __init__(self, window: int, like: Tensor) -> None:
        self.slots = like.new_empty(2, *like.shape[:2], window, like.shape[3])  # (2, B, K, W, D)
        self.window, self.head, self.count = window, 0, 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """One position, over the oldest one."""
        self.slots[0, :, :, self.head] = k[:, :, 0]
        self.slots[1, :, :, self.head] = v[:, :, 0]
        self.head = (self.head + 1) % self.window
        self.count = min(self.count + 1, self.window)

    def get(self) -> tuple[Tensor, Tensor]:
        """Oldest first."""
        if self.count < self.window or self.head == 0:
            k, v = self.slots[..., : self.count, :].unbind(0)
            return k, v
        old, new = self.slots[..., self.head :, :], self.slots[..., : self.head, :]
        k, v = torch.cat((old, new), dim=-2).unbind(0)
        return k, v


class Growing:
    """The documents' global store: half as long again whenever it is full."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.slots, self.count = torch.stack((k, v)), k.shape[2]  # (2, B, K, S, D)

    def append(self, k: Tensor, v: Tensor) -> None:
        """One position."""
        capacity = self.slots.shape[3]
        if self.count + 1 > capacity:
            grown = max(self.count + 1, int(capacity * 1.5) + 1)
            slots = self.slots.new_empty(*self.slots.shape[:3], grown, self.slots.shape[4])
            slots[..., : self.count, :] = self.slots
            self.slots = slots
        self.slots[0, :, :, self.count] = k[:, :, 0]
        self.slots[1, :, :, self.count] = v[:, :, 0]
        self.count += 1

    def get(self) -> tuple[Tensor, Tensor]:
        """A view."""
        k, v = self.slots[..., : self.count, :].unbind(0)
        return k, v


def concatenate(stored: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What both replace: everything copied for each token."""
    return torch.cat((stored[0], k), dim=2), torch.cat((stored[1], v), dim=2)


def ring(place: Place) -> Iterator[Row]:
    """OPT-11: a ring of W slots against every key kept, in time for a token and in bytes for a model."""
    sizes = Sizes.at(place)
    K, D, W, S, n = sizes
    k, v = torch.randn(2, 1, K, 1, D, device=place.device, dtype=place.dtype).unbind(0)
    past_k, past_v = torch.randn(2, 1, K, S, D, device=place.device, dtype=place.dtype).unbind(0)

    whole = Growing(past_k, past_v)

    def full() -> None:
        whole.count = S
        for _ in range(n):
            whole.append(k, v)
            [t[:, :, -W:] for t in whole.get()]

    def documents() -> None:
        store = Ring(W, k)
        for _ in range(n):
            store.append(k, v)
            store.get()

    mixed = MixedKVCache(1, K, D, W, dtype=place.dtype, device=place.device)

    def ours() -> None:
        mixed.reset()
        for _ in range(n):
            mixed.update(0, k, v, True)

    cfg = ModelConfig()
    layers = cfg.n_layers // 2
    held = [
        kv_cache_bytes(
            LONG, windowed, cfg.n_layers - windowed, cfg.n_kv_heads, cfg.head_dim, cfg.window_size
        )
        for windowed in (0, layers)
    ]
    allocated = []
    for keeps_all in (True, False):
        cache = MixedKVCache(2, K, D, W, dtype=place.dtype, device=place.device, full=keeps_all)
        for layer in range(2):
            cache.append(layer, past_k, past_v, layer == 0)
        allocated.append(cache.allocated_bytes())
    where = place.name(f"one windowed layer, {S:,} tokens and {n} more, W = {W}")
    yield compare_times(
        place,
        where,
        full,
        documents,
        ours=ours,
        measure="µs a token",
        per_call=n,
        repeats=2,
    )
    yield compare(
        place.name(f"a windowed and a global layer, {S:,} tokens, allocated"),
        "bytes",
        allocated[:1],
        allocated[1:],
    )
    yield compare(f"the 502M model, {LONG:,} tokens, bf16, computed", "bytes", held[:1], held[1:])  # fmt: skip


def growth(place: Place) -> Iterator[Row]:
    """OPT-12: a buffer that grows by half, against one that is made anew for every token; ours has its length at once."""
    K, D, W, S, n = Sizes.at(place)
    k, v = torch.randn(2, 1, K, 1, D, device=place.device, dtype=place.dtype).unbind(0)
    past_k, past_v = torch.randn(2, 1, K, S, D, device=place.device, dtype=place.dtype).unbind(0)

    def anew() -> int:
        stored = (past_k, past_v)
        for _ in range(n):
            stored = concatenate(stored, k, v)
        return sum(t.nbytes for t in stored)

    def growing() -> int:
        store = Growing(past_k, past_v)
        for _ in range(n):
            store.append(k, v)
            store.get()
        return store.slots.nbytes

    mixed = MixedKVCache(1, K, D, W, max_len=S + n, dtype=place.dtype, device=place.device)

    def ours() -> int:
        mixed.reset()
        mixed.append(0, past_k, past_v, False)
        for _ in range(n):
            mixed.update(0, k, v, False)
        return mixed.allocated_bytes()

    where = place.name(f"one global layer, {S:,} tokens and {n} more, one growth among them")
    yield compare_times(
        place,
        where,
        anew,
        growing,
        ours=ours,
        measure="µs a token",
        per_call=n,
        repeats=2,
    )
    yield compare(where, "bytes held at the end", [anew()], [growing()], ours=ours())  # fmt: skip


def output_tensor(place: Place) -> Iterator[Row]:
    """OPT-13: ids written into one tensor, against one longer tensor a token; beside a step of the 502M model's time."""
    _, _, _, S, n = Sizes.at(place)
    prompt = torch.zeros(1, S, dtype=torch.long, device=place.device)
    token = torch.ones(1, 1, dtype=torch.long, device=place.device)

    def by_cat() -> Tensor:
        ids = prompt
        for _ in range(n):
            ids = torch.cat((ids, token), dim=1)
        return ids

    def in_place() -> Tensor:
        ids = prompt.new_empty(1, S + n)
        ids[:, :S] = prompt
        for step in range(n):
            ids[:, S + step : S + step + 1] = token
        return ids

    where = f"a prompt of {S:,} tokens and {n} more"
    row = compare_times(place, where, by_cat, in_place, measure="µs a token", per_call=n, repeats=2)  # fmt: skip
    row["difference"] = float((by_cat() != in_place()).sum())
    step, whole = DecodeStep.of(place), prompt.new_zeros(1, S + 1)

    def step_and_cat() -> None:
        step()
        torch.cat((prompt, token), dim=1)

    def step_in_place() -> None:
        step()
        whole[:, S:] = token

    yield row
    yield compare_times(place, step.name, step_and_cat, step_in_place, measure="µs a token")
