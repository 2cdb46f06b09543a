"""Matrix times a few rows: the projections of a decoding step, with what surrounds them in the same kernel.

One token multiplies each weight once, so the time is that of reading the weights. A program owns OUT rows of the weight,
reads them once for all N tokens, and adds the products over blocks of columns before it sums across its threads. The
RMSNorm in front is recomputed by every program: its row is a small part of what the program reads anyway.

The weights are asked for first, before the kernel waits for the one that writes x (`decode_overlap.py`), and all loads
that remain right after: so a program waits for the memory about once, not once for each thing that it reads.

Shapes: N tokens (1 to 8), C inputs, O outputs, H query heads, K kv heads, D head_dim, M capacity of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptoss.kernels.decode_overlap import after_previous, let_next_start, overlap_options

MAX_TOKENS = 8


@triton.jit
def load_columns(vector, C: tl.constexpr, BLOCK: tl.constexpr):
    """vector (C,) as a tuple of blocks (BLOCK,)."""
    columns = tl.arange(0, BLOCK)
    blocks = ()
    for start in tl.static_range(0, C, BLOCK):
        blocks = blocks + (tl.load(vector + start + columns, mask=start + columns < C, other=0.0),)
    return blocks


@triton.jit
def load_rows_of(weight, rows, n_rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """weight[rows] as a tuple of blocks (OUT, BLOCK): all loads are under way, none is waited for."""
    columns = tl.arange(0, BLOCK)
    blocks = ()
    for start in tl.static_range(0, C, BLOCK):
        inside = (rows < n_rows)[:, None] & (start + columns < C)[None, :]
        place = weight + rows[:, None] * C + start + columns[None, :]
        blocks = blocks + (tl.load(place, mask=inside, other=0.0),)
    return blocks


@triton.jit
def load_tokens(x, C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """N contiguous rows as a tuple of blocks (TOKENS, BLOCK)."""
    return load_rows_of(x, tl.arange(0, TOKENS), N, C, BLOCK)


@triton.jit
def normalised(tokens, gamma, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of rows in blocks, rounded as the model rounds it. gamma: blocks of γ."""
    squares = 0.0
    for start in tl.static_range(0, C, BLOCK):
        t = tokens[start // BLOCK].to(tl.float32)
        squares += tl.sum(t * t, 1)
    factor = tl.rsqrt(squares / C + eps)  # (TOKENS,)
    blocks = ()
    for start in tl.static_range(0, C, BLOCK):
        t = tokens[start // BLOCK]
        g = gamma[start // BLOCK].to(tl.float32)
        blocks = blocks + ((t.to(tl.float32) * factor[:, None] * g[None, :]).to(t.dtype),)
    return blocks


@triton.jit
def products(weight, tokens, C: tl.constexpr, BLOCK: tl.constexpr):
    """weight · xᵀ as (OUT, TOKENS) in fp32, both in blocks: added over the blocks, then across the threads."""
    total = weight[0].to(tl.float32)[:, None, :] * tokens[0].to(tl.float32)[None, :, :]
    for start in tl.static_range(BLOCK, C, BLOCK):
        w, t = weight[start // BLOCK].to(tl.float32), tokens[start // BLOCK].to(tl.float32)
        total += w[:, None, :] * t[None, :, :]
    return tl.sum(total, 2)


@triton.jit
def linear_kernel(
    x, weight, gamma, residual, out, eps, OUTPUTS,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out (N, OUTPUTS) = norm(x) · weightᵀ + residual."""
    let_next_start(PDL)
    first = tl.program_id(0) * OUT
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    w = load_rows_of(weight + tl.cast(first, tl.int64) * C, rows, OUTPUTS - first, C, BLOCK)
    if NORMED:
        g = load_columns(gamma, C, BLOCK)
    after_previous(PDL)
    t = load_tokens(x, C, N, TOKENS, BLOCK)
    place = tokens[None, :] * OUTPUTS + first + rows[:, None]
    real = (rows < OUTPUTS - first)[:, None] & (tokens < N)[None, :]
    if HAS_RESIDUAL:
        before = tl.load(residual + place, mask=real, other=0.0)
    if NORMED:
        t = normalised(t, g, eps, C, BLOCK)
    y = products(w, t, C, BLOCK).to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        y += before
    tl.store(out + place, y, mask=real)


@triton.jit
def qkv_kernel(
    x, q_weight, kv_weight, gamma, cos, sin, slots, q, k_cache, v_cache, eps,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    C: tl.constexpr, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q (N, H, D) rotated; k rotated and v written at `slots` of the caches. D and H·D are multiples of OUT."""
    let_next_start(PDL)
    first = (
        tl.program_id(0) * OUT
    )  # of the rows of q_weight, then of kv_weight's keys, then of its values
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    head, within = first // D, first % D
    weight = q_weight
    if first >= H * D:
        weight = kv_weight - H * D * C
    w = load_rows_of(weight + first * C, rows, OUT, C, BLOCK)
    g = load_columns(gamma, C, BLOCK)
    after_previous(PDL)
    t = load_tokens(x, C, N, TOKENS, BLOCK)
    pairs = within // 2 + tl.arange(0, OUT // 2)
    angle = tokens[None, :] * (D // 2) + pairs[:, None]
    real = (tokens < N)[None, :]
    c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(slots + tokens, mask=tokens < N, other=0).to(tl.int64)
    y = products(w, normalised(t, g, eps, C, BLOCK), C, BLOCK).to(x.dtype.element_ty)

    # The pair (2i, 2i + 1) turns by its angle.
    even, odd = tl.split(y.reshape(OUT // 2, 2, TOKENS).permute(0, 2, 1))  # each (OUT/2, TOKENS)
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    turned = tl.join(even * c - odd * s, even * s + odd * c)  # (OUT/2, TOKENS, 2)
    turned = turned.permute(0, 2, 1).reshape(OUT, TOKENS).to(y.dtype)

    real = ((rows < OUT)[:, None]) & (tokens < N)[None, :]
    batch = tokens.to(tl.int64)
    if head < H:
        tl.store(q + (tokens * H * D)[None, :] + first + rows[:, None], turned, mask=real)
    elif head < H + K:
        place = batch * k_batch + (head - H) * k_head + slot * k_row
        tl.store(
            k_cache + place[None, :] + within + rows[:, None],
            turned.to(k_cache.dtype.element_ty), mask=real,
        )  # fmt: skip
    else:
        place = batch * v_batch + (head - H - K) * v_head + slot * v_row
        tl.store(
            v_cache + place[None, :] + within + rows[:, None],
            y.to(v_cache.dtype.element_ty), mask=real,
        )  # fmt: skip


def block_sizes(n_tokens: int, width: int) -> dict[str, int]:
    """The constants that describe N rows of C values: tokens and width rounded up, and a block of columns."""
    tokens = triton.next_power_of_2(n_tokens)
    whole = triton.next_power_of_2(width)
    return dict(C=width, N=n_tokens, TOKENS=tokens, BLOCK=min(256 if tokens < 4 else 128, whole))


def launch_linear(
    x: Tensor,
    weight: Tensor,
    gamma: Tensor | None,
    residual: Tensor | None,
    eps: float,
    out_rows: int = 4,
    warps: int = 2,
    overlap: bool = True,
) -> Tensor:
    """(N, OUTPUTS) in x's dtype; all tensors contiguous."""
    (N, C), OUTPUTS = x.shape, weight.shape[0]
    out = x.new_empty((N, OUTPUTS))
    with torch.cuda.device_of(x):
        linear_kernel[(triton.cdiv(OUTPUTS, out_rows),)](
            *(x, weight, gamma, residual, out, eps, OUTPUTS),
            **block_sizes(N, C),
            OUT=out_rows,
            NORMED=gamma is not None,
            HAS_RESIDUAL=residual is not None,
            num_warps=warps,
            **overlap_options(x.device, overlap),
        )
    return out


def launch_qkv(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    out_rows: int = 4,
    warps: int = 4,
    overlap: bool = True,
) -> Tensor:
    """q (N, H, D); k and v go into row `slots[n]` of the caches (N, K, M, D)."""
    (N, C), (K, D) = x.shape, k_cache.shape[1::2]
    H = q_weight.shape[0] // D
    q = x.new_empty((N, H, D))
    with torch.cuda.device_of(x):
        qkv_kernel[((H + 2 * K) * D // out_rows,)](
            *(x, q_weight, kv_weight, gamma, cos, sin, slots, q, k_cache, v_cache, eps),
            *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
            **block_sizes(N, C),
            H=H,
            K=K,
            D=D,
            OUT=out_rows,
            num_warps=warps,
            **overlap_options(x.device, overlap),
        )
    return q
