"""Dispatch: sort the token copies by expert, run each expert on its group, combine the answers.

Nothing here depends on the data's values for its shapes, and nothing uses atomics: the same input gives the same bits.

Shapes: N tokens, C model width, F ffn width, E experts, k experts a token, R = N·k routed rows.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from gptoss.config import MOE_DISPATCHES
from gptoss.kernels.expert_layer import grouped_experts
from gptoss.kernels.loop import grouped_linear_loop, grouped_swiglu_loop
from gptoss.kernels.versions import require_triton

from .balance import count_experts


class DispatchPlan(NamedTuple):
    """Where each of the R routed rows goes. Row r of the sorted order is slot `order[r]` = token·k + choice."""

    order: Int[Tensor, "R"]
    inverse: Int[Tensor, "R"]
    counts: Int[Tensor, "E"]


def plan_dispatch(
    indices: Int[Tensor, "N k"], n_experts: int, dispatch: str = "stacked"
) -> DispatchPlan:
    """Group the N·k slots by expert with one stable sort; expert e's rows follow those of expert e − 1.

    The plan is the same for every dispatch; "triton_grouped" makes it with a counting sort in two kernels.

    Source: chapter 9.
    """
    if dispatch == "triton_grouped":
        if not torch.compiler.is_compiling():  # the question would break the graph
            require_triton_on(indices.device)
        from gptoss.kernels.expert_order import order_by_expert  # needs Triton

        return DispatchPlan(*order_by_expert(indices, n_experts))
    flat = indices.flatten()  # (R,)
    order = torch.argsort(flat, stable=True)
    slots = torch.arange(flat.numel(), device=flat.device)
    inverse = torch.empty_like(order).scatter_(0, order, slots)
    return DispatchPlan(order, inverse, count_experts(indices, n_experts))


def require_triton_on(device: torch.device) -> None:
    """Refuse a device on which the expert kernels cannot run; on a CPU they run in Triton's interpreter alone.

    Raises:
        ImportError: without Triton.
        ValueError: no CUDA device, and Triton does not interpret.
    """
    require_triton()
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"moe_dispatch = 'triton_grouped' needs a CUDA device, got {device.type}: set model.moe_dispatch=stacked, "
            "or TRITON_INTERPRET=1 in the environment to interpret the kernels"
        )


def gather_rows(x: Float[Tensor, "N C"], plan: DispatchPlan, k: int) -> Float[Tensor, "R C"]:
    """Copy each token's row k times, in the sorted order. Its gradient is a gather and a sum over k, not an atomic add."""
    return _GatherRows.apply(x, plan.order, plan.inverse, k)


def combine_rows(
    y: Float[Tensor, "R C"], weights: Float[Tensor, "N k"], plan: DispatchPlan
) -> Float[Tensor, "N C"]:
    """Bring the experts' answers back to their tokens and add them up, weighted: Σ_j weights[n, j]·y[row of (n, j)]."""
    answers = _Permute.apply(y, plan.inverse, plan.order).unflatten(0, weights.shape)  # (N, k, C)
    return (answers * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)


def run_experts(
    x: Float[Tensor, "N C"],
    weights: Float[Tensor, "N k"],
    plan: DispatchPlan,
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    w2: Float[Tensor, "E C F"],
    dispatch: str,
) -> Float[Tensor, "N C"]:
    """Send each token through its experts: Σ_j weights[n, j] · W2·(silu(W1 x_n) ⊙ W3 x_n) of expert (n, j).

    Args:
        x: one row a token.
        weights: routing weights.
        plan: of the same tokens' expert indices.
        w1, w3, w2: stacked expert weights; under autocast each path casts them to its dtype.
        dispatch: "stacked" (a loop over experts, the oracle), "grouped_mm" (PyTorch's grouped matrix product) or
            "triton_grouped" (gather, experts, weighting and sum in Triton kernels).

    Raises:
        ImportError: "triton_grouped" without Triton. A kernel that fails to compile or launch raises as it is: no path
            falls back to another.
        ValueError: an unknown dispatch.

    Source: chapters 9 and 10.
    """
    if dispatch == "triton_grouped":
        return grouped_experts(x, weights, plan.order, plan.inverse, plan.counts, w1, w3, w2)
    rows = gather_rows(x, plan, weights.shape[1])
    if dispatch == "stacked":
        rows = grouped_swiglu_loop(rows, plan.counts, w1, w3)
        rows = grouped_linear_loop(rows, plan.counts, w2)
    elif dispatch == "grouped_mm":
        rows = _run_grouped_mm(rows, plan.counts, w1, w3, w2)
    else:
        raise ValueError(f"moe_dispatch {dispatch!r}: expected one of {', '.join(MOE_DISPATCHES)}")
    return combine_rows(rows, weights, plan)


def _run_grouped_mm(x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):  # autocast does not know grouped_mm
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w1, w3, w2 = (t.to(dtype) for t in (x, w1, w3, w2))
    ends = counts.cumsum(0).to(torch.int32)
    gate_up = torch.cat((w1, w3), dim=1).transpose(1, 2)  # (E, C, 2F)
    gate, up = F.grouped_mm(x, gate_up, offs=ends).chunk(2, dim=-1)  # each (R, F)
    return F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; unlike indexing, its gradient knows that no row is taken twice."""

    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.save_for_backward(inverse)
        return rows[index]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
