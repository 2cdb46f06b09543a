"""The backward attention kernels: one walks keys for a block of queries, one walks queries for a block of keys.

With P = exp(S - L), S the scaled scores, L the log-sum-exp that the forward kept (sink included), and dO given:

    Δ = rowsum(dO∘O)    dP = dO·Vᵀ    dS = P∘(dP - Δ)
    dQ = scale·dS·K     dK = scale·dSᵀ·Q     dV = Pᵀ·dO     db = -Σ_rows exp(b - L)·Δ

The sink's value is zero, so it touches P through L alone. Two kernels compute S and dP twice (seven matrix products
where five would do): in exchange every output has one owner, so nothing is added atomically and two runs agree bit for
bit. The owner of a block of keys walks the queries of all G heads that read it.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

import triton
import triton.language as tl

from gptoss.kernels.attention_forward import LOG2_E
from gptoss.kernels.attention_tiles import (
    add_weighted_rows,
    dot_rows,
    keep_rows,
    key_runs,
    load_rows,
    offset,
    query_runs,
    scale_rows,
    store_rows,
    sum_of_products,
    zero_rows,
)


@triton.jit
def _query_gradient_run(
    dq, q, do, lse, delta, k, v, k_stride, v_stride, positions, begin, end, S, window, first_key, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS·K over the keys [begin, end) to dq."""
    in_block = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        keys = start + in_block
        k_tile = load_rows(
            k + offset(start, k_stride), in_block, k_stride, first_key - start, S - start, D, WIDTH, REST, MASKED
        )  # fmt: skip
        v_tile = load_rows(
            v + offset(start, v_stride), in_block, v_stride, first_key - start, S - start, D, WIDTH, REST, MASKED
        )  # fmt: skip
        p = tl.exp2(dot_rows(q, k_tile, PRECISION) * scale - lse[:, None])  # (queries, keys)
        if MASKED:
            distance = positions[:, None] - keys[None, :]
            visible = (distance >= 0) & (keys >= first_key)[None, :]
            if WINDOWED:
                visible = visible & (distance < window)
            p = tl.where(visible, p, 0.0)
        ds = p * (dot_rows(do, v_tile, PRECISION) - delta[:, None])
        dq = add_weighted_rows(dq, ds, k_tile, PRECISION)
    return dq


