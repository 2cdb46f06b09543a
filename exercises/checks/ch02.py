"""Checks of chapter 2: how a GPU spends its time.

Letters: R rows, C width that is summed over, F columns, T and N rows and columns of an output tile, b bytes an element.
"""

from collections import OrderedDict
from math import ceil, floor

import torch
from torch import Tensor

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "02_gpu"


# 1. Bytes of a tiled product -----------------------------------------------------------------------------------------


def _tiled_bytes(R: int, C: int, F: int, T: int, N: int, b: int) -> tuple[int, int]:
    loads = b * C * (R * ceil(F / N) + F * ceil(R / T))
    return loads, b * R * F


def _tiled_bytes_by_walking(R: int, C: int, F: int, T: int, N: int, b: int) -> tuple[int, int]:
    loaded = stored = 0
    for top in range(0, R, T):
        for left in range(0, F, N):
            rows, columns = min(T, R - top), min(N, F - left)
            loaded += (rows + columns) * C
            stored += rows * columns
    return loaded * b, stored * b


def _padded_bytes(R: int, C: int, F: int, T: int, N: int, b: int) -> tuple[int, int]:
    tiles = ceil(R / T) * ceil(F / N)
    return tiles * b * C * (T + N), tiles * b * T * N


check_tiled_bytes = Exercise(
    function="tiled_bytes",
    title="The bytes of a tiled product",
    dots=1,
    minutes=10,
    reference=_tiled_bytes,
    trials=(
        Trial("64 × 96 × 128 in tiles of 16 × 32", lambda: (64, 96, 128, 16, 32, 2)),
        Trial("ragged edges: 70 rows, 100 columns", lambda: (70, 96, 100, 16, 32, 2)),
        Trial("tiles of one element", lambda: (5, 7, 3, 1, 1, 4)),
        Trial("a tile larger than the output", lambda: (5, 768, 9, 64, 64, 2)),
        Trial("one expert of the production model", lambda: (8192, 768, 1536, 16, 32, 2)),
    ),
    mistakes=(
        Mistake(
            "sides swapped",
            "each row strip is read once for every tile beside it, so the rows' count goes with the number of column "
            "tiles, and the other way round.",
            lambda R, C, F, T, N, b: (b * C * (R * ceil(R / T) + F * ceil(F / N)), b * R * F),
        ),
        Mistake(
            "edges padded",
            "full tiles are counted at the edges. Masked lanes move nothing.",
            _padded_bytes,
        ),
        Mistake(
            "edges dropped",
            "R / T was rounded down. The last, incomplete tile needs its operands too.",
            lambda R, C, F, T, N, b: (b * C * (R * (F // N) + F * (R // T)), b * R * F),
        ),
        Mistake(
            "not rounded",
            "the number of tiles is a whole number: three and a bit columns of tiles are four.",
            lambda R, C, F, T, N, b: (b * C * (R * F / N + F * R / T), b * R * F),
        ),
        Mistake(
            "elements",
            "these are elements. Bytes are asked for: multiply by b.",
            lambda R, C, F, T, N, b: _tiled_bytes(R, C, F, T, N, 1),
        ),
        Mistake(
            "each operand once",
            "this is the least that any program must read. A strip is read again for every tile that needs it.",
            lambda R, C, F, T, N, b: (b * C * (R + F), b * R * F),
        ),
    ),
    alternatives=(_tiled_bytes_by_walking,),
    hints=(
        "How many tiles lie beside each other in one row of tiles? Each of them reads the same rows of x.",
        "Rows of x: R·C elements, once for each of the ceil(F / N) column tiles. Now the weights.",
        "loads = b·C·(R·ceil(F/N) + F·ceil(R/T)); every output is stored once.",
    ),
)


# 2. Lines that a warp touches ----------------------------------------------------------------------------------------


def _lines(addresses: Tensor, size: int, line: int) -> int:
    touched: set[int] = set()
    for address in addresses.tolist():
        touched.update(range(address // line, (address + size - 1) // line + 1))
    return len(touched)


def _lines_vectorised(addresses: Tensor, size: int, line: int) -> int:
    every_byte = addresses[:, None] + torch.arange(size)
    return torch.div(every_byte, line, rounding_mode="floor").unique().numel()


def _spanned(addresses: Tensor, size: int, line: int) -> int:
    low, high = int(addresses.min()), int(addresses.max())
    return (high + size - 1) // line - low // line + 1


def _from_first(addresses: Tensor, size: int, line: int) -> int:
    return _lines(addresses - int(addresses.min()), size, line)


def _lanes(start: int, stride: int) -> Tensor:
    return start + stride * torch.arange(32)


check_transactions = Exercise(
    function="transactions",
    title="Count a warp's transactions",
    dots=2,
    minutes=15,
    reference=_lines,
    trials=(
        Trial("32 neighbours of 4 bytes", lambda: (_lanes(0, 4), 4, 128)),
        Trial("neighbours that start 64 bytes into a line", lambda: (_lanes(64, 4), 4, 128)),
        Trial("every 8th element of 4 bytes", lambda: (_lanes(0, 32), 4, 128)),
        Trial("a column of a matrix that is 768 wide, bf16", lambda: (_lanes(0, 1536), 2, 128)),
        Trial("elements that straddle two lines", lambda: (_lanes(124, 256), 8, 128)),
        Trial("all lanes read one address", lambda: (torch.full((32,), 4096), 4, 128)),
        Trial("lanes in reverse, sectors of 32 bytes", lambda: (_lanes(0, 4).flip(0), 4, 32)),
    ),
    mistakes=(
        Mistake(
            "one a lane",
            "each lane got a transaction of its own. Lanes that share a line share its transaction.",
            lambda addresses, size, line: len(addresses),
        ),
        Mistake(
            "first byte only",
            "the first byte of each element is counted. An element can begin in one line and end in the next.",
            lambda addresses, size, line: len({a // line for a in addresses.tolist()}),
        ),
        Mistake(
            "span",
            "lines between the lanes are counted that nobody reads.",
            _spanned,
        ),
        Mistake(
            "aligned to the first lane",
            "lines start at multiples of their length, wherever the first lane reads.",
            _from_first,
        ),
        Mistake(
            "bytes over line",
            "the bytes asked for were divided by the line. It matters where they lie.",
            lambda addresses, size, line: ceil(len(addresses) * size / line),
        ),
    ),
    alternatives=(_lines_vectorised,),
    hints=(
        "In which line does the byte with address a lie?",
        "a // line. Collect these numbers in a set, for the first and the last byte of each lane's element.",
        "Elements are shorter than a line, so first and last byte suffice: a // line and (a + size − 1) // line.",
    ),
)


# 3. Occupancy --------------------------------------------------------------------------------------------------------


def _occupancy(
    warps: int,
    registers: int,
    shared: int,
    *,
    step: int = 8,
    reserved: int = 1024,
    kibibytes: int = 228,
    slots: float = 32,
    by_registers: bool = True,
    by_shared: bool = True,
    whole: bool = True,
) -> float:
    rounded = ceil(registers / step) * step
    limits = [64 / warps, slots]
    if by_registers:
        limits.append(65536 / (rounded * 32 * warps))
    if by_shared:
        limits.append(kibibytes * 1024 / max(shared + reserved, 1))
    blocks = floor(min(limits)) if whole else min(limits)
    return blocks * warps / 64


def _occupancy_by_trying(warps: int, registers: int, shared: int) -> float:
    each = -(-registers // 8) * 256
    programs = 0
    while (
        programs < 32
        and (programs + 1) * warps <= 64
        and (programs + 1) * warps * each <= 65536
        and (programs + 1) * (shared + 1024) <= 228 * 1024
    ):
        programs += 1
    return programs * warps / 64


check_occupancy = Exercise(
    function="occupancy",
    title="Occupancy",
    dots=2,
    minutes=15,
    reference=lambda warps, registers, shared: _occupancy(warps, registers, shared),
    trials=(
        Trial("4 warps, 64 registers, 5 KiB", lambda: (4, 64, 5120)),
        Trial("8 warps, 40 registers, 56 KiB: four fit exactly", lambda: (8, 40, 57344)),
        Trial("4 warps, 97 registers, no shared memory", lambda: (4, 97, 0)),
        Trial("one warp a program, few registers", lambda: (1, 32, 0)),
        Trial("4 warps, 32 registers, 56.5 KiB", lambda: (4, 32, 57856)),
        Trial("12 warps, 32 registers", lambda: (12, 32, 1024)),
    ),
    mistakes=(
        Mistake(
            "registers ignored",
            "registers do not bind here. 32 lanes a warp share 65,536 of them.",
            lambda w, r, s: _occupancy(w, r, s, by_registers=False),
        ),
        Mistake(
            "shared memory ignored",
            "shared memory does not bind here. All programs of a multiprocessor share 228 KiB.",
            lambda w, r, s: _occupancy(w, r, s, by_shared=False),
        ),
        Mistake(
            "registers not rounded",
            "a lane's registers are handed out in eights: 97 asked for are 104 taken.",
            lambda w, r, s: _occupancy(w, r, s, step=1),
        ),
        Mistake(
            "reserve forgotten",
            "each program also costs 1 KiB of shared memory that the system keeps.",
            lambda w, r, s: _occupancy(w, r, s, reserved=0),
        ),
        Mistake(
            "reserve taken twice",
            "the multiprocessor has 228 KiB; 227 is the most that one program may ask for.",
            lambda w, r, s: _occupancy(w, r, s, kibibytes=227),
        ),
        Mistake(
            "no limit on programs",
            "at most 32 programs are resident, however small they are.",
            lambda w, r, s: _occupancy(w, r, s, slots=1000),
        ),
        Mistake(
            "parts of programs",
            "a program is resident as a whole or not at all: round down before you count its warps.",
            lambda w, r, s: _occupancy(w, r, s, whole=False),
        ),
    ),
    alternatives=(_occupancy_by_trying,),
    hints=(
        "Four stores limit how many whole programs fit. The scarcest decides.",
        "Registers of one program: warps · 32 · (registers rounded up to a multiple of 8).",
        "programs = min(64 // warps, 32, 65536 // …, 233472 // (shared + 1024)); then programs · warps / 64.",
    ),
)


# 4. Intensity of the dual product ------------------------------------------------------------------------------------


def _dual(
    T: int, N: int, C: int, b: int, *, flops: int = 4, x: int = 1, w: int = 2, out: int = 1
) -> tuple[float, float]:
    work = flops * T * N * C
    loads = b * C * (x * T + w * N)
    return work / loads, work / (loads + b * out * T * N)


check_dual_intensity = Exercise(
    function="dual_intensity",
    title="Intensity of the dual product",
    dots=2,
    minutes=15,
    reference=lambda T, N, C, b: _dual(T, N, C, b),
    trials=(
        Trial("the documents' tile", lambda: (16, 32, 768, 2)),
        Trial("64 × 64", lambda: (64, 64, 768, 2)),
        Trial("32 × 16: the sides exchanged", lambda: (32, 16, 768, 2)),
        Trial("tiles of one element, fp32", lambda: (1, 1, 768, 4)),
        Trial("a short sum, where stores count", lambda: (128, 128, 16, 2)),
    ),
    mistakes=(
        Mistake(
            "one product's work",
            "the FLOPs of one product are counted, and the weights of two are loaded.",
            lambda T, N, C, b: _dual(T, N, C, b, flops=2),
        ),
        Mistake(
            "x loaded twice",
            "x is loaded once for each matrix. The point of the dual product is that both share the tile.",
            lambda T, N, C, b: _dual(T, N, C, b, x=2),
        ),
        Mistake(
            "plain",
            "one weight matrix is loaded; W1 and W3 are two.",
            lambda T, N, C, b: _dual(T, N, C, b, w=1),
        ),
        Mistake(
            "sides exchanged",
            "the 2 stands at the wrong side: rows of x have T, rows of W1 and W3 have N.",
            lambda T, N, C, b: _dual(T, N, C, b, x=2, w=1),
        ),
        Mistake(
            "two outputs stored",
            "both products are stored. The kernel multiplies them first and stores one number a place.",
            lambda T, N, C, b: _dual(T, N, C, b, out=2),
        ),
        Mistake(
            "stores left out twice",
            "the second number must count the stores as well.",
            lambda T, N, C, b: (_dual(T, N, C, b)[0],) * 2,
        ),
    ),
    alternatives=(
        lambda T, N, C, b: (
            4 / (b * (2 / T + 1 / N)),
            4 / (b * (2 / T + 1 / N + 1 / C)),
        ),
    ),
    hints=(
        "For one tile of outputs: which strips are read, how often, and how many FLOPs do they feed?",
        "FLOPs 4TNC; loads b·C·(T + 2N); stores b·T·N.",
        "Divide. With stores, 1/C joins 2/T and 1/N in the bracket.",
    ),
)


# 5. Find the bug: a byte counter -------------------------------------------------------------------------------------


def _lru_bytes(tiles: list[str], slots: int, tile_bytes: int) -> int:
    held: OrderedDict[str, None] = OrderedDict()
    moved = 0
    for tile in tiles:
        if tile not in held:
            moved += tile_bytes
        held[tile] = None
        held.move_to_end(tile)
        while len(held) > slots:
            held.popitem(last=False)
    return moved


def _lru_by_distance(tiles: list[str], slots: int, tile_bytes: int) -> int:
    """Right, in other words: a tile hits when fewer than `slots` others were used since its last use."""
    misses = 0
    for now, tile in enumerate(tiles):
        before = [i for i in range(now) if tiles[i] == tile]
        near = bool(before) and len(set(tiles[before[-1] + 1 : now])) < slots
        misses += not near
    return misses * tile_bytes


def _first_in_first_out(tiles: list[str], slots: int, tile_bytes: int) -> int:
    held: list[str] = []
    moved = 0
    for tile in tiles:
        if tile not in held:
            moved += tile_bytes
            held.append(tile)
            if len(held) > slots:
                held.pop(0)
    return moved


def _last_out(tiles: list[str], slots: int, tile_bytes: int) -> int:
    held: list[str] = []
    moved = 0
    for tile in tiles:
        if tile in held:
            held.remove(tile)
        else:
            moved += tile_bytes
            if len(held) >= slots and held:
                held.pop()
        held.append(tile)
    return moved


def _walk(row_tiles: int, column_tiles: int) -> list[str]:
    return [t for i in range(row_tiles) for j in range(column_tiles) for t in (f"x{i}", f"w{j}")]


check_bytes_from_memory = Exercise(
    function="bytes_from_memory",
    title="Find the bug",
    dots=2,
    minutes=15,
    reference=lambda tiles, slots, tile_bytes: _lru_bytes(tiles, slots, tile_bytes),
    trials=(
        Trial("3 × 5 programs, 4 slots", lambda: (_walk(3, 5), 4, 1024)),
        Trial("everything fits", lambda: (_walk(3, 5), 20, 1024)),
        Trial("one slot", lambda: (["a", "a", "b", "a"], 1, 100)),
        Trial("a tile that is used again and again", lambda: (list("abacadaeaf"), 2, 10)),
        Trial("4 × 6 programs, 7 slots", lambda: (_walk(4, 6), 7, 2048)),
        Trial("no programs", lambda: ([], 3, 8)),
    ),
    mistakes=(
        Mistake(
            "first in, first out",
            "the tile that came first is thrown out, even if it was used a moment ago. A use must be remembered too.",
            _first_in_first_out,
        ),
        Mistake(
            "newest thrown out",
            "the tile that was used last is thrown out; it is the most likely to be asked for again.",
            _last_out,
        ),
        Mistake(
            "one slot too many",
            "one tile more is held than there are slots.",
            lambda tiles, slots, tile_bytes: _lru_bytes(tiles, slots + 1, tile_bytes),
        ),
        Mistake(
            "one slot too few",
            "one slot stays empty.",
            lambda tiles, slots, tile_bytes: _lru_bytes(tiles, slots - 1, tile_bytes),
        ),
        Mistake(
            "hits counted",
            "every load is charged. A tile that the cache holds costs nothing.",
            lambda tiles, slots, tile_bytes: len(tiles) * tile_bytes,
        ),
        Mistake(
            "each tile once",
            "each tile is charged once, whatever the cache holds. What was thrown out must be fetched again.",
            lambda tiles, slots, tile_bytes: len(set(tiles)) * tile_bytes,
        ),
    ),
    alternatives=(_lru_by_distance,),
    hints=(
        "Follow the list by hand for a, b, a, c, a with two slots. Which tile should c push out?",
        "What happens to the order of `held` when a tile is found in it?",
        "On a hit, take the tile out of the list and append it again.",
    ),
)
