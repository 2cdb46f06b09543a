"""The choice of experts for a few tokens: normalise each, score the experts, keep the k best, renormalise.

One program a token. Of a single token the experts' own kernel makes the choice, with the same function.

Shapes: N tokens (1 to 8), C model width, E experts, k experts a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.decode_overlap import after_previous, let_next_start, overlap_options
from gptoss.kernels.decode_rows import (
    block_sizes,
    load_gamma,
    load_tokens,
    load_weight,
    normalised,
    products,
)


@triton.jit
def choose_experts(
    router, normed, weight_sum_min,
    C: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The k experts of one token and their weights, as tuples. router: blocks of its rows; normed: of norm(x)."""
    experts = tl.arange(0, EXPERTS)
    logits = products(router, normed, C, BLOCK)  # (E, 1): each warp has some of them
    # One sum over the diagonal gives all of them to every warp; what follows then needs no barrier.
    logits = tl.sum(tl.where(experts[:, None] == experts[None, :], logits, 0.0), 0)  # (E,)
    logits = tl.where(experts < E, logits.to(normed[0].dtype).to(tl.float32), float("-inf"))
    probabilities = tl.exp(logits - tl.max(logits, 0))
    probabilities /= tl.sum(probabilities, 0)
    left = tl.where(experts < E, probabilities, -1.0)
    chosen = ()
    kept = ()
    total = 0.0
    for _ in tl.static_range(TOP):
        largest, best = tl.max(left, 0, return_indices=True)  # the lowest index among equals
        chosen += (best,)  # type: ignore[assignment]  # it grows
        kept += (largest,)  # type: ignore[assignment]  # it grows
        total += largest
        left = tl.where(experts == best, -1.0, left)
    weights = ()
    for place in tl.static_range(TOP):
        weights += (kept[place] / tl.maximum(total, weight_sum_min),)  # type: ignore[assignment]  # it grows
    return chosen, weights


@triton.jit
def route_kernel(
    x, gamma, router, normed, indices, weights, eps, weight_sum_min,
    C: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """normed (N, C), indices (N, k) and weights (N, k): softmax over all experts, the k largest, renormalised."""
    let_next_start(PDL)
    r = load_weight(router, tl.arange(0, EXPERTS), E, C, BLOCK)
    g = load_gamma(gamma, C, 1, EXPERTS, BLOCK)
    after_previous(PDL)
    token = tl.program_id(0)
    y = normalised(load_tokens(x + token * C, C, 1, 1, EXPERTS, BLOCK), g, eps, C, BLOCK)
    copy, columns = tl.arange(0, EXPERTS)[:, None, None], tl.arange(0, BLOCK)[None, None, :]
    for start in tl.static_range(0, C, BLOCK):
        place = normed + token * C + start + 0 * copy + columns
        tl.store(place, y[start // BLOCK], mask=(copy == 0) & (start + columns < C))
    chosen, given = choose_experts(r, y, weight_sum_min, C, E, EXPERTS, TOP, BLOCK)
    for place in tl.static_range(TOP):
        tl.store(indices + token * TOP + place, chosen[place])
        tl.store(weights + token * TOP + place, given[place])


def launch_route(
    x: Tensor,
    gamma: Tensor,
    router: Tensor,
    k: int,
    eps: float,
    weight_sum_min: float,
    overlap: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed (N, C), indices (N, k) int32, weights (N, k) fp32)."""
    (N, C), E = x.shape, router.shape[0]
    normed = torch.empty_like(x)
    indices = torch.empty((N, k), dtype=torch.int32, device=x.device)
    weights = torch.empty((N, k), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        route_kernel[(N,)](
            *(x, gamma, router, normed, indices, weights, eps, weight_sum_min),
            C=C,
            E=E,
            TOP=k,
            EXPERTS=triton.next_power_of_2(E),
            BLOCK=block_sizes(1, C)["BLOCK"],
            num_warps=8,
            **overlap_options(x.device, overlap),
        )
    return normed, indices, weights
