"""Decode attention kernels: few queries against a long cache, the keys split over the whole GPU.

One query leaves one program a kv head, which would read a cache of 131,072 keys alone. So the keys are cut into `splits`
runs; a program reads its run once for all G heads of the group, and keeps for each query the state of the online softmax

    m = max_j s_j,    t = Σ_j 2^(s_j - m),    u = Σ_j 2^(s_j - m) v_j        (scores in base 2)

and a second kernel merges the runs: with M = max over the runs and the sink, out = Σ u·2^(m - M) / (Σ t·2^(m - M) + 2^(b - M)).

How many keys there are stands in device memory: one captured CUDA graph serves every length up to the cache's capacity.
Floor: 2·K·D·n·itemsize bytes a layer.

Shapes: B batch, T queries, H query heads, K kv heads, G = H/K, D head_dim, n keys in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.attention_forward import LOG2_E, NOTHING_SEEN, attend_run
from gptoss.kernels.attention_launch import check_device, describe
from gptoss.kernels.attention_tiles import head_dim_pieces, load_rows, scale_rows, zero_rows
from gptoss.kernels.decode_overlap import after_previous, let_next_start, overlap_options


@triton.jit
def decode_attention_kernel(
    q_first, q_rest, k_first, k_rest, v_first, v_rest, lengths, key_start, sink, values, maxima, totals,
    kv_heads, splits, scale,
    T: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MERGED: tl.constexpr, HAS_SINK: tl.constexpr, HAS_KEY_START: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One run of keys for the G·T rows of one kv head. MERGED (one split): `values` is the output itself."""
    let_next_start(PDL)
    after_previous(PDL)
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(0) // splits % kv_heads
    batch = tl.program_id(0) // splits // kv_heads
    length = tl.load(lengths + batch).to(tl.int32)
    first_key = 0
    if HAS_KEY_START:
        first_key = tl.maximum(tl.load(key_start + batch).to(tl.int32), 0)

    rows = tl.arange(0, ROWS)  # row g·T + t is query t of the group's head g
    positions = length - T + rows % T
    first_block = first_key // KEYS * KEYS
    per_split = tl.cdiv(tl.cdiv(tl.maximum(length - first_block, 0), splits), KEYS) * KEYS
    begin = first_block + split * per_split
    end = tl.minimum(begin + per_split, length)
    whole_from = tl.minimum(
        tl.maximum(tl.cdiv(first_key, KEYS) * KEYS, begin), tl.maximum(end, begin)
    )
    whole_to = tl.maximum(
        tl.minimum((length - T + 1) // KEYS * KEYS, end // KEYS * KEYS), whole_from
    )

    q = load_rows((q_first, q_rest), batch, kv_head, 0, ROWS, WIDTH, REST)
    k = (k_first, k_rest)
    v = (v_first, v_rest)
    m = tl.full((ROWS,), NOTHING_SEEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if MERGED and HAS_SINK:
        head = kv_head * G + rows // T
        m = tl.load(sink + head, mask=rows < G * T, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    state = (m, total, zero_rows(ROWS, WIDTH, REST))
    if HAS_KEY_START:
        state = attend_run(
            state, q, k, v, batch, kv_head, positions, begin, whole_from, 0, first_key, scale,
            WIDTH, REST, KEYS, False, True, True, PRECISION,
        )  # fmt: skip
    state = attend_run(
        state, q, k, v, batch, kv_head, positions, whole_from, whole_to, 0, first_key, scale,
        WIDTH, REST, KEYS, False, True, False, PRECISION,
    )  # fmt: skip
    m, total, sums = attend_run(
        state, q, k, v, batch, kv_head, positions, whole_to, end, 0, first_key, scale,
        WIDTH, REST, KEYS, False, True, True, PRECISION,
    )  # fmt: skip

    per_row = tl.cast(tl.program_id(0), tl.int64) * (G * T) + rows
    real = rows < G * T
    if MERGED:
        sums = scale_rows(sums, tl.where(total == 0.0, 0.0, 1.0 / total)[:, None])
    else:
        tl.store(maxima + per_row, m, mask=real)
        tl.store(totals + per_row, total, mask=real)
    columns = tl.arange(0, WIDTH)
    dtype = values.dtype.element_ty
    place = values + per_row[:, None] * D
    tl.store(
        place + columns[None, :], sums[0].to(dtype), mask=real[:, None] & (columns < D)[None, :]
    )
    if REST > 0:
        columns = WIDTH + tl.arange(0, REST)
        tl.store(
            place + columns[None, :], sums[1].to(dtype), mask=real[:, None] & (columns < D)[None, :]
        )


@triton.jit
def merge_splits_kernel(
    values, maxima, totals, sink, out, splits, rows_per_group,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_SINK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (B, H, T, D): one row and COLUMNS of its D values a program."""
    let_next_start(PDL)
    after_previous(PDL)
    row = tl.program_id(0)  # (b·H + h)·T + t
    group = row // rows_per_group  # b·K + kv head
    split = tl.arange(0, SPLITS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    per_split = (tl.cast(group, tl.int64) * splits + split) * rows_per_group + row % rows_per_group
    real = split < splits
    m = tl.load(maxima + per_split, mask=real, other=NOTHING_SEEN)
    top = tl.max(m, 0)
    if HAS_SINK:
        b = tl.load(sink + row // T % H).to(tl.float32) * LOG2_E
        top = tl.maximum(top, b)
    weight = tl.exp2(m - top)
    total = tl.sum(weight * tl.load(totals + per_split, mask=real, other=0.0), 0)
    if HAS_SINK:
        total += tl.exp2(b - top)
    inside = real[:, None] & (columns < D)[None, :]
    tile = tl.load(values + per_split[:, None] * D + columns[None, :], mask=inside, other=0.0)
    merged = tl.sum(weight[:, None] * tile, 0) * tl.where(total == 0.0, 0.0, 1.0 / total)
    place = out + tl.cast(row, tl.int64) * D + columns
    tl.store(place, merged.to(out.dtype.element_ty), mask=columns < D)


def choose_splits(batch: int, kv_heads: int, capacity: int, device: torch.device) -> int:
    """How many runs the keys are cut into: two programs a multiprocessor, but no run shorter than 128 keys."""
    if device.type != "cuda":
        return min(3, triton.cdiv(capacity, 16))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // (batch * kv_heads), capacity // 128))


def launch_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    scale: float,
    splits: int,
    keys: int = 64,
    warps: int = 4,
    stages: int = 3,
    overlap: bool = False,
) -> Tensor:
    """(B, H, T, D); `lengths` and `key_start` are (B,)."""
    check_device(decode_attention_kernel, q)
    (B, H, T, D), K = q.shape, k.shape[1]
    group, width_rest = H // K, head_dim_pieces(D)
    # Heads of one group lie side by side, so their queries are the rows of one matrix.
    rows = q.contiguous().view(B, K, group * T, D)
    out = torch.empty((B, H, T, D), dtype=q.dtype, device=q.device)
    merged = splits == 1
    values = out if merged else out.new_empty((B, K, splits, group * T, D), dtype=torch.float32)
    maxima, totals = values.new_empty((2, B, K, splits, group * T), dtype=torch.float32)
    n_rows = max(16, triton.next_power_of_2(group * T))
    if k.device.type != "cuda":
        keys = 16
    options = overlap_options(q.device, overlap)
    with torch.cuda.device_of(q):
        decode_attention_kernel[(B * K * splits,)](
            *describe(n_rows, rows),
            *describe(keys, k, v),
            *(lengths, key_start, sink, values, maxima, totals),
            *(K, splits, scale * LOG2_E.value),
            T=T,
            G=group,
            D=D,
            WIDTH=width_rest[0],
            REST=width_rest[1],
            ROWS=n_rows,
            KEYS=keys,
            MERGED=merged,
            HAS_SINK=sink is not None,
            HAS_KEY_START=key_start is not None,
            PRECISION="ieee",
            num_warps=warps,
            num_stages=stages,
            **options,
        )
        if not merged:
            columns = 32
            merge_splits_kernel[(B * H * T, triton.cdiv(D, columns))](
                *(values, maxima, totals, sink, out, splits, group * T),
                T=T,
                H=H,
                D=D,
                SPLITS=triton.next_power_of_2(splits),
                COLUMNS=columns,
                HAS_SINK=sink is not None,
                num_warps=4,
                **options,
            )
    return out
