"""The forward attention kernel: one program holds a block of queries and streams the keys that it sees.

Online softmax in base 2 (exp2 is the hardware's): with scores s, running maximum m, sum l and weighted values a,

    m' = max(m, max_j s_j)    p_j = 2^(s_j - m')    l' = l·2^(m - m') + Σ p_j    a' = a·2^(m - m') + Σ p_j v_j

and out = a / l at the end. A sink of logit b is a key whose score is b and whose value is zero, so it is the state that
the sum starts from: m = b·log2(e), l = 1, a = 0. Without one the sum starts empty.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

import triton
import triton.language as tl

from gptoss.kernels.attention_tiles import (
    add_weighted_rows,
    dot_rows,
    key_runs,
    load_rows,
    offset,
    scale_rows,
    store_rows,
    zero_rows,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# A maximum below any score but finite, so that "nothing seen yet" needs no case of its own: 2^(m - m') is 1 or 0.
NOTHING_SEEN = tl.constexpr(-1e30)


@triton.jit
def _attend_run(
    state, q, k, v, k_stride, v_stride, positions, begin, end, S, window, first_key, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys [begin, end) into the running softmax."""
    m, l, a = state
    in_block = tl.arange(0, KEYS)
    for start in range(begin, end, KEYS):
        keys = start + in_block
        k_tile = load_rows(
            k + offset(start, k_stride), in_block, k_stride, first_key - start, S - start, D, WIDTH, REST, MASKED
        )  # fmt: skip
        s = dot_rows(q, k_tile, PRECISION)  # (queries, keys)
        if MASKED:
            distance = positions[:, None] - keys[None, :]
            visible = (distance >= 0) & (keys >= first_key)[None, :]
            if WINDOWED:
                visible = visible & (distance < window)
            s = tl.where(visible, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_m[:, None])
        decay = tl.exp2(m - new_m)
        l = l * decay + tl.sum(p, 1)
        a = scale_rows(a, decay[:, None])
        v_tile = load_rows(
            v + offset(start, v_stride), in_block, v_stride, first_key - start, S - start, D, WIDTH, REST, MASKED
        )  # fmt: skip
        a = add_weighted_rows(a, p, v_tile, PRECISION)
        m = new_m
    return m, l, a


@triton.jit
def attention_forward_kernel(
    q, k, v, out, lse, sink, key_start,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    H, G, T, S, window, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOWED: tl.constexpr, ONE_RUN: tl.constexpr, HAS_SINK: tl.constexpr, HAS_KEY_START: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out (B, H, T, D) and lse (B, H, T), the log of the softmax's denominator with the sink; +inf where it is empty.

    `scale` includes log2(e). ONE_RUN takes all blocks as edges, which suits a window of few blocks: no pipeline restarts.
    """
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
    q += offset(batch, q_batch) + offset(head, q_head) + offset(start, q_row)
    k += offset(batch, k_batch) + offset(head // G, k_head)
    v += offset(batch, v_batch) + offset(head // G, v_head)
    q_tile = load_rows(q, rows, q_row, 0, T - start, D, WIDTH, REST, True)

    if HAS_SINK:
        m = tl.zeros((QUERIES,), tl.float32) + tl.load(sink + head).to(tl.float32) * LOG2_E
        l = tl.full((QUERIES,), 1.0, tl.float32)
    else:
        m = tl.full((QUERIES,), NOTHING_SEEN, tl.float32)
        l = tl.zeros((QUERIES,), tl.float32)
    state = (m, l, zero_rows(QUERIES, WIDTH, REST))
    begin, whole_from, whole_to, end = key_runs(
        position, S, window, first_key, QUERIES, KEYS, WINDOWED
    )
    if ONE_RUN:
        whole_to = begin
    else:
        if WINDOWED or HAS_KEY_START:
            state = _attend_run(
                state, q_tile, k, v, k_row, v_row, positions, begin, whole_from, S, window, first_key,
                scale, D, WIDTH, REST, KEYS, WINDOWED, True, PRECISION,
            )  # fmt: skip
        state = _attend_run(
            state, q_tile, k, v, k_row, v_row, positions, whole_from, whole_to, S, window, first_key,
            scale, D, WIDTH, REST, KEYS, WINDOWED, False, PRECISION,
        )  # fmt: skip
    m, l, a = _attend_run(
        state, q_tile, k, v, k_row, v_row, positions, whole_to, end, S, window, first_key,
        scale, D, WIDTH, REST, KEYS, WINDOWED, True, PRECISION,
    )  # fmt: skip

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    out += offset(batch, o_batch) + offset(head, o_head) + offset(start, o_row)
    store_rows(out, scale_rows(a, (1.0 / l)[:, None]), rows, o_row, T - start, D, WIDTH, REST)
    log_sum = tl.where(empty, float("inf"), (m + tl.log2(l)) * LN_2)
    tl.store(lse + offset(batch * H + head, T) + start + rows, log_sum, mask=rows < T - start)
