"""OPT-5 and OPT-24: how tokens reach their experts, and the documents' fused kernel.

Shapes: N tokens, k experts a token, R = N·k routed rows, C model width, F ffn width, E experts.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.bench.moe_inputs import Inputs, Shape, make_inputs
from gptoss.kernels.loop import grouped_swiglu_loop
from gptoss.kernels.swiglu import grouped_swiglu
from gptoss.model.moe.dispatch import plan_dispatch, run_experts

from .reading import Place, Row, compare_times, raised, relative_error

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
LAYER = Shape(tokens=16_384)
SMALL = Shape(tokens=256, experts=4, width=64, ffn=128)


def swiglu(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """One expert: W2·(silu(W1 x) ⊙ W3 x)."""
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def masked_loop(
    x: Tensor, indices: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
) -> Tensor:
    """For each expert and each of the k choices: find its tokens by a mask, run, add back."""
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        for choice in range(indices.shape[1]):
            tokens = (indices[:, choice] == expert).nonzero().squeeze(1)
            answer = swiglu(x[tokens], w1[expert], w3[expert], w2[expert])
            scaled = (answer * weights[tokens, choice, None]).to(x.dtype)
            out = out.index_add(0, tokens, scaled)
    return out


def sorted_loop(
    x: Tensor, indices: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
) -> Tensor:
    """The documents' dispatch: one stable sort by expert, one chunk an expert, one `index_add`."""
    flat = indices.flatten()  # (R,)
    order = torch.argsort(flat, stable=True)
    tokens = order // indices.shape[1]
    counts = torch.bincount(flat, minlength=w1.shape[0]).tolist()
    chunks = x[tokens].split(counts)
    answers = [swiglu(chunk, *stack) for chunk, *stack in zip(chunks, w1, w3, w2, strict=True)]
    scaled = torch.cat(answers) * weights.flatten()[order, None]  # (R, C)
    return torch.zeros_like(x).index_add(0, tokens, scaled.to(x.dtype))


def package_layer(dispatch: str) -> Layer:
    """The package's dispatch by its name."""

    def run(
        x: Tensor, indices: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor
    ) -> Tensor:
        plan = plan_dispatch(indices, w1.shape[0], dispatch)
        return run_experts(x, weights, plan, w1, w3, w2, dispatch)

    return run


def sorted_dispatch(place: Place) -> Iterator[Row]:
    """OPT-5: one stable sort against a mask for each expert, forward and backward of the routed layer."""
    shape = LAYER if place.cuda else SMALL
    inputs = make_inputs(shape, place.device, place.dtype)
    leaves = [
        t.detach().requires_grad_()
        for t in (inputs.x, inputs.weights, inputs.w1, inputs.w3, inputs.w2)
    ]
    grad = torch.randn_like(inputs.x)

    def both(layer: Layer) -> tuple[Tensor, ...]:
        x, weights, *stacks = leaves
        return torch.autograd.grad(layer(x, inputs.indices, weights, *stacks), leaves, grad)

    ours = package_layer("triton_grouped" if place.cuda else "stacked")
    where = place.name(f"routed layer, forward and backward, {shape.tokens:,} tokens")
    row = compare_times(
        place,
        where,
        lambda: both(masked_loop),
        lambda: both(sorted_loop),
        ours=lambda: both(ours),
        repeats=3,
    )
    outs = [layer(inputs.x, inputs.indices, inputs.weights, inputs.w1, inputs.w3, inputs.w2) for layer in (sorted_loop, masked_loop)]  # fmt: skip
    row["difference"] = float(f"{relative_error(*outs):.2e}")
    yield row


def fused_kernel(place: Place) -> Iterator[Row]:
    """OPT-24: the documents' 16 × 32 × 32 kernel against the loop over experts; ours is the version chosen here."""
    shape = LAYER if place.cuda else SMALL
    documents = partial(grouped_swiglu, version="documents")
    for name, both in (("forward", False), ("forward and backward", True)):
        where = place.name(f"gated half, {name}, {shape.tokens * shape.k:,} rows")
        if not place.cuda:
            reason = "the kernels are compiled for GPUs; here they could only be interpreted"
            yield raised(where, "ms", RuntimeError(reason))
            continue
        inputs = make_inputs(shape, place.device, place.dtype)
        off, on, ours = (
            _half(inputs, run, both) for run in (grouped_swiglu_loop, documents, grouped_swiglu)
        )
        row = compare_times(place, where, off, on, ours=ours, repeats=3)
        row["difference"] = float(f"{relative_error(on()[0], off()[0]):.2e}")
        yield row


def _half(
    inputs: Inputs, run: Callable[..., Tensor], both: bool
) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [t.detach().requires_grad_(both) for t in (inputs.rows, inputs.w1, inputs.w3)]
    grad = torch.ones(leaves[0].shape[0], leaves[1].shape[1], device=leaves[0].device, dtype=leaves[0].dtype)  # fmt: skip

    def call() -> tuple[Tensor, ...]:
        out = run(leaves[0], inputs.counts, *leaves[1:])
        return torch.autograd.grad(out, leaves, grad) if both else (out,)

    return call
