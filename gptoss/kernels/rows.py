"""Rows to their experts and back: one gather, one sum, no atomics.

Shapes: N tokens, k experts a token, R = N·k routed rows sorted by expert, C model width.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK_ROWS, BLOCK_COLUMNS = 16, 256


def gather_rows(
    x: Float[Tensor, "N C"],
    order: Int[Tensor, "R"],
    k: int,
    weights: Float[Tensor, "N k"] | None = None,
) -> tuple[Float[Tensor, "R C"], Float[Tensor, "R"] | None]:
    """Copy each token's row to its k places: rows[r] = x[order[r] // k], and weight[r] = weights.flatten()[order[r]].

    Args:
        x: (N, C) token rows; any strides.
        order: (R,) slot of each sorted row.
        k: experts a token.
        weights: (N, k) routing weights; None leaves them out.

    Returns:
        (R, C) rows and (R,) float32 weights or None.

    Source: chapter 9.
    """
    n_rows, width = order.shape[0], x.shape[1]
    rows = x.new_empty(n_rows, width)
    row_weights = None
    if weights is not None:
        weights = weights.contiguous()
        row_weights = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n_rows, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLUMNS))
    if n_rows:
        _gather_kernel[grid](
            x, order, weights, rows, row_weights, n_rows, width, *x.stride(),
            K=k, BLOCK_R=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS,
        )  # fmt: skip
    return rows, row_weights


def sum_rows(y: Float[Tensor, "R C"], inverse: Int[Tensor, "R"], k: int) -> Float[Tensor, "N C"]:
    """Bring the k rows of each token back and add them in float32: out[n] = Σ_j y[inverse[n·k + j]].

    Args:
        y: (R, C) contiguous rows sorted by expert.
        inverse: (R,) sorted row of each slot.
        k: experts a token.

    Returns:
        (N, C) in the rows' dtype.

    Source: chapter 9.
    """
    n_tokens, width = inverse.shape[0] // k, y.shape[1]
    out = y.new_empty(n_tokens, width)
    grid = (triton.cdiv(n_tokens, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLUMNS))
    if n_tokens:
        _sum_kernel[grid](
            y, inverse, out, n_tokens, width, K=k, BLOCK_R=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS
        )
    return out


def sum_parts(
    parts: Float[Tensor, "P R"], order: Int[Tensor, "R"], weights: Float[Tensor, "N k"]
) -> Float[Tensor, "N k"]:
    """Add up the parts of the routing weights' gradient and bring it back to the slots: out[order[r]] = Σ_p parts[p, r].

    Args:
        parts: (P, R) contiguous float32 parts, one value a sorted row.
        order: (R,) slot of each sorted row.
        weights: (N, k) routing weights; they give the shape and the dtype.

    Returns:
        (N, k) in the dtype of ``weights``.

    Source: chapter 10, version 5.
    """
    n_rows = parts.shape[1]
    out = weights.new_empty(weights.shape)
    if n_rows:
        _parts_kernel[(triton.cdiv(n_rows, BLOCK_COLUMNS),)](
            parts, order, out, n_rows, P=parts.shape[0], BLOCK=BLOCK_COLUMNS
        )
    return out


@triton.jit(do_not_specialize=["n_rows"])
def _gather_kernel(
    x, order, weights, rows, row_weights, n_rows, width, stride_n, stride_c,
    K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (r < n_rows)[:, None] & (c < width)[None, :]
    slot = tl.load(order + r, mask=r < n_rows, other=0)
    token = (slot // K).to(tl.int64)
    value = tl.load(x + token[:, None] * stride_n + c.to(tl.int64)[None, :] * stride_c, mask=mask)
    tl.store(rows + r.to(tl.int64)[:, None] * width + c[None, :], value, mask=mask)
    if row_weights is not None:  # noqa: SIM102  # the outer test is decided when compiling
        if tl.program_id(1) == 0:
            weight = tl.load(weights + slot, mask=r < n_rows).to(tl.float32)
            tl.store(row_weights + r, weight, mask=r < n_rows)


@triton.jit(do_not_specialize=["n_tokens"])
def _sum_kernel(
    y, inverse, out, n_tokens, width, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (n < n_tokens)[:, None] & (c < width)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse + n * K + j, mask=n < n_tokens, other=0).to(tl.int64)
        total += tl.load(y + row[:, None] * width + c[None, :], mask=mask, other=0.0).to(tl.float32)
    at = out + n.to(tl.int64)[:, None] * width + c[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _parts_kernel(parts, order, out, n_rows, P: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < n_rows
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _part in tl.static_range(P):  # unrolled, so that the loads wait together
        total += tl.load(parts + r, mask=mask, other=0.0)
        parts += n_rows
    slot = tl.load(order + r, mask=mask, other=0)
    tl.store(out + slot, total.to(out.dtype.element_ty), mask=mask)
