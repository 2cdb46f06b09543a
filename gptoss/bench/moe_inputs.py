"""Inputs of the expert benchmarks, and the check that comes before any timing.

Shapes: N tokens, k experts a token, R = N·k routed rows, C model width, F ffn width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gptoss.kernels.expert_layer import grouped_experts
from gptoss.kernels.loop import grouped_swiglu_loop
from gptoss.kernels.reference import grouped_linear_reference, grouped_swiglu_reference
from gptoss.kernels.swiglu import grouped_swiglu
from gptoss.model.moe.dispatch import combine_rows, gather_rows, plan_dispatch


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement."""

    tokens: int = 32_768
    k: int = 2
    experts: int = 8
    width: int = 768
    ffn: int = 1536


@dataclass
class Inputs:
    """Random routing, rows and weights of one shape; ``rows`` is the gathered, sorted x."""

    x: Tensor
    indices: Tensor
    weights: Tensor
    counts: Tensor
    rows: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw inputs: k distinct experts a token, uniformly; unit rows; weights of deviation 1/√fan-in."""
    e, f, c = shape.experts, shape.ffn, shape.width
    x = torch.randn(shape.tokens, c, device=device, dtype=dtype)
    indices = torch.rand(shape.tokens, e, device=device).topk(shape.k).indices
    weights = torch.rand(shape.tokens, shape.k, device=device)
    weights = weights / weights.sum(1, keepdim=True)
    plan = plan_dispatch(indices, e, "stacked")
    w1, w3 = (torch.randn(e, f, c, device=device, dtype=dtype) * c**-0.5 for _ in range(2))
    w2 = torch.randn(e, c, f, device=device, dtype=dtype) * f**-0.5
    rows = gather_rows(x, plan, shape.k)
    return Inputs(x, indices, weights, plan.counts, rows, w1, w3, w2)


def check(device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, dict[str, float]]]:
    """Relative errors of every version against the float32 oracle, on ragged runs with an idle expert.

    Returns:
        {"half", "layer"} → version → {"error", "gradient_error"}; a version that does not run here is left out.
    """
    cuda = device.type == "cuda"
    if cuda:
        shape = Shape(tokens=1023, experts=6, width=768, ffn=1560)
    else:
        shape = Shape(tokens=24, experts=3, width=32, ffn=64)
    inputs = make_inputs(shape, device, dtype)
    indices = inputs.indices.clone()
    indices[indices == shape.experts - 1] = 0  # the last one idles; a token may meet expert 0 twice
    plan = plan_dispatch(indices, shape.experts, "stacked")
    rows = gather_rows(inputs.x, plan, shape.k)
    grad = torch.randn(rows.shape[0], shape.ffn, device=device, dtype=dtype)
    out_grad = torch.randn_like(inputs.x)
    halves: dict[str, Callable[..., Tensor]] = {"loop": grouped_swiglu_loop}
    if cuda:
        for version in ("documents", "tuned", "persistent"):
            halves[version] = partial(grouped_swiglu, version=version)

    def half(run: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
        leaves = tuple(t.detach().requires_grad_() for t in leaves)
        out = run(leaves[0], plan.counts, *leaves[1:])
        return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    truth = half(grouped_swiglu_reference, rows.float(), inputs.w1.float(), inputs.w3.float())
    found_halves = {
        name: _errors(half(run, rows, inputs.w1, inputs.w3), truth) for name, run in halves.items()
    }

    def layer(run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = (inputs.x.to(dtype), inputs.weights, *(w.to(dtype) for w in (inputs.w1, inputs.w3, inputs.w2)))  # fmt: skip
        leaves = tuple(t.detach().requires_grad_() for t in leaves)
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, leaves, out_grad.to(dtype))]

    def oracle(x: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        hidden = grouped_swiglu_reference(gather_rows(x, plan, shape.k), plan.counts, w1, w3)
        return combine_rows(grouped_linear_reference(hidden, plan.counts, w2), weights, plan)

    def ours(recompute: bool, x: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        order, inverse, counts = plan
        return grouped_experts(x, weights, order, inverse, counts, *stacks, recompute=recompute)

    found_layers = {}
    if cuda:
        truth = layer(oracle, torch.float32)
        found_layers = {
            "grouped_experts": _errors(layer(partial(ours, False), dtype), truth),
            "grouped_experts recomputing": _errors(layer(partial(ours, True), dtype), truth),
        }
    return {"half": found_halves, "layer": found_layers}


def _errors(found: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    relative = [
        ((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)
    ]
    return {
        "error": float(f"{relative[0]:.2e}"),
        "gradient_error": float(f"{max(relative[1:], key=lambda e: (e != e, e)):.2e}"),
    }
