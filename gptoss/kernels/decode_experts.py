"""The experts of a few tokens: which ones, and each selected weight read once.

    route    normalise each token, score the experts, keep the k best, renormalise       one program a token
    up       h = silu(W1 x) ∘ W3 x for every selected expert                            OUT rows of F a program
    down     out = residual + Σ_e weight_e · W2[e] h_e                                  OUT rows of C a program

The first two grids have one lane for each *distinct* selected expert: N tokens with k experts each select at most
min(E, N·k), and an expert that several tokens share is read for all of them at once. The shared expert, if there is one,
is one lane more with weight 1.

Shapes: N tokens (1 to 8), C model width, F ffn width, E experts, k experts a token, P lanes of routed experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.decode_rows import block_sizes, inverse_rms, rows_times


@triton.jit
def route_kernel(
    x, gamma, router, normed, indices, weights, eps, weight_sum_min,
    C: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr,
    WHOLE: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """normed (N, C), indices (N, k) and weights (N, k): softmax over all experts, the k largest, renormalised."""
    token = tl.program_id(0)
    x += token * C
    factor = inverse_rms(x, eps, C, 1, 1, WHOLE)
    columns, experts = tl.arange(0, WHOLE), tl.arange(0, EXPERTS)
    inside = columns < C
    row = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
    dtype = normed.dtype.element_ty
    row = (row[None, :] * factor[:, None] * g[None, :]).to(dtype)  # (1, C)
    tl.store(normed + token * C + columns[None, :], row, mask=inside[None, :])
    w = tl.load(
        router + experts[:, None] * C + columns[None, :],
        mask=(experts < E)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    logits = tl.sum(w.to(tl.float32) * row.to(tl.float32), 1).to(dtype).to(tl.float32)  # (E,)
    logits = tl.where(experts < E, logits, float("-inf"))
    probabilities = tl.exp(logits - tl.max(logits, 0))
    probabilities /= tl.sum(probabilities, 0)
    left = tl.where(experts < E, probabilities, -1.0)
    places = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int32)
    kept = tl.zeros((PLACES,), tl.float32)
    for place in tl.static_range(TOP):
        best = tl.argmax(left, 0)  # the lowest index among equals
        chosen = tl.where(places == place, best, chosen)
        kept = tl.where(places == place, tl.max(left, 0), kept)
        left = tl.where(experts == best, -1.0, left)
    kept /= tl.maximum(tl.sum(kept, 0), weight_sum_min)
    tl.store(indices + token * TOP + places, chosen, mask=places < TOP)
    tl.store(weights + token * TOP + places, kept, mask=places < TOP)


@triton.jit
def expert_of_lane(
    indices, lane, SLOTS: tl.constexpr, N_SLOTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """The lane-th distinct expert among the selected ones, or E when there are fewer."""
    slots, experts = tl.arange(0, SLOTS), tl.arange(0, EXPERTS)
    chosen = tl.load(indices + slots, mask=slots < N_SLOTS, other=-1)
    selected = tl.max((chosen[None, :] == experts[:, None]).to(tl.int32), 1)  # (E,)
    before = tl.cumsum(selected, 0) - selected
    return tl.min(tl.where((selected == 1) & (before == lane), experts, E), 0)


@triton.jit
def up_kernel(
    x, indices, w1, w3, shared_w1, shared_w3, hidden, F,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, SLOTS: tl.constexpr, N_SLOTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """hidden (LANES [+ 1 shared], N, F): all tokens for each lane's expert; the down kernel weighs them."""
    blocks = tl.cdiv(F, OUT)
    lane = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * OUT
    gate, up = w1, w3
    if lane < LANES:
        expert = expert_of_lane(indices, lane, SLOTS, N_SLOTS, E, EXPERTS)
        base = tl.cast(expert, tl.int64) * F * C
        active = expert < E
    else:
        gate, up = shared_w1, shared_w3
        base = tl.cast(0, tl.int64)
        active = lane == LANES
    if active:
        rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
        base += tl.cast(first, tl.int64) * C
        a = rows_times(x, gate + base, rows, F - first, C, N, TOKENS, OUT, BLOCK, 1.0, x, False)
        b = rows_times(x, up + base, rows, F - first, C, N, TOKENS, OUT, BLOCK, 1.0, x, False)
        h = a * tl.sigmoid(a) * b
        place = (lane * N + tokens)[None, :] * F + first + rows[:, None]
        real = (rows < F - first)[:, None] & (tokens < N)[None, :]
        tl.store(hidden + place, h.to(hidden.dtype.element_ty), mask=real)


