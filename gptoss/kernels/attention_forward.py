"""The forward attention kernel: one program holds a block of queries and streams the keys that it sees.

Online softmax in base 2 (exp2 is the hardware's): with scores s, running maximum m, sum of weights t ("total") and
weighted values u,

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')    t' = t·2^(m - m') + Σ p_j    u' = u·2^(m - m') + Σ p_j v_j

and out = u / t at the end. A sink of logit b is a key whose score is b and whose value is zero, so it is the state that
the sums start from: m = b·log2(e), t = 1, u = 0. Without one they start empty.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

import triton
import triton.language as tl

from gptoss.kernels.attention_tiles import (
    add_weighted_rows,
    dot_rows,
    keep_rows,
    key_runs,
    load_rows,
    scale_rows,
    store_rows,
    visible_pairs,
    zero_rows,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# A maximum below any score but finite, so that "nothing seen yet" needs no case of its own: 2^(m - m') is 1 or 0.
NOTHING_SEEN = tl.constexpr(-1e30)


@triton.jit
def attend_run(
    state, q, k, v, batch, kv_head, positions, begin, end, window, first_key, scale,
    WIDTH: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    HAS_KEY_START: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys [begin, end) into the running softmax. HAS_KEY_START: rows outside [first_key, end) may hold anything."""
    m, total, values = state
    for start in range(begin, end, KEYS):
        k_tile = load_rows(k, batch, kv_head, start, KEYS, WIDTH, REST)
        s = dot_rows(q, k_tile, PRECISION)  # (queries, keys)
        v_tile = load_rows(v, batch, kv_head, start, KEYS, WIDTH, REST)
        if MASKED:
            keys = start + tl.arange(0, KEYS)
            visible = visible_pairs(positions[:, None], keys[None, :], window, WINDOWED)
            if HAS_KEY_START:
                kept = (keys >= first_key) & (keys < end)
                visible = visible & kept[None, :]
                v_tile = keep_rows(v_tile, kept)  # 0 · padding need not be 0
            s = tl.where(visible, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_m[:, None])
        decay = tl.exp2(m - new_m)
        total = total * decay + tl.sum(p, 1)
        values = add_weighted_rows(scale_rows(values, decay[:, None]), p, v_tile, PRECISION)
        m = new_m
    return m, total, values


@triton.jit
def attention_forward_kernel(
    q_first, q_rest, k_first, k_rest, v_first, v_rest, out_first, out_rest, lse, sink, key_start,
    H, G, T, S, window, scale,
    WIDTH: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, ONE_RUN: tl.constexpr, HAS_SINK: tl.constexpr, HAS_KEY_START: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, H, T, D) and lse (B, H, T), the log of the softmax's denominator with the sink; +inf where it is empty.

    `scale` includes log2(e). ONE_RUN takes all blocks as edges, which suits a window of few blocks: no pipeline restarts.
    """
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
    if HAS_SINK:
        m = tl.zeros((QUERIES,), tl.float32) + tl.load(sink + head).to(tl.float32) * LOG2_E
        total = tl.full((QUERIES,), 1.0, tl.float32)
    else:
        m = tl.full((QUERIES,), NOTHING_SEEN, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
    state = (m, total, zero_rows(QUERIES, WIDTH, REST))

    begin, whole_from, whole_to, end = key_runs(
        S - T + start, S, window, first_key, QUERIES, KEYS, WINDOWED
    )
    if ONE_RUN:
        whole_to = begin
    else:
        if WINDOWED or HAS_KEY_START:
            state = attend_run(
                state, q_tile, k, v, batch, kv_head, positions, begin, whole_from, window, first_key, scale,
                WIDTH, REST, KEYS, WINDOWED, HAS_KEY_START, True, PRECISION,
            )  # fmt: skip
        state = attend_run(
            state, q_tile, k, v, batch, kv_head, positions, whole_from, whole_to, window, first_key, scale,
            WIDTH, REST, KEYS, WINDOWED, HAS_KEY_START, False, PRECISION,
        )  # fmt: skip
    m, total, values = attend_run(
        state, q_tile, k, v, batch, kv_head, positions, whole_to, end, window, first_key, scale,
        WIDTH, REST, KEYS, WINDOWED, HAS_KEY_START, True, PRECISION,
    )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out_tile = scale_rows(values, (1.0 / total)[:, None])
    store_rows((out_first, out_rest), out_tile, batch, head, start, QUERIES, WIDTH, REST)
    log_sum = tl.where(empty, float("inf"), (m + tl.log2(total)) * LN_2)
    per_row = tl.cast(batch * H + head, tl.int64) * T + rows
    tl.store(lse + per_row, log_sum, mask=rows < T)
