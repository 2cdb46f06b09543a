"""The experts of a few tokens: which ones, and each selected weight read once.

    route    normalise each token, score the experts, keep the k best, renormalise       one program a token
    up       h = silu(W1 x) ∘ W3 x for every selected expert                            OUT rows of F a program
    down     out = residual + Σ_e weight_e · W2[e] h_e                                  OUT rows of C a program

Of a single token, route and up are one kernel: every program of up makes the choice itself.

Up and down have one lane for each *distinct* selected expert: N tokens with k experts each select at most min(E, N·k),
and an expert that several tokens share is read for all of them at once. The shared expert, if there is one, is one lane
more with weight 1; its weights depend on no router, so they are asked for before the kernel in front has ended.

Shapes: N tokens (1 to 8), C model width, F ffn width, E experts, k experts a token, P lanes of routed experts.
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


@triton.jit
def expert_of_lane(
    indices, lane, N: tl.constexpr,
    SLOTS: tl.constexpr, N_SLOTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The lane-th distinct expert among the selected ones, or E when there are fewer; of one token, its lane-th expert."""
    if N == 1:
        expert = tl.load(indices + lane).to(tl.int32)
    else:
        slots, experts = tl.arange(0, SLOTS), tl.arange(0, EXPERTS)
        chosen = tl.load(indices + slots, mask=slots < N_SLOTS, other=-1)
        selected = tl.max((chosen[None, :] == experts[:, None]).to(tl.int32), 1)  # (E,)
        before = tl.cumsum(selected, 0) - selected
        expert = tl.min(tl.where((selected == 1) & (before == lane), experts, E), 0)
    return expert


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


@triton.jit
def lane_output(
    hidden, indices, weights, w2, expert, lane, first, OUTPUTS,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    TOP: tl.constexpr, PLACES: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """What a lane's expert adds to (OUT, TOKENS). A lane without expert reads no weight and adds 0: no branch to wait for."""
    rows, tokens, places = tl.arange(0, OUT), tl.arange(0, TOKENS), tl.arange(0, PLACES)
    if N == 1:
        share = tl.load(weights + lane).to(tl.float32)
    else:  # the weight that each token gives this expert: 0 where it did not choose it
        slot = tokens[:, None] * TOP + places[None, :]
        mine = (places < TOP)[None, :] & (tokens < N)[:, None]
        chosen = tl.load(indices + slot, mask=mine, other=-1) == expert
        given = tl.load(weights + slot, mask=mine & chosen, other=0.0).to(tl.float32)
        share = tl.sum(given, 1)[None, :]
    w = load_weight(
        w2 + (tl.cast(expert, tl.int64) * OUTPUTS + first) * C,
        rows, tl.where(expert < E, OUTPUTS - first, 0), C, BLOCK,
    )  # fmt: skip
    part = products(w, load_tokens(hidden + lane * N * C, C, N, TOKENS, OUT, BLOCK), C, BLOCK)
    return tl.where(expert < E, part, 0.0) * share


@triton.jit
def down_kernel(
    hidden, indices, weights, w2, shared_w2, residual, out, OUTPUTS,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    SLOTS: tl.constexpr, N_SLOTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out (N, OUTPUTS). Here C is the width that is summed over, the experts' F, and OUTPUTS the model's width."""
    let_next_start(PDL)
    first = tl.program_id(0) * OUT
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    n_rows = OUTPUTS - first
    if SHARED:
        shared = load_weight(shared_w2 + tl.cast(first, tl.int64) * C, rows, n_rows, C, BLOCK)
    after_previous(PDL)
    place = tokens[None, :] * OUTPUTS + first + rows[:, None]
    real = (rows < n_rows)[:, None] & (tokens < N)[None, :]
    if HAS_RESIDUAL:
        before = tl.load(residual + place, mask=real, other=0.0)
    y = tl.zeros((OUT, TOKENS), tl.float32)
    if LANES <= 2:  # unrolled: the loads of all lanes are under way together
        experts = ()
        for lane in tl.static_range(LANES):
            experts += (expert_of_lane(indices, lane, N, SLOTS, N_SLOTS, E, EXPERTS),)  # type: ignore[assignment]  # it grows
        for lane in tl.static_range(LANES):
            y += lane_output(
                hidden, indices, weights, w2, experts[lane], lane, first, OUTPUTS,
                C, N, TOKENS, OUT, BLOCK, TOP, PLACES, E,
            )  # fmt: skip
    else:
        for lane in range(0, LANES):
            expert = expert_of_lane(indices, lane, N, SLOTS, N_SLOTS, E, EXPERTS)
            y += lane_output(
                hidden, indices, weights, w2, expert, lane, first, OUTPUTS,
                C, N, TOKENS, OUT, BLOCK, TOP, PLACES, E,
            )  # fmt: skip
    if SHARED:
        t = load_tokens(hidden + LANES * N * C, C, N, TOKENS, OUT, BLOCK)
        y += products(shared, t, C, BLOCK)
    y = y.to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        y += before
    tl.store(out + place, y, mask=real)


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
    lanes = _lane_constants(N, E, k)
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
    return _launch_down(hidden, indices, weights, w2, shared, residual, down_rows, warps, overlap)


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
    return _launch_down(hidden, indices, weights, w2, shared, x, down_rows, down_warps, overlap)


def _launch_down(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    w2: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None,
    residual: Tensor | None,
    out_rows: int,
    warps: int,
    overlap: bool,
) -> Tensor:
    (N, k), (E, C, F) = indices.shape, w2.shape
    out = hidden.new_empty((N, C))
    with torch.cuda.device_of(hidden):
        down_kernel[(triton.cdiv(C, out_rows),)](
            *(hidden, indices, weights, w2, w2 if shared is None else shared[2], residual, out, C),
            **block_sizes(N, F),
            OUT=out_rows,
            SHARED=shared is not None,
            TOP=k,
            PLACES=triton.next_power_of_2(k),
            HAS_RESIDUAL=residual is not None,
            **_lane_constants(N, E, k),
            num_warps=warps,
            **overlap_options(hidden.device, overlap),
        )
    return out


def _lane_constants(N: int, E: int, k: int) -> dict[str, int]:
    return dict(
        LANES=k if N == 1 else min(E, N * k),
        SLOTS=triton.next_power_of_2(N * k),
        N_SLOTS=N * k,
        E=E,
        EXPERTS=triton.next_power_of_2(E),
    )