@triton.jit
def lane_output(
    hidden, indices, weights, w2, lane, first, OUTPUTS,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    TOP: tl.constexpr, PLACES: tl.constexpr, SLOTS: tl.constexpr, N_SLOTS: tl.constexpr,
    E: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """What a lane's expert adds to (OUT, TOKENS). A lane without expert reads no weight and adds 0: no branch to wait for."""
    rows, tokens, places = tl.arange(0, OUT), tl.arange(0, TOKENS), tl.arange(0, PLACES)
    expert = expert_of_lane(indices, lane, SLOTS, N_SLOTS, E, EXPERTS)
    # The weight that each token gives this expert: 0 where it did not choose it.
    slot = tokens[:, None] * TOP + places[None, :]
    mine = (places < TOP)[None, :] & (tokens < N)[:, None]
    chosen = tl.load(indices + slot, mask=mine, other=-1) == expert
    given = tl.load(weights + slot, mask=mine & chosen, other=0.0).to(tl.float32)
    part = rows_times(
        hidden + lane * N * C, w2 + (tl.cast(expert, tl.int64) * OUTPUTS + first) * C,
        rows, tl.where(expert < E, OUTPUTS - first, 0), C, N, TOKENS, OUT, BLOCK, 1.0, hidden, False,
    )  # fmt: skip
    return tl.where(expert < E, part, 0.0) * tl.sum(given, 1)[None, :]


@triton.jit
def down_kernel(
    hidden, indices, weights, w2, shared_w2, residual, out, OUTPUTS,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, SHARED: tl.constexpr, TOP: tl.constexpr, PLACES: tl.constexpr,
    SLOTS: tl.constexpr, N_SLOTS: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out (N, OUTPUTS). Here C is the width that is summed over, the experts' F, and OUTPUTS the model's width."""
    first = tl.program_id(0) * OUT
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    y = tl.zeros((OUT, TOKENS), tl.float32)
    if LANES <= 2:  # unrolled: the loads of all lanes are under way together
        for lane in tl.static_range(LANES):
            y += lane_output(
                hidden, indices, weights, w2, lane, first, OUTPUTS,
                C, N, TOKENS, OUT, BLOCK, TOP, PLACES, SLOTS, N_SLOTS, E, EXPERTS,
            )  # fmt: skip
    else:
        for lane in range(0, LANES):
            y += lane_output(
                hidden, indices, weights, w2, lane, first, OUTPUTS,
                C, N, TOKENS, OUT, BLOCK, TOP, PLACES, SLOTS, N_SLOTS, E, EXPERTS,
            )  # fmt: skip
    if SHARED:
        y += rows_times(
            hidden + LANES * N * C, shared_w2 + tl.cast(first, tl.int64) * C, rows, OUTPUTS - first,
            C, N, TOKENS, OUT, BLOCK, 1.0, hidden, False,
        )  # fmt: skip
    y = y.to(out.dtype.element_ty)
    place = tokens[None, :] * OUTPUTS + first + rows[:, None]
    real = (rows < OUTPUTS - first)[:, None] & (tokens < N)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + place, mask=real, other=0.0)
    tl.store(out + place, y, mask=real)


def launch_route(
    x: Tensor, gamma: Tensor, router: Tensor, k: int, eps: float, weight_sum_min: float
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
            WHOLE=triton.next_power_of_2(C),
            EXPERTS=triton.next_power_of_2(E),
            PLACES=triton.next_power_of_2(k),
            num_warps=8,
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
) -> Tensor:
    """(N, C) in x's dtype; all tensors contiguous."""
    (N, C), (E, F), k = x.shape, w1.shape[:2], indices.shape[1]
    lanes = min(E, N * k)
    lane_constants = dict(
        LANES=lanes,
        SLOTS=triton.next_power_of_2(N * k),
        N_SLOTS=N * k,
        E=E,
        EXPERTS=triton.next_power_of_2(E),
        num_warps=warps,
    )
    hidden = x.new_empty((lanes + (shared is not None), N, F))
    out = torch.empty_like(x)
    shared_w1, shared_w3, shared_w2 = shared or (w1, w3, w2)
    with torch.cuda.device_of(x):
        up_kernel[(hidden.shape[0] * triton.cdiv(F, up_rows),)](
            *(x, indices, w1, w3, shared_w1, shared_w3, hidden, F),
            **block_sizes(N, C),
            OUT=up_rows,
            **lane_constants,
        )
        down_kernel[(triton.cdiv(C, down_rows),)](
            *(hidden, indices, weights, w2, shared_w2, residual, out, C),
            **block_sizes(N, F),
            OUT=down_rows,
            SHARED=shared is not None,
            TOP=k,
            PLACES=triton.next_power_of_2(k),
            HAS_RESIDUAL=residual is not None,
            **lane_constants,
        )
    return out
