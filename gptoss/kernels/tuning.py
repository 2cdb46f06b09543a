"""Block sizes by GPU: a table, so that the first call is the same as every later one.

An autotuner would time candidates on the first call, on whatever shape comes first. Here every choice is written down, and
chapter 10 can print it. Hopper's rows are the fastest of those that ``python -m gptoss.bench.moe_sweep`` tries on one H200;
the others are chosen by the compiler's report (no spilled registers, shared memory within the limit).

Shared memory of one program: each stage holds one tile of rows and the weight tiles that meet it, so
bytes = stages · k · (m + weights · n) · itemsize, plus what the epilogue reorders.
"""

from dataclasses import dataclass

import torch

SHARED_MEMORY_KIB = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (12, 0): 99,
}
OLDEST = (7, 5)
BF16_FROM = (8, 0)
COPY_ENGINE_FROM = (9, 0)


@dataclass(frozen=True)
class Tiles:
    """Block sizes of one kernel: ``m`` rows × ``n`` columns of the result, ``k`` per reduction step.

    ``group`` row tiles are walked together; ``warps`` and ``stages`` are Triton's num_warps and num_stages; persistent kernels
    start ``per_sm`` programs on each multiprocessor; ``flatten`` lets a program fetch its next tile during an epilogue;
    ``pieces`` (1, 2 or 4) says in how many column pieces a result is stored.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    per_sm: int = 1
    flatten: bool = True
    pieces: int = 1


# Kernel names: "tuned" (version 3), "swiglu" (version 4, forward), "swiglu_backward" (derivative by recomputation),
# "down" (the product with W2, forward and backward), "input" (input gradient), "weights" (their gradients).
KERNELS = ("tuned", "swiglu", "swiglu_backward", "down", "input", "weights")
INTERPRETER = {name: Tiles(16, 128, 32, 4, 2, group=2, pieces=2) for name in KERNELS} | {
    "weights": Tiles(128, 128, 16, 4, 2)
}
HOPPER_16_BIT = {
    "tuned": Tiles(128, 128, 64, 8, 3),
    "swiglu": Tiles(128, 128, 64, 8, 4, pieces=4),
    "swiglu_backward": Tiles(128, 64, 64, 4, 3, pieces=2, per_sm=2),
    "down": Tiles(128, 256, 64, 8, 3, pieces=2),
    "input": Tiles(128, 256, 64, 8, 3, pieces=2),
    "weights": Tiles(128, 256, 64, 8, 3),
}
AMPERE_16_BIT = {
    "tuned": Tiles(128, 64, 64, 8, 3),
    "swiglu": Tiles(128, 64, 32, 8, 3, flatten=False),
    "swiglu_backward": Tiles(128, 64, 32, 8, 3, flatten=False, pieces=2),
    "down": Tiles(128, 128, 32, 8, 3, flatten=False),
    "input": Tiles(128, 128, 32, 8, 3, flatten=False),
    "weights": Tiles(128, 128, 32, 8, 3),
}
SMALL = {  # 32-bit rows, and GPUs with little shared memory
    name: Tiles(64, 32, 32, 4, 2, flatten=False) for name in KERNELS
}


def tiles_for(kernel: str, capability: tuple[int, int] | None, dtype: torch.dtype) -> Tiles:
    """Look up the block sizes of a kernel.

    Args:
        kernel: one of the names above.
        capability: the GPU's compute capability; None is Triton's interpreter on the CPU.
        dtype: of the rows.

    Raises:
        ValueError: for a GPU older than 7.5, or bfloat16 on one older than 8.0.

    Source: chapter 10.
    """
    if capability is None:
        return INTERPRETER[kernel]
    if capability < OLDEST:
        raise ValueError(
            f"the Triton kernels need compute capability 7.5 or newer, got {capability[0]}.{capability[1]}; "
            "use moe_dispatch='stacked'"
        )
    if dtype == torch.bfloat16 and capability < BF16_FROM:
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]} has no bfloat16; run in float16 or float32 "
            "or use moe_dispatch='stacked'"
        )
    if dtype.itemsize > 2 or shared_memory_limit(capability) < 160 * 1024:
        return SMALL[kernel]
    return (HOPPER_16_BIT if capability >= COPY_ENGINE_FROM else AMPERE_16_BIT)[kernel]


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one program may use; a GPU not in the table counts as the nearest older one that is."""
    known = max(c for c in SHARED_MEMORY_KIB if c <= capability)
    return SHARED_MEMORY_KIB[known] * 1024


def stage_bytes(tiles: Tiles, weights: int, itemsize: int) -> int:
    """Bytes of shared memory that the pipelined loads of one program take, with ``weights`` weight tiles a step."""
    return tiles.stages * tiles.k * (tiles.m + weights * tiles.n) * itemsize