@triton.jit
def query_gradient_kernel(
    do, q, k, v, out, lse, sink, key_start, dq, delta, dsink_parts,
    do_batch, do_head, do_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row, dq_batch, dq_head, dq_row,
    H, G, T, S, window, scale, scale_log2,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, ONE_RUN: tl.constexpr, HAS_SINK: tl.constexpr, HAS_KEY_START: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (B, H, T, D), delta (B, H, T) for the other kernel, and the sink's gradient, one part a program."""
    blocks = tl.cdiv(T, QUERIES)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest rows first
    head = tl.program_id(0) // blocks % H
    batch = tl.program_id(0) // blocks // H
    first_key = 0
    if HAS_KEY_START:
        first_key = tl.maximum(tl.load(key_start + batch).to(tl.int32), 0)

    rows = tl.arange(0, QUERIES)
    start = block * QUERIES
    position = S - T + start
    positions = position + rows
    left = T - start
    q += offset(batch, q_batch) + offset(head, q_head) + offset(start, q_row)
    do += offset(batch, do_batch) + offset(head, do_head) + offset(start, do_row)
    out += offset(batch, o_batch) + offset(head, o_head) + offset(start, o_row)
    k += offset(batch, k_batch) + offset(head // G, k_head)
    v += offset(batch, v_batch) + offset(head // G, v_head)
    q_tile = load_rows(q, rows, q_row, 0, left, D, WIDTH, REST, True)
    do_tile = load_rows(do, rows, do_row, 0, left, D, WIDTH, REST, True)

    # Rows past the end have lse = inf, so that p = 0 there.
    per_row = offset(batch * H + head, T) + start + rows
    lse_row = tl.load(lse + per_row, mask=rows < left, other=float("inf"))
    delta_row = sum_of_products(do_tile, load_rows(out, rows, o_row, 0, left, D, WIDTH, REST, True))
    tl.store(delta + per_row, delta_row, mask=rows < left)
    if HAS_SINK:
        p_sink = tl.exp2((tl.load(sink + head).to(tl.float32) - lse_row) * LOG2_E)
        tl.store(dsink_parts + tl.program_id(0), -tl.sum(p_sink * delta_row, 0))
    lse_row *= LOG2_E

    dq_tile = zero_rows(QUERIES, WIDTH, REST)
    begin, whole_from, whole_to, end = key_runs(
        position, S, window, first_key, QUERIES, KEYS, WINDOWED
    )
    if ONE_RUN:
        whole_to = begin
    else:
        if WINDOWED or HAS_KEY_START:
            dq_tile = _query_gradient_run(
                dq_tile, q_tile, do_tile, lse_row, delta_row, k, v, k_row, v_row, positions, begin, whole_from,
                S, window, first_key, scale_log2, D, WIDTH, REST, KEYS, WINDOWED, True, PRECISION,
            )  # fmt: skip
        dq_tile = _query_gradient_run(
            dq_tile, q_tile, do_tile, lse_row, delta_row, k, v, k_row, v_row, positions, whole_from, whole_to,
            S, window, first_key, scale_log2, D, WIDTH, REST, KEYS, WINDOWED, False, PRECISION,
        )  # fmt: skip
    dq_tile = _query_gradient_run(
        dq_tile, q_tile, do_tile, lse_row, delta_row, k, v, k_row, v_row, positions, whole_to, end,
        S, window, first_key, scale_log2, D, WIDTH, REST, KEYS, WINDOWED, True, PRECISION,
    )  # fmt: skip
    dq += offset(batch, dq_batch) + offset(head, dq_head) + offset(start, dq_row)
    store_rows(dq, scale_rows(dq_tile, scale), rows, dq_row, left, D, WIDTH, REST)


@triton.jit
def _key_gradient_run(
    dk, dv, k, v, q, do, lse, delta, q_head, q_stride, do_head, do_stride, keys, begin, end, G, T, shift, window, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ·Q and Pᵀ·dO over the query rows [begin, end) of the group's G heads: one loop, so one pipeline."""
    rows = tl.arange(0, QUERIES)
    blocks = tl.maximum(tl.cdiv(end - begin, QUERIES), 0)
    for step in range(0, G * blocks):
        head = step // blocks
        start = begin + step % blocks * QUERIES
        left = T - start
        q_tile = load_rows(
            q + offset(head, q_head) + offset(start, q_stride), rows, q_stride, 0, left, D, WIDTH, REST, MASKED
        )  # fmt: skip
        do_tile = load_rows(
            do + offset(head, do_head) + offset(start, do_stride), rows, do_stride, 0, left, D, WIDTH, REST, MASKED
        )  # fmt: skip
        per_row = offset(head, T) + start + rows
        if MASKED:
            lse_row = tl.load(lse + per_row, mask=rows < left, other=float("inf"))
            delta_row = tl.load(delta + per_row, mask=rows < left, other=0.0)
        else:
            lse_row = tl.load(lse + per_row)
            delta_row = tl.load(delta + per_row)
        s = dot_rows(k, q_tile, PRECISION) * scale - (lse_row * LOG2_E)[None, :]  # (keys, queries)
        if MASKED:
            distance = (shift + start + rows)[None, :] - keys[:, None]
            visible = distance >= 0
            if WINDOWED:
                visible = visible & (distance < window)
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        dv = add_weighted_rows(dv, p, do_tile, PRECISION)
        ds = p * (dot_rows(v, do_tile, PRECISION) - delta_row[None, :])
        dk = add_weighted_rows(dk, ds, q_tile, PRECISION)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    do, q, k, v, lse, delta, key_start, dk, dv,
    do_batch, do_head, do_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    H, G, T, S, window, scale, scale_log2,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, ONE_RUN: tl.constexpr, HAS_KEY_START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (B, K, S, D), each block summed by the one program that owns it."""
    blocks = tl.cdiv(S, KEYS)
    start = tl.program_id(0) % blocks * KEYS  # the first keys are seen by most queries
    kv_head = tl.program_id(0) // blocks % (H // G)
    batch = tl.program_id(0) // blocks // (H // G)

    in_block = tl.arange(0, KEYS)
    keys = start + in_block
    left = S - start
    k += offset(batch, k_batch) + offset(kv_head, k_head) + offset(start, k_row)
    v += offset(batch, v_batch) + offset(kv_head, v_head) + offset(start, v_row)
    q += offset(batch, q_batch) + offset(kv_head * G, q_head)
    do += offset(batch, do_batch) + offset(kv_head * G, do_head)
    lse += offset(batch * H + kv_head * G, T)
    delta += offset(batch * H + kv_head * G, T)
    first_key = 0
    if HAS_KEY_START:
        first_key = tl.load(key_start + batch).to(tl.int32) - start
    k_tile = load_rows(k, in_block, k_row, first_key, left, D, WIDTH, REST, True)
    v_tile = load_rows(v, in_block, v_row, first_key, left, D, WIDTH, REST, True)

    dk_tile = zero_rows(KEYS, WIDTH, REST)
    dv_tile = zero_rows(KEYS, WIDTH, REST)
    begin, whole_from, whole_to, end = query_runs(start, S - T, T, window, QUERIES, KEYS, WINDOWED)
    if HAS_KEY_START:
        end = tl.where(first_key >= KEYS, begin, end)  # padding alone: nobody sees it
        whole_from = tl.minimum(whole_from, end)
        whole_to = tl.minimum(whole_to, end)
    if ONE_RUN:
        whole_to = begin
    else:
        dk_tile, dv_tile = _key_gradient_run(
            dk_tile, dv_tile, k_tile, v_tile, q, do, lse, delta, q_head, q_row, do_head, do_row, keys, begin, whole_from,
            G, T, S - T, window, scale_log2, D, WIDTH, REST, QUERIES, WINDOWED, True, PRECISION,
        )  # fmt: skip
        dk_tile, dv_tile = _key_gradient_run(
            dk_tile, dv_tile, k_tile, v_tile, q, do, lse, delta, q_head, q_row, do_head, do_row, keys, whole_from, whole_to,
            G, T, S - T, window, scale_log2, D, WIDTH, REST, QUERIES, WINDOWED, False, PRECISION,
        )  # fmt: skip
    dk_tile, dv_tile = _key_gradient_run(
        dk_tile, dv_tile, k_tile, v_tile, q, do, lse, delta, q_head, q_row, do_head, do_row, keys, whole_to, end,
        G, T, S - T, window, scale_log2, D, WIDTH, REST, QUERIES, WINDOWED, True, PRECISION,
    )  # fmt: skip

    seen = (in_block >= first_key)[:, None]  # a sum over padding is not a gradient
    dk += offset(batch, dk_batch) + offset(kv_head, dk_head) + offset(start, dk_row)
    dv += offset(batch, dv_batch) + offset(kv_head, dv_head) + offset(start, dv_row)
    store_rows(
        dk, keep_rows(scale_rows(dk_tile, scale), seen), in_block, dk_row, left, D, WIDTH, REST
    )
    store_rows(dv, keep_rows(dv_tile, seen), in_block, dv_row, left, D, WIDTH, REST)
