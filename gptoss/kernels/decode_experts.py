"""The experts of a few tokens, each selected weight read once.

    up      h = silu(W1 x) ∘ W3 x for every selected expert                            OUT rows of F a program
    down    out = residual + Σ_e weight_e · W2[e] h_e                                  `decode_down.py`

Of a single token, the choice of experts (`decode_router.py`) and up are one kernel: every program makes the choice itself.
Up and down have one lane for each distinct selected expert (`decode_lanes.py`). The shared expert, if there is one, is one
lane more with weight 1; its weights depend on no router, so they are asked for before the kernel in front has ended.

Shapes: N tokens (1 to 8), C model width, E experts, k experts a token, F ffn width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.decode_down import launch_down
from gptoss.kernels.decode_lanes import expert_of_lane, lane_constants
from gptoss.kernels.decode_overlap import after_previous, let_next_start, overlap_options
from gptoss.kernels.decode_router import choose_experts
from gptoss.kernels.decode_rows import (
    block_sizes,
    load_gamma,
    load_tokens,
    load_weight,
    normalised,
    products,
)


@triton.jit
def store_gated(
    hidden, gate, up, x, lane, first, F,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT rows of h = silu(W1 x) ∘ W3 x of one lane, from blocks of the weights and of x."""
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    a = products(gate, x, C, BLOCK)
    h = a * tl.sigmoid(a) * products(up, x, C, BLOCK)
    place = (lane * N + tokens)[None, :] * F + first + rows[:, None]
    real = (rows < F - first)[:, None] & (tokens < N)[None, :]
    tl.store(hidden + place, h.to(hidden.dtype.element_ty), mask=real)


