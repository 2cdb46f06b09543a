"""Lanes: one for each *distinct* expert that some token of a step selected, so that shared weights are read once.

N tokens with k experts each select at most min(E, N·k).

Shapes: N tokens (1 to 8), E experts, k experts a token.
"""

import triton
import triton.language as tl


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


def lane_constants(N: int, E: int, k: int) -> dict[str, int]:
    """What both kernels of the experts are compiled for."""
    return dict(
        LANES=k if N == 1 else min(E, N * k),
        SLOTS=triton.next_power_of_2(N * k),
        N_SLOTS=N * k,
        E=E,
        EXPERTS=triton.next_power_of_2(E),
    )
