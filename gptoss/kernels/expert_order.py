"""Group token slots by expert: a stable counting sort in two launches, without a wait for the device.

Slot s = token·k + choice. The sorted position of a slot is the start of its expert's run, plus the slots of that expert in
earlier blocks, plus those before it in its own block. A general sort of 65,536 keys takes many passes; E counters need two.

Shapes: N tokens, k experts a token, R = N·k slots, E experts, B blocks of slots.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

BLOCK = 512


def order_by_expert(
    indices: Int[Tensor, "N k"], n_experts: int
) -> tuple[Int[Tensor, "R"], Int[Tensor, "R"], Int[Tensor, "E"]]:
    """Sort the slots by expert, keeping their order within an expert.

        order = argsort(indices.flatten(), stable),   inverse[order[r]] = r,   counts[e] = |{slots of e}|

    Args:
        indices: (N, k) integer experts, each in 0..E-1.
        n_experts: E.

    Returns:
        order, inverse: (R,) int32; counts: (E,) int32. Equal to ``torch.sort(..., stable=True)`` bit for bit.

    Source: Knuth, The Art of Computer Programming 3, section 5.2, "distribution counting"; chapter 10.
    """
    return _order(indices, n_experts)


@torch.library.custom_op("gptoss::order_by_expert", mutates_args=())
def _order(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = indices.reshape(-1).contiguous()
    n_slots = flat.numel()
    order = torch.empty(n_slots, dtype=torch.int32, device=flat.device)
    inverse = torch.empty_like(order)
    counts = torch.empty(n_experts, dtype=torch.int32, device=flat.device)
    blocks = triton.cdiv(n_slots, BLOCK)
    if blocks == 0:
        return order, inverse, counts.zero_()
    padded = triton.next_power_of_2(n_experts)
    histogram = torch.empty(blocks, padded, dtype=torch.int32, device=flat.device)
    with torch.cuda.device_of(flat):  # Triton launches on the current device
        _histogram_kernel[(blocks,)](flat, histogram, n_slots, E=padded, BLOCK=BLOCK)
        _place_kernel[(blocks,)](
            flat, histogram, order, inverse, counts, n_slots, n_experts, blocks,
            E=padded, BLOCK=BLOCK, CHUNK=max(16, 4096 // padded),
        )  # fmt: skip
    return order, inverse, counts


@_order.register_fake
def _(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order = indices.new_empty(indices.numel(), dtype=torch.int32)
    return order, torch.empty_like(order), indices.new_empty(n_experts, dtype=torch.int32)


@triton.jit(do_not_specialize=["n_slots"])
def _histogram_kernel(experts, histogram, n_slots, E: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + slot, mask=slot < n_slots, other=-1).to(tl.int32)
    e = tl.arange(0, E)
    hits = (expert[:, None] == e[None, :]).to(tl.int32)  # (BLOCK, E)
    tl.store(histogram + tl.program_id(0) * E + e, tl.sum(hits, 0))


@triton.jit(do_not_specialize=["n_slots", "n_experts", "blocks"])
def _place_kernel(
    experts, histogram, order, inverse, counts, n_slots, n_experts, blocks,
    E: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)
    e = tl.arange(0, E)
    before = tl.zeros((E,), dtype=tl.int32)  # slots of each expert in earlier blocks
    total = tl.zeros((E,), dtype=tl.int32)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        n = tl.load(
            histogram + block[:, None] * E + e[None, :], mask=(block < blocks)[:, None], other=0
        )
        total += tl.sum(n, 0)
        before += tl.sum(tl.where((block < me)[:, None], n, 0), 0)
    start = tl.cumsum(total, 0) - total

    slot = me * BLOCK + tl.arange(0, BLOCK)
    valid = slot < n_slots
    expert = tl.load(experts + slot, mask=valid, other=-1).to(tl.int32)
    hits = (expert[:, None] == e[None, :]).to(tl.int32)  # (BLOCK, E) one-hot
    rank = tl.cumsum(hits, 0) - hits  # slots of the same expert before this one, in this block
    place = tl.sum(hits * (rank + (start + before)[None, :]), 1)
    tl.store(order + place, slot, mask=valid)
    tl.store(inverse + slot, place, mask=valid)
    if me == 0:
        tl.store(counts + e, total, mask=e < n_experts)