@triton.jit
def up_kernel(
    x, indices, w1, w3, shared_w1, shared_w3, hidden, F,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, SLOTS: tl.constexpr, N_SLOTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden (LANES [+ 1 shared], N, F): all tokens for each lane's expert; the down kernel weighs them."""
    let_next_start(PDL)
    after_previous(PDL)  # first of all: only the shared lane's weights are known before
    blocks = tl.cdiv(F, OUT)
    lane = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * OUT
    gate, up = w1, w3
    if lane < LANES:
        expert = expert_of_lane(indices, lane, N, SLOTS, N_SLOTS, E, EXPERTS)
        base = tl.cast(expert, tl.int64) * F * C
        active = expert < E
    else:
        gate, up = shared_w1, shared_w3
        base = tl.cast(0, tl.int64)
        active = lane == LANES
    if active:
        rows = tl.arange(0, OUT)
        base += tl.cast(first, tl.int64) * C
        a = load_weight(gate + base, rows, F - first, C, BLOCK)
        b = load_weight(up + base, rows, F - first, C, BLOCK)
        t = load_tokens(x, C, N, TOKENS, OUT, BLOCK)
        store_gated(hidden, a, b, t, lane, first, F, C, N, TOKENS, OUT, BLOCK)


@triton.jit
def routed_up_kernel(
    x, gamma, router, w1, w3, shared_w1, shared_w3, hidden, indices, weights, eps, weight_sum_min, F,
    C: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, EXPERTS: tl.constexpr,
    OUT: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For one token route and up in one: hidden (k [+ 1 shared], 1, F), and the choice for the down kernel.

    Each program makes the choice anew: 2·E·C operations on a router that is in the L2 cache, in place of a launch and of
    a kernel that occupies one multiprocessor while the others have nothing to do. It owns OUT rows of all lanes.
    """
    let_next_start(PDL)
    first = tl.program_id(0) * OUT
    rows = tl.arange(0, OUT)
    n_rows = F - first
    offset = tl.cast(first, tl.int64) * C
    r = load_weight(router, tl.arange(0, EXPERTS), E, C, BLOCK)
    r_gamma = load_gamma(gamma, C, 1, EXPERTS, BLOCK)
    g = load_gamma(gamma, C, 1, OUT, BLOCK)
    if SHARED:
        shared_gate = load_weight(shared_w1 + offset, rows, n_rows, C, BLOCK)
        shared_up = load_weight(shared_w3 + offset, rows, n_rows, C, BLOCK)
    after_previous(PDL)
    y = normalised(load_tokens(x, C, 1, 1, EXPERTS, BLOCK), r_gamma, eps, C, BLOCK)
    chosen, given = choose_experts(r, y, weight_sum_min, C, E, EXPERTS, TOP, BLOCK)
    if tl.program_id(0) == 0:
        for lane in tl.static_range(TOP):
            tl.store(indices + lane, chosen[lane])
            tl.store(weights + lane, given[lane])
    t = normalised(load_tokens(x, C, 1, 1, OUT, BLOCK), g, eps, C, BLOCK)
    # The loads of all lanes are under way while the shared expert's products are formed.
    if TOP <= 2:
        gates = ()
        ups = ()
        for lane in tl.static_range(TOP):
            base = tl.cast(chosen[lane], tl.int64) * F * C + offset
            gates += (load_weight(w1 + base, rows, n_rows, C, BLOCK),)  # type: ignore[assignment]  # it grows
            ups += (load_weight(w3 + base, rows, n_rows, C, BLOCK),)  # type: ignore[assignment]  # it grows
    if SHARED:
        store_gated(hidden, shared_gate, shared_up, t, TOP, first, F, C, 1, 1, OUT, BLOCK)
    for lane in tl.static_range(TOP):
        if TOP <= 2:
            store_gated(hidden, gates[lane], ups[lane], t, lane, first, F, C, 1, 1, OUT, BLOCK)
        else:
            base = tl.cast(chosen[lane], tl.int64) * F * C + offset
            gate = load_weight(w1 + base, rows, n_rows, C, BLOCK)
            up = load_weight(w3 + base, rows, n_rows, C, BLOCK)
            store_gated(hidden, gate, up, t, lane, first, F, C, 1, 1, OUT, BLOCK)


def launch_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None,
    residual: Tensor | None,
    up_rows: int = 2,
    down_rows: int = 2,
    warps: int = 2,
    overlap: bool = False,
) -> Tensor:
    """(N, C) in x's dtype; all tensors contiguous."""
    (N, C), (E, F), k = x.shape, w1.shape[:2], indices.shape[1]
    lanes = lane_constants(N, E, k)
    hidden = x.new_empty((lanes["LANES"] + (shared is not None), N, F))
    shared_w1, shared_w3, _ = shared or (w1, w3, w2)
    with torch.cuda.device_of(x):
        up_kernel[(hidden.shape[0] * triton.cdiv(F, up_rows),)](
            *(x, indices, w1, w3, shared_w1, shared_w3, hidden, F),
            **block_sizes(N, C),
            OUT=up_rows,
            **lanes,
            num_warps=warps,
            **overlap_options(x.device, overlap),
        )
    return launch_down(hidden, indices, weights, w2, shared, residual, down_rows, warps, overlap)


def launch_moe(
    x: Tensor,
    gamma: Tensor,
    router: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None,
    k: int,
    eps: float,
    weight_sum_min: float,
    up_rows: int = 4,
    down_rows: int = 2,
    up_warps: int = 4,
    down_warps: int = 2,
    overlap: bool = False,
) -> Tensor:
    """x + MoE(norm(x)) of one token (1, C): the router inside the kernel of the first two matrices."""
    C, (E, F) = x.shape[1], w1.shape[:2]
    hidden = x.new_empty((k + (shared is not None), 1, F))
    indices = torch.empty((1, k), dtype=torch.int32, device=x.device)
    weights = torch.empty((1, k), dtype=torch.float32, device=x.device)
    shared_w1, shared_w3, _ = shared or (w1, w3, w2)
    with torch.cuda.device_of(x):
        routed_up_kernel[(triton.cdiv(F, up_rows),)](
            *(x, gamma, router, w1, w3, shared_w1, shared_w3, hidden, indices, weights),
            *(eps, weight_sum_min, F),
            C=C,
            E=E,
            TOP=k,
            EXPERTS=triton.next_power_of_2(E),
            OUT=up_rows,
            BLOCK=block_sizes(1, C)["BLOCK"],
            SHARED=shared is not None,
            num_warps=up_warps,
            **overlap_options(x.device, overlap),
        )
    return launch_down(hidden, indices, weights, w2, shared, x, down_rows, down_warps, overlap)
