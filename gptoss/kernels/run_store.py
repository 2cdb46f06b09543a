"""How a finished tile leaves for memory: stored by the threads, or by the copy engine.

A tile's last rows may belong to the next expert and must not be written. Threads mask them; the engine knows only the extents
of a tensor. So the rows are described as an axis of 2^30 of them, and the tile is placed such that its run ends with that axis.
Two more axes bring the address back: with a row's stride s, the tile whose run ends before row e is stored at

    2^30 · (2^34 − s) + e · s + (2^30 − (e − first)) · s = 2^64 + first · s,

and an address has 64 bits. (The scheme of ``triton.tools.ragged_tma``, whose own store the interpreter cannot run.)

Shapes: M rows of a tile, N columns of a tile, R routed rows, F width, S sides (1, or 2: gate and up next to each other).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

FAR = tl.constexpr(1 << 30)
ENDLESS = 0x7FFF0000  # an extent that no index reaches


def store_target(
    out: Tensor, sides: int, block: list[int], engine: bool
) -> Tensor | TensorDescriptor:
    """What ``store_tile`` writes (R, S·F) rows through: their descriptor for blocks of (M, N), or the tensor itself.

    Every descriptor has the axis of sides, so that all tiles pass through the same shared memory.
    """
    if not engine:
        return out
    runs = out.unflatten(1, (sides, -1)).transpose(
        0, 1
    )  # (S, R, F), the same memory: F ends each side
    shape = [ENDLESS, ENDLESS, sides, FAR.value, runs.shape[2]]
    strides = [2**34 - runs.stride(1), runs.stride(1), *runs.stride()]
    return TensorDescriptor(out, shape, strides, [1, 1, 1, *block])


@triton.jit
def store_tile(
    out, value, rows, columns, mask, first_row, end, first_column, width,
    SIDE: tl.constexpr, SIDES: tl.constexpr, ENGINE: tl.constexpr,
):  # fmt: skip
    """Write an (M, N) tile to one side of the rows that lie before ``end``, and there to the columns before ``width``."""
    if ENGINE:
        value = value.to(out.dtype).reshape(1, 1, 1, value.shape[0], value.shape[1])
        out.store([FAR, end, SIDE, first_row - end + FAR, first_column], value)
    else:
        at = out + rows.to(tl.int64)[:, None] * (SIDES * width) + columns[None, :]
        if SIDE > 0:
            at += SIDE * width
        tl.store(at, value.to(out.dtype.element_ty), mask=mask)
