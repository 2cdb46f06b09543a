"""The two ends of a decoding step: from a position to the first layer's inputs, and from logits to the next token.

    begin_step      reads token tape[p] and hands out its embedding, the angles of position p, and where its keys go
    choose_token    greedy: the largest logit's id goes to tape[p + 1], and the position becomes p + 1

The position, the tape of ids and all that follows from them stay on the device, so that a captured CUDA graph of a step
replays for every token without the host. No kernel reads a number that it also writes.

Shapes: C model width, V vocabulary, A angles of a position (cosines and sines of all layer kinds), M longest sequence.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.decode_overlap import after_previous, let_next_start, overlap_options

NOT_A_TOKEN = -1  # written where the logits hold NaN
BLOCK = 1024  # logits of a program


@triton.jit
def begin_kernel(
    tape, position, embedding, table, x, angles, length, ring_slot, ring_length, window,
    C: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr, ANGLES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a row of the embedding, a row of the table, and three counters."""
    let_next_start(PDL)
    after_previous(PDL)
    at = tl.load(position)
    token = tl.maximum(tl.load(tape + at).to(tl.int64), 0)  # NOT_A_TOKEN stands for no row
    columns = tl.arange(0, WIDTH)
    row = tl.load(embedding + token * C + columns, mask=columns < C, other=0.0)
    tl.store(x + columns, row.to(x.dtype.element_ty), mask=columns < C)
    columns = tl.arange(0, ANGLES)
    row = tl.load(table + at.to(tl.int64) * A + columns, mask=columns < A, other=0.0)
    tl.store(angles + columns, row, mask=columns < A)
    tl.store(length, at + 1)
    tl.store(ring_slot, at % window)
    tl.store(ring_length, tl.minimum(at + 1, window))


@triton.jit
def best_of_block_kernel(logits, values, ids, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The largest of BLOCK logits and its id, the lowest of equal ones; id -1 where one is NaN."""
    let_next_start(PDL)
    after_previous(PDL)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    broken = row != row
    best = tl.program_id(0) * BLOCK + tl.argmax(row, 0)
    tl.store(values + tl.program_id(0), tl.max(row, 0))
    tl.store(ids + tl.program_id(0), tl.where(tl.max(broken.to(tl.int32), 0) > 0, -1, best))


@triton.jit
def choose_kernel(
    values, ids, length, tape, position, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    """The best of the blocks' best goes to tape[length], and the position becomes length."""
    let_next_start(PDL)
    after_previous(PDL)
    places = tl.arange(0, BLOCKS)
    row = tl.load(values + places, mask=places < blocks, other=float("-inf"))
    candidates = tl.load(ids + places, mask=places < blocks, other=0)
    token = tl.sum(tl.where(places == tl.argmax(row, 0), candidates, 0), 0)
    token = tl.where(tl.min(candidates, 0) < 0, -1, token)
    at = tl.load(length)
    tl.store(tape + at, token.to(tl.int64))
    tl.store(position, at)


def begin_step(
    tape: Int[Tensor, "M_plus_1"],
    position: Int[Tensor, "1"],
    embedding: Float[Tensor, "V C"],
    table: Float[Tensor, "M A"],
    x: Float[Tensor, "1 C"],
    angles: Float[Tensor, "1 A"],
    length: Int[Tensor, "1"],
    ring_slot: Int[Tensor, "1"],
    ring_length: Int[Tensor, "1"],
    window: int,
    overlap: bool = False,
) -> None:
    """Prepare the step at p = position[0], on the device.

    x = embedding[tape[p]],  angles = table[p],  length = p + 1,  ring_slot = p mod W,  ring_length = min(p + 1, W)

    Args:
        tape: ids of the sequence, int64.
        position: p, int32.
        embedding, table: contiguous rows; x takes the first in its own dtype.
        x, angles, length, ring_slot, ring_length: written; the last three are int32.
        window: W of the ring (tokens).
        overlap: let the next kernel start before this one has ended, where the GPU can.

    Source: chapter 15.
    """
    C, A = embedding.shape[1], table.shape[1]
    with torch.cuda.device_of(x):
        begin_kernel[(1,)](
            *(tape, position, embedding, table, x, angles, length, ring_slot, ring_length, window),
            C=C,
            WIDTH=triton.next_power_of_2(C),
            A=A,
            ANGLES=triton.next_power_of_2(A),
            num_warps=4,
            **overlap_options(x.device, overlap, first=True),
        )


def choose_token(
    logits: Float[Tensor, "1 V"],
    length: Int[Tensor, "1"],
    tape: Int[Tensor, "M_plus_1"],
    position: Int[Tensor, "1"],
    overlap: bool = False,
) -> None:
    """Greedy choice without the host: tape[length] = argmax(logits), the lowest of equal ids; position = length.

    Logits with NaN give `NOT_A_TOKEN`.

    Args:
        logits: any floating dtype, contiguous.
        length: p + 1, as `begin_step` left it.
        tape, position: written.
        overlap: start before the kernel in front has ended, where the GPU can.

    Source: chapter 15.
    """
    V = logits.shape[-1]
    blocks = triton.cdiv(V, BLOCK)
    values = torch.empty(blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(blocks, dtype=torch.int32, device=logits.device)
    options = overlap_options(logits.device, overlap)
    with torch.cuda.device_of(logits):
        best_of_block_kernel[(blocks,)](logits, values, ids, V, BLOCK=BLOCK, num_warps=4, **options)
        choose_kernel[(1,)](
            *(values, ids, length, tape, position, blocks),
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=1,
            **options,
        )
