"""OPT-1, OPT-3 and OPT-22: boolean masks, kept, extended by a sink, or made for one query.

The package has no mask at all: its kernels compare positions. So each entry has three sides.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, D head_dim, W window.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.bench.attention import Shape, make_inputs
from gptoss.model.attention import (
    SINK_CLAMP_MAX,
    SINK_CLAMP_MIN,
    causal_attention,
    manual_causal_attention,
    repeat_kv,
)

from .largest import LONG, compare_largest
from .reading import Place, Row, Run, compare, compare_peaks, compare_times, relative_error

WINDOW = 128


class Sizes(NamedTuple):
    """One layer's attention: what production has, or what a CPU does in a moment."""

    shape: Shape
    keys: int  # of the decode step

    @classmethod
    def at(cls, place: Place) -> "Sizes":
        return cls(Shape(1, 4096), 16_384) if place.cuda else cls(Shape(1, 512, 4, 2, 32), 1024)


def causal_mask(T: int, device: torch.device) -> Tensor:
    """(T, T), True where the key is not later than the query."""
    index = torch.arange(T, device=device)
    return index[:, None] >= index[None, :]


def window_mask(T: int, S: int, window: int, device: torch.device) -> Tensor:
    """(T, S) for the last T of S positions: the distance is below the window."""
    query, key = torch.arange(S - T, S, device=device), torch.arange(S, device=device)
    return query[:, None] - key[None, :] < window


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA as the documents call it: one head of keys a query head, and a mask."""
    k, v = (repeat_kv(t, q.shape[1] // k.shape[1]) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sink_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """SDPA over one key more, whose value is 0 and whose score is the sink's, by an (H, T, S + 1) mask."""
    B, H, T, D = q.shape
    S = k.shape[2]
    mask = q.new_zeros(H, T, S + 1)
    mask[:, :, :S].masked_fill_(~visible, -torch.inf)
    mask[:, :, S] = sink.clamp(SINK_CLAMP_MIN, SINK_CLAMP_MAX).to(q.dtype)[:, None]
    k, v = (repeat_kv(t, H // t.shape[1]) for t in (k, v))
    k, v = (torch.cat((t, t.new_zeros(B, H, 1, D)), dim=2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])


def kept_masks(place: Place) -> Iterator[Row]:
    """OPT-1: masks built in every forward against masks kept by `functools.lru_cache`."""
    shape, T = Sizes.at(place).shape, Sizes.at(place).shape.tokens
    q, k, v, _ = (t.detach() for t in make_inputs(shape, place.device, place.dtype))
    causal, window = functools.lru_cache(causal_mask), functools.lru_cache(window_mask)

    def composed(of: Callable[..., Tensor], through: Callable[..., Tensor]) -> Tensor:
        return of(T, place.device) & through(T, T, WINDOW, place.device)

    def build() -> Tensor:
        return composed(causal_mask, window_mask)

    def keep() -> Tensor:
        return composed(causal, window)

    runs: tuple[Run, Run, Run] = (
        lambda: masked_attention(q, k, v, build()),
        lambda: masked_attention(q, k, v, keep()),
        lambda: causal_attention(q, k, v, WINDOW),
    )
    where = place.name(f"windowed attention forward with them, T = {T}")
    kept = causal(T, place.device).nbytes + window(T, T, WINDOW, place.device).nbytes
    yield compare_times(place, f"the masks of a windowed layer, T = {T}", build, keep)
    yield compare_times(place, where, runs[0], runs[1], ours=runs[2])
    yield from compare_peaks(place, where, *runs)
    yield compare(f"masks that stay between steps, T = {T:,}", "bytes", [0], [kept])
    yield compare(f"masks that stay between steps, T = {LONG:,}, computed", "bytes", [0], [kept // T**2 * LONG**2])  # fmt: skip


def sink_by_mask(place: Place) -> Iterator[Row]:
    """OPT-3: the sink as one more column of a mask, against attention written out in fp32."""
    shape, T = Sizes.at(place).shape, Sizes.at(place).shape.tokens
    q, k, v, sink = (t.detach() for t in make_inputs(shape, place.device, place.dtype))

    def written_out(n: int = T) -> Tensor:
        return manual_causal_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], None, sink)

    def extended(n: int = T) -> Tensor:
        visible = causal_mask(n, place.device)
        return sink_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], visible, sink)

    def ours(n: int = T) -> Tensor:
        return causal_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], None, sink)

    where = place.name("attention with sinks, forward")
    row = compare_times(place, f"{where}, T = {T}", written_out, extended, ours=ours)
    row["difference"] = float(f"{relative_error(extended(), written_out()):.2e}")
    yield row
    yield from compare_peaks(place, f"{where}, T = {T}", written_out, extended, ours)
    yield from compare_largest(
        where,
        T,
        lambda n: lambda: written_out(n),
        lambda n: lambda: extended(n),
        lambda n: lambda: ours(n),
    )
    if place.cuda:
        mask = q.new_zeros(1, shape.heads, T, T)
        taken = [_flash_takes(q, repeat_kv(k, shape.heads // shape.kv_heads), m) for m in (None, mask)]  # fmt: skip
        yield compare(
            "FlashAttention takes the call: without a mask, with one",
            "1 yes, 0 no",
            taken[:1],
            taken[1:],
            compared="on - off",
            higher_is_better=True,
        )


def one_query_mask(place: Place) -> Iterator[Row]:
    """OPT-22: a (1, S) window mask in decoding, against the last row of an (S, S) one."""
    sizes = Sizes.at(place)
    S = sizes.keys
    q, k, v, _ = (t.detach() for t in make_inputs(sizes.shape._replace(tokens=1), place.device, place.dtype, S))  # fmt: skip

    def square(n: int = S) -> Tensor:
        return (causal_mask(n, place.device) & window_mask(n, n, WINDOW, place.device))[-1:]

    def row(n: int = S) -> Tensor:
        return window_mask(1, n, WINDOW, place.device)

    where = place.name(f"windowed attention of one query over {S:,} keys with it")
    yield compare_times(place, f"the mask of one query over {S:,} keys", square, row)
    yield compare_times(
        place,
        where,
        lambda: masked_attention(q, k, v, square()),
        lambda: masked_attention(q, k, v, row()),
        ours=lambda: causal_attention(q, k, v, WINDOW),
    )
    yield from compare_largest("the mask of one query", S, lambda n: lambda: square(n), lambda n: lambda: row(n))  # fmt: skip


def _flash_takes(q: Tensor, k: Tensor, mask: Tensor | None) -> int:
    params = torch.backends.cuda.SDPAParams(q, k, k, mask, 0.0, mask is None, False)
    return int(torch.backends.cuda.can_use_flash_attention(params, False))
