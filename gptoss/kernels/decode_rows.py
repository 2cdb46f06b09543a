"""Matrix times a few rows: the projections of a decoding step, with what surrounds them in the same kernel.

One token multiplies each weight once, so the time is that of reading the weights. A program owns OUT rows of the weight,
reads them once for all N tokens, and adds the products over blocks of columns before it sums across its threads. The
RMSNorm in front is recomputed by every program: its row is a thousandth of what the program reads anyway.

Shapes: N tokens (1 to 8), C inputs, O outputs, H query heads, K kv heads, D head_dim, M capacity of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 8


@triton.jit
def inverse_rms(
    x, eps, C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, WHOLE: tl.constexpr
):
    """1/sqrt(mean(x²) + eps) of each of N contiguous rows, as a (TOKENS,) tensor."""
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, WHOLE)
    inside = (tokens < N)[:, None] & (columns < C)[None, :]
    row = tl.load(x + tokens[:, None] * C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(row * row, 1) / C + eps)


@triton.jit
def add_products(
    total, x, weight, rows, n_rows, start,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    factors, gamma, NORMED: tl.constexpr,
):  # fmt: skip
    """total (OUT, TOKENS, BLOCK) + weight[rows, columns] · x[tokens, columns], the columns from `start` on."""
    columns, tokens = start + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    inside = columns < C
    w = tl.load(
        weight + rows[:, None] * C + columns[None, :],
        mask=(rows < n_rows)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    t = tl.load(
        x + tokens[:, None] * C + columns[None, :],
        mask=(tokens < N)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    if NORMED:
        g = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
        t = (t.to(tl.float32) * factors[:, None] * g[None, :]).to(
            t.dtype
        )  # rounded as the model rounds it
    return total + w.to(tl.float32)[:, None, :] * t.to(tl.float32)[None, :, :]


@triton.jit
def rows_times(
    x, weight, rows, n_rows,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    factors, gamma, NORMED: tl.constexpr,
):  # fmt: skip
    """weight[rows] · xᵀ as (OUT, TOKENS) in fp32; every load is under way before the first is used."""
    total = tl.zeros((OUT, TOKENS, BLOCK), tl.float32)
    for start in tl.static_range(0, C, BLOCK):
        total = add_products(
            total, x, weight, rows, n_rows, start, C, N, TOKENS, BLOCK, factors, gamma, NORMED
        )
    return tl.sum(total, 2)


@triton.jit
def linear_kernel(
    x, weight, gamma, residual, out, eps, OUTPUTS,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, NORMED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """out (N, OUTPUTS) = norm(x) · weightᵀ + residual."""
    factors = 1.0
    if NORMED:
        factors = inverse_rms(x, eps, C, N, TOKENS, WHOLE)
    first = tl.program_id(0) * OUT
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    y = rows_times(
        x, weight + tl.cast(first, tl.int64) * C, rows, OUTPUTS - first,
        C, N, TOKENS, OUT, BLOCK, factors, gamma, NORMED,
    )  # fmt: skip
    y = y.to(out.dtype.element_ty)
    place = tokens[None, :] * OUTPUTS + first + rows[:, None]
    real = (rows < OUTPUTS - first)[:, None] & (tokens < N)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + place, mask=real, other=0.0)
    tl.store(out + place, y, mask=real)


@triton.jit
def qkv_kernel(
    x, q_weight, kv_weight, gamma, cos, sin, slots, q, k_cache, v_cache, eps,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    C: tl.constexpr, N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """q (N, H, D) rotated; k rotated and v written at `slots` of the caches. D and H·D are multiples of OUT."""
    factors = inverse_rms(x, eps, C, N, TOKENS, WHOLE)
    first = (
        tl.program_id(0) * OUT
    )  # of the rows of q_weight, then of kv_weight's keys, then of its values
    rows, tokens = tl.arange(0, OUT), tl.arange(0, TOKENS)
    weight = q_weight
    if first >= H * D:
        weight = kv_weight - H * D * C
    y = rows_times(
        x, weight + first * C, rows, OUT, C, N, TOKENS, OUT, BLOCK, factors, gamma, True
    ).to(x.dtype.element_ty)
    head, within = first // D, first % D

    # The pair (2i, 2i + 1) turns by its angle.
    even, odd = tl.split(y.reshape(OUT // 2, 2, TOKENS).permute(0, 2, 1))  # each (OUT/2, TOKENS)
    pairs = within // 2 + tl.arange(0, OUT // 2)
    angle = tokens[None, :] * (D // 2) + pairs[:, None]
    real = (tokens < N)[None, :]
    c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
    even, odd = even.to(tl.float32), odd.to(tl.float32)
    turned = tl.join(even * c - odd * s, even * s + odd * c)  # (OUT/2, TOKENS, 2)
    turned = turned.permute(0, 2, 1).reshape(OUT, TOKENS).to(y.dtype)

    real = ((rows < OUT)[:, None]) & (tokens < N)[None, :]
    slot = tl.load(slots + tokens, mask=tokens < N, other=0).to(tl.int64)
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
) -> Tensor:
    """(N, OUTPUTS) in x's dtype; all tensors contiguous."""
    (N, C), OUTPUTS = x.shape, weight.shape[0]
    out = x.new_empty((N, OUTPUTS))
    with torch.cuda.device_of(x):
        linear_kernel[(triton.cdiv(OUTPUTS, out_rows),)](
            *(x, weight, gamma, residual, out, eps, OUTPUTS),
            **block_sizes(N, C),
            OUT=out_rows,
            WHOLE=triton.next_power_of_2(C),
            NORMED=gamma is not None,
            HAS_RESIDUAL=residual is not None,
            num_warps=warps,
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
            WHOLE=triton.next_power_of_2(C),
            num_warps=warps,
        )
    return q
