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


@triton.jit
def load_weight(weight, rows, n_rows, C: tl.constexpr, BLOCK: tl.constexpr):
    """weight[rows] as a tuple of blocks (OUT, 1, BLOCK): all loads are under way, none is waited for."""
    columns = tl.arange(0, BLOCK)
    blocks = ()
    for start in tl.static_range(0, C, BLOCK):
        inside = (rows < n_rows)[:, None, None] & (start + columns < C)[None, None, :]
        place = weight + rows[:, None, None] * C + start + columns[None, None, :]
        blocks += (tl.load(place, mask=inside, other=0.0),)  # type: ignore[assignment]  # it grows
    return blocks


@triton.jit
def load_tokens(
    x, C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """N contiguous rows as a tuple of blocks (1, TOKENS, BLOCK); of one token (OUT, 1, BLOCK), its row OUT times.

    So each thread loads the very columns that its block of the weight multiplies, and nothing has to pass from thread to
    thread through shared memory, which costs a barrier each time.
    """
    COPIES: tl.constexpr = OUT if TOKENS == 1 else 1
    columns, tokens = tl.arange(0, BLOCK)[None, None, :], tl.arange(0, TOKENS)[None, :, None]
    blocks = ()
    for start in tl.static_range(0, C, BLOCK):
        inside = tl.broadcast_to((tokens < N) & (start + columns < C), (COPIES, TOKENS, BLOCK))
        place = tl.broadcast_to(tokens * C + start + columns, (COPIES, TOKENS, BLOCK))
        blocks += (tl.load(x + place, mask=inside, other=0.0),)  # type: ignore[assignment]  # it grows
    return blocks


@triton.jit
def load_gamma(
    gamma, C: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """γ (C,) in blocks as `load_tokens` has them, (1 or OUT, 1, BLOCK)."""
    return load_tokens(gamma, C, 1, 1, OUT if TOKENS == 1 else 1, BLOCK)


@triton.jit
def normalised(tokens, gamma, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of rows in blocks, rounded as the model rounds it. gamma: γ in the blocks of one token."""
    squares = tokens[0].to(tl.float32) * tokens[0].to(tl.float32)
    for start in tl.static_range(BLOCK, C, BLOCK):
        t = tokens[start // BLOCK].to(tl.float32)
        squares += t * t
    factor = tl.rsqrt(tl.sum(squares, 2) / C + eps)[:, :, None]
    blocks = ()
    for start in tl.static_range(0, C, BLOCK):
        t, g = tokens[start // BLOCK], gamma[start // BLOCK].to(tl.float32)
        blocks += ((t.to(tl.float32) * factor * g).to(t.dtype),)  # type: ignore[assignment]  # it grows
    return blocks


@triton.jit
def products(weight, tokens, C: tl.constexpr, BLOCK: tl.constexpr):
    """weight · xᵀ as (OUT, TOKENS) in fp32, both in blocks: added over the blocks, then across the threads."""
    total = weight[0].to(tl.float32) * tokens[0].to(tl.float32)
    for start in tl.static_range(BLOCK, C, BLOCK):
        total += weight[start // BLOCK].to(tl.float32) * tokens[start // BLOCK].to(tl.float32)
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
    w = load_weight(weight + tl.cast(first, tl.int64) * C, rows, OUTPUTS - first, C, BLOCK)
    if NORMED:
        g = load_gamma(gamma, C, TOKENS, OUT, BLOCK)
    after_previous(PDL)
    t = load_tokens(x, C, N, TOKENS, OUT, BLOCK)
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
    head, within = first // D, first % D
    weight = q_weight
    if first >= H * D:
        weight = kv_weight - H * D * C
    # The rows 2i and 2i + 1 turn together, so each thread has both.
    HALF: tl.constexpr = OUT // 2
    pairs, tokens = tl.arange(0, HALF), tl.arange(0, TOKENS)
    even_w = load_weight(weight + first * C, 2 * pairs, OUT, C, BLOCK)
    odd_w = load_weight(weight + first * C, 2 * pairs + 1, OUT, C, BLOCK)
    g = load_gamma(gamma, C, TOKENS, HALF, BLOCK)
    after_previous(PDL)
    t = load_tokens(x, C, N, TOKENS, HALF, BLOCK)
    angle = tokens[None, :] * (D // 2) + (within // 2 + pairs)[:, None]
    real = tl.broadcast_to((tokens < N)[None, :], (HALF, TOKENS))
    c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(slots + tokens, mask=tokens < N, other=0).to(tl.int64)
    t = normalised(t, g, eps, C, BLOCK)
    even = products(even_w, t, C, BLOCK).to(x.dtype.element_ty).to(tl.float32)  # (OUT/2, TOKENS)
    odd = products(odd_w, t, C, BLOCK).to(x.dtype.element_ty).to(tl.float32)
    if head < H + K:
        even, odd = even * c - odd * s, even * s + odd * c

    batch = tokens.to(tl.int64)
    if head < H:
        place = q + (tokens * H * D)[None, :] + (first + 2 * pairs)[:, None]
    elif head < H + K:
        row = batch * k_batch + (head - H) * k_head + slot * k_row
        place = k_cache + row[None, :] + (within + 2 * pairs)[:, None]
    else:
        row = batch * v_batch + (head - H - K) * v_head + slot * v_row
        place = v_cache + row[None, :] + (within + 2 * pairs)[:, None]
    tl.store(place, even.to(place.dtype.element_ty), mask=real)
    tl.store(place + 1, odd.to(place.dtype.element_ty), mask=real)


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
    overlap: bool = False,
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
    warps: int = 2,
    overlap: bool = False,
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
