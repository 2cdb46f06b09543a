"""The second half of a decoding step's experts: out = residual + Σ_e weight_e · W2[e] h_e, OUT rows of C a program.

Shapes: N tokens (1 to 8), C model width (in the kernel: OUTPUTS), F ffn width (in the kernel: C), E experts, k experts a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.decode_lanes import expert_of_lane, lane_constants
from gptoss.kernels.decode_overlap import after_previous, let_next_start, overlap_options
from gptoss.kernels.decode_rows import block_sizes, load_tokens, load_weight, products


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


def launch_down(
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
    """(N, C) from hidden (lanes, N, F); the shared expert, if any, is the last lane."""
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
            **lane_constants(N, E, k),
            num_warps=warps,
            **overlap_options(hidden.device, overlap),
        )
    return out
