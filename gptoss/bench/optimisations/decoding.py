"""OPT-14 and OPT-15, alone and inside one decode step: the sinks' clamp, and rotary tables for one position.

Shapes: T tokens, S keys in the cache, D head_dim, L layers.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gptoss.config import load_config
from gptoss.model.attention import SINK_CLAMP_MAX, SINK_CLAMP_MIN, GPTOSSAttention
from gptoss.model.cache import MixedKVCache
from gptoss.model.rotary import YaRNRoPE, compute_yarn_mscale
from gptoss.model.transformer import GPTOSS

from .reading import Place, Row, compare_times, relative_error

STEPS = 4000  # room in the cache for every step of this file


class DecodeStep:
    """The 502M model in bf16 with random keys in its cache, eager; the tiny model on a CPU."""

    def __init__(self, place: Place) -> None:
        cfg = load_config("pretrain_a100_502m" if place.cuda else "tiny").model
        self.stored = 16_384 if place.cuda else 128
        cfg = dataclasses.replace(cfg, moe_dispatch="triton_grouped" if place.cuda else "stacked")
        with place.device:
            self.model = GPTOSS(cfg).to(place.dtype).eval()
            self.token = torch.zeros(1, 1, dtype=torch.long)
            k = torch.randn(1, cfg.n_kv_heads, self.stored, cfg.head_dim, dtype=place.dtype)
        self.cache = MixedKVCache.for_model(self.model, max_len=self.stored + STEPS)
        for layer in range(cfg.n_layers):
            self.cache.append(layer, k, k, cfg.is_windowed(layer))
        self.name = place.name(f"an eager decode step of {cfg.n_layers} layers, {self.stored:,} tokens before it")  # fmt: skip

    @classmethod
    def of(cls, place: Place) -> "DecodeStep":
        """The one of this table."""
        return place.once("decode step", lambda: cls(place))

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Logits of one more token."""
        return self.model(self.token, cache=self.cache, last_only=True)[0]

    @property
    def attentions(self) -> list[GPTOSSAttention]:
        """One a layer."""
        return [module for module in self.model.modules() if isinstance(module, GPTOSSAttention)]


class ClampedOnce:
    """The documents' dictionary: an attention layer's clamped sinks by `id`."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def __call__(self, attention: GPTOSSAttention) -> Tensor:
        if id(attention) not in self.kept:
            self.kept[id(attention)] = clamp(attention)
        return self.kept[id(attention)]


def clamp(attention: GPTOSSAttention) -> Tensor:
    """The sinks within their bounds, anew."""
    assert attention.sink_bias is not None  # both configurations have sinks
    return attention.sink_bias.detach().clamp(SINK_CLAMP_MIN, SINK_CLAMP_MAX)


@contextmanager
def sinks_kept(attentions: list[GPTOSSAttention], kept: ClampedOnce) -> Iterator[None]:
    """The layers take their sinks from a dictionary for a while."""
    for attention in attentions:
        attention.clamped_sink = lambda one=attention: kept(one)  # type: ignore[method-assign, misc]  # what is measured
    try:
        yield
    finally:
        for attention in attentions:
            del attention.clamped_sink


def tables_general(positions: Tensor, inverse: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """cos and sin for any positions: (T, D/2) by `torch.outer`."""
    angles = torch.outer(positions.to(inverse.dtype), inverse)
    return angles.cos() * mscale, angles.sin() * mscale


def tables_of_one(positions: Tensor, inverse: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """The documents' path for one position, which asks the device for its number."""
    angles = inverse * float(positions[0].item())
    return angles.cos()[None] * mscale, angles.sin()[None] * mscale


def sink_clamp(place: Place) -> Iterator[Row]:
    """OPT-14: the sinks clamped once a generation against once a token."""
    step, kept = DecodeStep.of(place), ClampedOnce()
    attentions = step.attentions

    def cached_step() -> None:
        with sinks_kept(attentions, kept):
            step()

    row = compare_times(
        place,
        f"the sinks of {len(attentions)} layers",
        lambda: [clamp(attention) for attention in attentions],
        lambda: [kept(attention) for attention in attentions],
        measure="µs a token",
    )
    row["difference"] = max(float((clamp(one) - kept(one)).abs().max()) for one in attentions)
    yield row
    yield compare_times(place, step.name, step, cached_step, measure="µs a token")


def one_position(place: Place) -> Iterator[Row]:
    """OPT-15: rotary tables of one position by its own path, alone and with work on its way."""
    rope = YaRNRoPE(96, mode="yarn")
    mscale = compute_yarn_mscale(rope.scale_factor)
    inverse = rope.frequencies(place.device).float()
    position = torch.tensor([100_000], device=place.device)
    side, layers = (2048, 12) if place.cuda else (128, 4)
    a = torch.randn(side, side, device=place.device, dtype=place.dtype)

    def general() -> tuple[Tensor, Tensor]:
        return tables_general(position, inverse, mscale)

    def single() -> tuple[Tensor, Tensor]:
        return tables_of_one(position, inverse, mscale)

    def ours() -> tuple[Tensor, Tensor]:
        return rope(position)

    def among(tables: object) -> None:
        for _ in range(layers):
            a @ a
            tables()  # type: ignore[operator]  # one of the three

    row = compare_times(place, "the tables of one position", general, single, ours=ours, measure="µs a token")  # fmt: skip
    row["difference"] = float(f"{max(relative_error(a, b) for a, b in zip(single(), general(), strict=True)):.2e}")  # fmt: skip
    yield row
    yield compare_times(
        place,
        place.name(f"{layers} layers of one {side}^3 product and the tables"),
        lambda: among(general),
        lambda: among(single),
        ours=lambda: among(ours),
        measure="µs a token",
    )
