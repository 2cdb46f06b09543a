"""OPT-6: the router's softmax in fp32 against bf16, by itself and over short trainings.

Shapes: B batch, T tokens, N = B·T tokens, E experts, k experts a token.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gptoss.model.moe.balance import balance
from gptoss.model.moe.dispatch import plan_dispatch, run_experts
from gptoss.model.moe.layer import MoELayer
from gptoss.model.moe.router import renormalised_weights, router_probabilities, top_k
from gptoss.model.transformer import GPTOSS

from .reading import DIFFERENCE, Place, Row, compare, compare_times
from .short_runs import compare_runs

BF16 = torch.bfloat16
DRAWS = 3


def bf16_probabilities(logits: Tensor) -> Tensor:
    """Softmax whose result is bf16."""
    return torch.softmax(logits.to(BF16), dim=-1)


def bf16_forward(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """`MoELayer.forward` with probabilities, weights and balance loss in bf16."""
    flat = x.flatten(0, 1)  # (N, C)
    _, _, logits = layer.router(flat)
    probabilities = bf16_probabilities(logits)  # (N, E)
    top, indices = top_k(probabilities, layer.n_activated)
    plan = plan_dispatch(indices, layer.n_experts, layer.dispatch)
    experts = layer.experts
    weights = renormalised_weights(top).float()  # bf16 values
    out = run_experts(flat, weights, plan, experts.w1, experts.w3, experts.w2, layer.dispatch)
    for expert in layer.shared:
        out = out + expert(flat)
    return out.view_as(x), balance(probabilities, plan.counts)


def route_in_bf16(model: GPTOSS) -> None:
    """Give each layer the bf16 forward."""
    for block in model.blocks:
        block.moe.forward = partial(bf16_forward, block.moe)  # type: ignore[union-attr, arg-type]  # blocks have experts


def router_softmax(place: Place) -> Iterator[Row]:
    """OPT-6: error of the weights, probabilities that vanish, time, and the loss after a short training."""
    N, E, k = (32_768, 8, 2) if place.cuda else (2048, 8, 2)

    for scale, name in ((1.0, "unit logits"), (30.0, "logits of deviation 30")):
        errors: tuple[list[float], list[float]] = ([], [])
        vanished: tuple[list[float], list[float]] = ([], [])
        for _ in range(DRAWS):
            logits = (scale * torch.randn(N, E, device=place.device)).to(BF16)
            truth = torch.softmax(logits.double(), dim=-1)
            best, indices = top_k(truth, k)
            for side, softmax in enumerate((bf16_probabilities, router_probabilities)):
                found = softmax(logits)
                weights = renormalised_weights(found.gather(1, indices))
                error = (weights.double() - renormalised_weights(best)).abs().max()
                errors[side].append(error.item())
                vanished[side].append((found == 0).double().mean().item())
        where = f"{N:,} rows of {E} bf16 logits, {name}"
        yield compare(where, "largest error of a weight against float64", *errors)
        yield compare(where, "share of probabilities that are 0", *vanished, compared=DIFFERENCE)
    logits = torch.randn(N, E, device=place.device, dtype=BF16)
    where = f"softmax of {N:,} rows of {E} bf16 logits"
    yield compare_times(place, where, lambda: bf16_probabilities(logits), lambda: router_probabilities(logits))  # fmt: skip
    yield from compare_runs(place, "router in fp32 against bf16", prepare=route_in_bf16)
