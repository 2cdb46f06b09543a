"""The cross-entropy kernel: one program reads one row of logits, then writes the row's gradient over it.

The first walk keeps a running maximum m and sum t in base 2, as the attention kernels do; the second walk goes backwards,
so that it meets what the cache still holds; what it has used may leave the cache first. Floor: one read and one write of the
logits, 2·V·itemsize bytes a row.

Shapes: n rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, row_stride, V, ignore_index,
    BLOCK: tl.constexpr, WRITE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """losses (n,) and, in place of the logits, scale · (softmax - onehot)."""
    row = tl.program_id(0)
    logits += tl.cast(row, tl.int64) * row_stride
    target = tl.load(targets + row)
    ignored = target == ignore_index
    in_vocabulary = (target >= 0) & (target < V)
    # A label outside the vocabulary is read nowhere; its loss says so.
    target_logit = tl.load(logits + target, mask=in_vocabulary, other=float("nan")).to(tl.float32)

    m = -1e30  # below any logit but finite: see the attention kernel
    total = 0.0
    blocks = tl.cdiv(V, BLOCK)
    for block in range(0, blocks):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(
            logits + columns, mask=columns < V, other=float("-inf"), eviction_policy="evict_last"
        )
        z = z.to(tl.float32) * LOG2_E
        new_m = tl.maximum(m, tl.max(z, 0))
        total = total * tl.exp2(m - new_m) + tl.sum(tl.exp2(z - new_m), 0)
        m = new_m
    log_sum = m + tl.log2(total)
    tl.store(losses + row, tl.where(ignored, 0.0, log_sum * LN_2 - target_logit))

    if WRITE_GRADIENT:
        factor = tl.load(scale)
        for step in range(0, blocks):
            columns = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(
                logits + columns, mask=columns < V, other=0.0, eviction_policy="evict_first"
            )
            z = z.to(tl.float32) * LOG2_E
            gradient = (tl.exp2(z - log_sum) - tl.where(columns == target, 1.0, 0.0)) * factor
            gradient = tl.where(ignored, 0.0, gradient)
            tl.store(
                logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < V,
                eviction_policy="evict_first",
            )  # fmt: skip


def launch_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    ignore_index: int,
    write_gradient: bool,
    block: int = 8192,
    warps: int = 8,
) -> Tensor:
    """(n,) losses in float32; `logits` (n, V), rows contiguous, are overwritten when the gradient is wanted."""
    n, V = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        with torch.cuda.device_of(logits):
            cross_entropy_kernel[(n,)](
                *(logits, targets, losses, scale, logits.stride(0), V, ignore_index),
                BLOCK=min(block, triton.next_power_of_2(V)),
                WRITE_GRADIENT=write_gradient,
                num_warps=warps,
            )
    return losses
