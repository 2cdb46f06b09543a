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
    query_runs,
    scale_rows,
    store_rows,
    sum_of_products,
    visible_pairs,
    zero_rows,
)


@triton.jit
def _query_gradient_run(
    dq, q, do, lse, delta, k, v, batch, kv_head, positions, begin, end, window, first_key, scale,
    WIDTH: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_KEY_START: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS·K over the keys [begin, end) to dq."""
    for start in range(begin, end, KEYS):
        k_tile = load_rows(k, batch, kv_head, start, KEYS, WIDTH, REST)
        v_tile = load_rows(v, batch, kv_head, start, KEYS, WIDTH, REST)
        keys = start + tl.arange(0, KEYS)
        if MASKED and HAS_KEY_START:
            k_tile = keep_rows(k_tile, keys >= first_key)  # 0 · padding need not be 0
            v_tile = keep_rows(v_tile, keys >= first_key)
        p = tl.exp2(dot_rows(q, k_tile, PRECISION) * scale - lse[:, None])  # (queries, keys)
        if MASKED:
            visible = visible_pairs(positions[:, None], keys[None, :], window, WINDOWED)
            if HAS_KEY_START:
                visible = visible & (keys >= first_key)[None, :]
            p = tl.where(visible, p, 0.0)
        ds = p * (dot_rows(do, v_tile, PRECISION) - delta[:, None])
        dq = add_weighted_rows(dq, ds, k_tile, PRECISION)
    return dq


@triton.jit
def query_gradient_kernel(
    do_first, do_rest, q_first, q_rest, k_first, k_rest, v_first, v_rest, out_first, out_rest,
    dq_first, dq_rest, lse, delta, sink, dsink_parts, key_start,
    H, G, T, S, window, scale, scale_log2,
    WIDTH: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, ONE_RUN: tl.constexpr, HAS_SINK: tl.constexpr, HAS_KEY_START: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (B, H, T, D), delta (B, H, T) for the other kernel, and the sink's gradient, one part a program."""
    blocks = tl.cdiv(T, QUERIES)
    start = (blocks - 1 - tl.program_id(0) % blocks) * QUERIES  # the longest rows first
    head = tl.program_id(0) // blocks % H
    batch = tl.program_id(0) // blocks // H
    kv_head = head // G
    first_key = 0
    if HAS_KEY_START:
        first_key = tl.maximum(tl.load(key_start + batch).to(tl.int32), 0)

    k = (k_first, k_rest)
    v = (v_first, v_rest)
    rows = start + tl.arange(0, QUERIES)
    positions = S - T + rows
    q_tile = load_rows((q_first, q_rest), batch, head, start, QUERIES, WIDTH, REST)
    do_tile = load_rows((do_first, do_rest), batch, head, start, QUERIES, WIDTH, REST)
    out_tile = load_rows((out_first, out_rest), batch, head, start, QUERIES, WIDTH, REST)

    # Rows past the end have lse = inf, so that p = 0 there.
    per_row = tl.cast(batch * H + head, tl.int64) * T + rows
    lse_row = tl.load(lse + per_row, mask=rows < T, other=float("inf"))
    delta_row = sum_of_products(do_tile, out_tile)
    tl.store(delta + per_row, delta_row, mask=rows < T)
    if HAS_SINK:
        p_sink = tl.exp2((tl.load(sink + head).to(tl.float32) - lse_row) * LOG2_E)
        tl.store(dsink_parts + tl.program_id(0), -tl.sum(p_sink * delta_row, 0))
    lse_row *= LOG2_E

    dq = zero_rows(QUERIES, WIDTH, REST)
    begin, whole_from, whole_to, end = key_runs(
        S - T + start, S, window, first_key, QUERIES, KEYS, WINDOWED
    )
    if ONE_RUN:
        whole_to = begin
    else:
        if WINDOWED or HAS_KEY_START:
            dq = _query_gradient_run(
                dq, q_tile, do_tile, lse_row, delta_row, k, v, batch, kv_head, positions, begin, whole_from,
                window, first_key, scale_log2, WIDTH, REST, KEYS, WINDOWED, HAS_KEY_START, True, PRECISION,
            )  # fmt: skip
        dq = _query_gradient_run(
            dq, q_tile, do_tile, lse_row, delta_row, k, v, batch, kv_head, positions, whole_from, whole_to,
            window, first_key, scale_log2, WIDTH, REST, KEYS, WINDOWED, HAS_KEY_START, False, PRECISION,
        )  # fmt: skip
    dq = _query_gradient_run(
        dq, q_tile, do_tile, lse_row, delta_row, k, v, batch, kv_head, positions, whole_to, end,
        window, first_key, scale_log2, WIDTH, REST, KEYS, WINDOWED, HAS_KEY_START, True, PRECISION,
    )  # fmt: skip
    store_rows((dq_first, dq_rest), scale_rows(dq, scale), batch, head, start, QUERIES, WIDTH, REST)


@triton.jit
def _key_gradient_run(
    dk, dv, k, v, q, do, lse, delta, batch, first_head, keys, begin, end, G, T, shift, window, scale,
    WIDTH: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ·Q and Pᵀ·dO over the query rows [begin, end) of the group's G heads: one loop, so one pipeline."""
    blocks = tl.maximum(tl.cdiv(end - begin, QUERIES), 0)
    for step in range(0, G * blocks):
        head = step // blocks
        start = begin + step % blocks * QUERIES
        rows = start + tl.arange(0, QUERIES)
        per_row = tl.cast(head, tl.int64) * T + rows
        if MASKED:
            lse_row = tl.load(lse + per_row, mask=rows < T, other=float("inf"))
            delta_row = tl.load(delta + per_row, mask=rows < T, other=0.0)
        else:
            lse_row = tl.load(lse + per_row)
            delta_row = tl.load(delta + per_row)
        q_tile = load_rows(q, batch, first_head + head, start, QUERIES, WIDTH, REST)
        do_tile = load_rows(do, batch, first_head + head, start, QUERIES, WIDTH, REST)
        s = dot_rows(k, q_tile, PRECISION) * scale - (lse_row * LOG2_E)[None, :]  # (keys, queries)
        if MASKED:
            visible = visible_pairs((shift + rows)[None, :], keys[:, None], window, WINDOWED)
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s)
        dv = add_weighted_rows(dv, p, do_tile, PRECISION)
        ds = p * (dot_rows(v, do_tile, PRECISION) - delta_row[None, :])
        dk = add_weighted_rows(dk, ds, q_tile, PRECISION)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    do_first, do_rest, q_first, q_rest, k_first, k_rest, v_first, v_rest,
    dk_first, dk_rest, dv_first, dv_rest, lse, delta, key_start,
    H, G, T, S, window, scale, scale_log2,
    WIDTH: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, ONE_RUN: tl.constexpr, HAS_KEY_START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (B, K, S, D), each block summed by the one program that owns it."""
    blocks = tl.cdiv(S, KEYS)
    start = tl.program_id(0) % blocks * KEYS  # the first keys are seen by most queries
    kv_head = tl.program_id(0) // blocks % (H // G)
    batch = tl.program_id(0) // blocks // (H // G)
    first_head = kv_head * G

    q = (q_first, q_rest)
    do = (do_first, do_rest)
    keys = start + tl.arange(0, KEYS)
    lse += tl.cast(batch * H + first_head, tl.int64) * T
    delta += tl.cast(batch * H + first_head, tl.int64) * T
    k = load_rows((k_first, k_rest), batch, kv_head, start, KEYS, WIDTH, REST)
    v = load_rows((v_first, v_rest), batch, kv_head, start, KEYS, WIDTH, REST)

    dk = zero_rows(KEYS, WIDTH, REST)
    dv = zero_rows(KEYS, WIDTH, REST)
    begin, whole_from, whole_to, end = query_runs(start, S - T, T, window, QUERIES, KEYS, WINDOWED)
    if ONE_RUN:
        whole_to = begin
    else:
        dk, dv = _key_gradient_run(
            dk, dv, k, v, q, do, lse, delta, batch, first_head, keys, begin, whole_from, G, T, S - T, window,
            scale_log2, WIDTH, REST, QUERIES, WINDOWED, True, PRECISION,
        )  # fmt: skip
        dk, dv = _key_gradient_run(
            dk, dv, k, v, q, do, lse, delta, batch, first_head, keys, whole_from, whole_to, G, T, S - T, window,
            scale_log2, WIDTH, REST, QUERIES, WINDOWED, False, PRECISION,
        )  # fmt: skip
    dk, dv = _key_gradient_run(
        dk, dv, k, v, q, do, lse, delta, batch, first_head, keys, whole_to, end, G, T, S - T, window,
        scale_log2, WIDTH, REST, QUERIES, WINDOWED, True, PRECISION,
    )  # fmt: skip

    dk = scale_rows(dk, scale)
    if HAS_KEY_START:  # nobody sees padding: what its rows summed up is not a gradient
        real = keys >= tl.load(key_start + batch).to(tl.int32)
        dk = keep_rows(dk, real)
        dv = keep_rows(dv, real)
    store_rows((dk_first, dk_rest), dk, batch, kv_head, start, KEYS, WIDTH, REST)
    store_rows((dv_first, dv_rest), dv, batch, kv_head, start, KEYS, WIDTH, REST)
