"""OPT-8 and OPT-9: clipping and AdamW over the documents' tensors, one at a time, in lists, or in one kernel.

The documents keep each expert as a module: 372 matrices where this package has stacks. Their sides get their tensors,
ours gets the stacks.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptoss.config import load_config
from gptoss.model.transformer import GPTOSS
from gptoss.training.optim import build_optimizer, gradient_norm

from .reading import Place, Row, Run, compare_times, raised, relative_error

CLIP = 1.0
RATE = 1e-5


class Tensors(NamedTuple):
    """The model's parameters with gradients: experts apart, and stacked."""

    apart: list[nn.Parameter]
    stacked: list[nn.Parameter]
    name: str

    @classmethod
    def of(cls, place: Place) -> "Tensors":
        """Those of the production model, or of the tiny one on a CPU; made once."""
        return place.once("tensors", lambda: cls.make(place))

    @classmethod
    def make(cls, place: Place) -> "Tensors":
        """Small random weights and gradients in fp32."""
        cfg = load_config("pretrain_a100_502m" if place.cuda else "tiny").model
        if not place.cuda:
            cfg = dataclasses.replace(cfg, n_layers=2)
        with torch.device("meta"):
            shapes = [p.shape for p in GPTOSS(cfg).parameters()]
        apart, stacked = [], []
        for shape in shapes:
            stacked.append(_with_gradient(shape, place.device))
            pieces = [torch.Size(shape[1:])] * shape[0] if len(shape) == 3 else [shape]
            apart += [_with_gradient(piece, place.device) for piece in pieces]
        return cls(apart, stacked, f"{sum(p.numel() for p in stacked):,} parameters in fp32")


def clipping(place: Place) -> Iterator[Row]:
    """OPT-8: `foreach=True` against one tensor at a time, and against PyTorch's own default."""
    tensors = Tensors.of(place)
    where = f"clip_grad_norm_, {len(tensors.apart)} tensors, {tensors.name}"

    def clip(foreach: bool | None) -> Tensor:
        return nn.utils.clip_grad_norm_(tensors.apart, CLIP, foreach=foreach)

    ours = partial(gradient_norm, tensors.stacked)  # the update divides by it in its own kernel
    row = compare_times(place, where, partial(clip, False), partial(clip, True), ours=ours, repeats=2)  # fmt: skip
    row["difference"] = float(f"{relative_error(clip(True), clip(False)):.2e}")
    default = compare_times(place, where + ", off: PyTorch's default", partial(clip, None), partial(clip, True), repeats=2)  # fmt: skip
    yield row
    yield default


def adamw(place: Place) -> Iterator[Row]:
    """OPT-9: one tensor at a time, lists of tensors, one kernel; and the two flags that the documents set together."""
    tensors = Tensors.of(place)
    where = f"AdamW step, {len(tensors.apart)} tensors, {tensors.name}"

    def step(**flags: bool) -> Run:
        return torch.optim.AdamW(tensors.apart, lr=RATE, **flags).step  # type: ignore[arg-type]  # flags are bools

    sides = {"loop": step(foreach=False), "default": step(), "foreach": step(foreach=True), "fused": step(fused=True)}  # fmt: skip
    ours = build_optimizer(nn.ParameterList(tensors.stacked), RATE).step
    yield from [
        compare_times(
            place,
            f"{where}, {off} against {on}",
            sides[off],
            sides[on],
            ours=ours if off == "loop" else None,
            repeats=2,
        )
        for off, on in (("loop", "foreach"), ("loop", "fused"), ("default", "fused"))
    ]
    together = f"{where}, foreach=True and fused=True"
    try:
        yield compare_times(place, together, sides["loop"], step(foreach=True, fused=True), repeats=2)  # fmt: skip
    except RuntimeError as problem:
        yield raised(together, "ms", problem)


def _with_gradient(shape: torch.Size, device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(0.02 * torch.randn(shape, device=device))
    parameter.grad = 1e-3 * torch.randn_like(parameter)
    return parameter
