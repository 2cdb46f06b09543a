"""Which expert and which rows each tile works on, decided on the device without asking the host.

Rows are sorted by expert, so an expert's run starts and ends anywhere. Each run is cut into tiles of ``tile_rows`` rows; the
last tile of a run is partly empty. The host knows only R and E, which bounds the number of tiles by floor(R / tile_rows) + E;
how many are in use, and whose they are, is written by one small program from the counts.

Shapes: R routed rows sorted by expert, E experts, M tiles (the bound above).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class TileTable:
    """The walk over row tiles: tile i belongs to ``expert[i]`` and covers rows ``row[i]`` to ``end[i]``, ``end[i]`` its run's end.

    Entries from ``used[0]`` on are not written. ``heavy_first`` lists the experts by falling row count, ties by number;
    ``start`` holds each expert's first row.
    """

    expert: Int[Tensor, "M"]
    row: Int[Tensor, "M"]
    end: Int[Tensor, "M"]
    used: Int[Tensor, "1"]
    start: Int[Tensor, "E"]
    heavy_first: Int[Tensor, "E"]
    tile_rows: int

    @property
    def bound(self) -> int:
        """Upper bound on the tiles in use, known without asking the device."""
        return self.expert.shape[0]


def tile_table(counts: Int[Tensor, "E"], n_rows: int, tile_rows: int) -> TileTable:
    """Cut every expert's run of rows into tiles, on the device that holds the counts.

        tiles of expert e = ceil(counts[e] / tile_rows)

    Args:
        counts: (E,) integer, rows per expert.
        n_rows: R, their sum; only its upper bound on the tiles is used.
        tile_rows: rows per tile.

    Returns:
        The table, int32, on the same device. Nothing waits for the device.

    Source: the block-sparse view of Gale et al. 2022, "MegaBlocks", section 5; chapter 10, version 3.
    """
    n_experts = counts.shape[0]
    bound = n_rows // tile_rows + n_experts
    # One allocation; each part starts on 16 bytes, so that no kernel is compiled twice for its pointers' alignment.
    sizes = (bound, bound, bound, 1, n_experts, n_experts)
    padded = [-(-size // 4) * 4 for size in sizes]
    ints = torch.empty(sum(padded), dtype=torch.int32, device=counts.device)
    parts = [part[:size] for part, size in zip(ints.split(padded), sizes, strict=True)]
    expert, row, end, used, start, heavy = parts
    block = 128
    _tile_table_kernel[(triton.cdiv(bound, block),)](
        counts, expert, row, end, used, start, heavy, n_experts, bound, tile_rows,
        E=triton.next_power_of_2(n_experts), BLOCK=block,
    )  # fmt: skip  # pointers, then sizes, then compile-time constants
    return TileTable(expert, row, end, used, start, heavy, tile_rows)


@triton.jit(do_not_specialize=["n_experts", "bound", "tile_rows"])
def _tile_table_kernel(
    counts, expert, row, end, used, start, heavy, n_experts, bound, tile_rows,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, E)
    n = tl.load(counts + e, mask=e < n_experts, other=0).to(tl.int32)  # (E,) rows
    last_row = tl.cumsum(n, 0)  # (E,) one past each run
    tiles = (n + tile_rows - 1) // tile_rows
    last_tile = tl.cumsum(tiles, 0)  # (E,) one past each run's tiles
    total = tl.sum(tiles, 0)

    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,) tile numbers
    # The owner of tile i is the number of runs that end at or before it; idle experts end where they begin.
    owner = tl.sum((last_tile[None, :] <= i[:, None]).to(tl.int32), 1)
    mine = owner[:, None] == e[None, :]  # (BLOCK, E) one-hot, all zero past the last tile
    first_tile = tl.sum(tl.where(mine, (last_tile - tiles)[None, :], 0), 1)
    first_row = tl.sum(tl.where(mine, (last_row - n)[None, :], 0), 1)
    in_use = (i < bound) & (i < total)
    tl.store(expert + i, owner, mask=in_use)
    tl.store(row + i, first_row + (i - first_tile) * tile_rows, mask=in_use)
    tl.store(end + i, tl.sum(tl.where(mine, last_row[None, :], 0), 1), mask=in_use)

    if tl.program_id(0) == 0:
        tl.store(used, total)
        tl.store(start + e, last_row - n, mask=e < n_experts)
        # Padding experts count as -1 row, so they rank last.
        m = tl.where(e < n_experts, n, -1)
        before = (m[None, :] > m[:, None]) | (
            (m[None, :] == m[:, None]) & (e[None, :] < e[:, None])
        )
        rank = tl.sum(before.to(tl.int32), 1)  # (E,) how many experts come before e
        tl.store(heavy + rank, e, mask=e < n_experts)


@triton.jit
def grouped_order(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Walk (row tile, column tile) pairs in groups of GROUP row tiles, so that programs at work together share weights in L2."""
    group = tile // (GROUP * column_tiles)
    first = group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return first + within % size, within // size
