"""The door to versions 2 to 5: the gated half of the experts as one operator with its backward pass.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.checks import autocast_together, check_swiglu, rows_per_expert
from gptoss.kernels.versions import HAS_TRITON, choose, require_triton

__all__ = ["HAS_TRITON", "grouped_swiglu", "triton_moe_w1w3_silu"]


def triton_moe_w1w3_silu(
    x_sorted: Float[Tensor, "slots C"],
    expert_ids_sorted: Int[Tensor, "slots"],
    counts: Int[Tensor, "E"],
    offsets: Int[Tensor, "E"],
    W1_stack: Float[Tensor, "E F C"],
    W3_stack: Float[Tensor, "E F C"],
) -> Float[Tensor, "slots F"]:
    """Apply the gated half of each expert to its own run of slots, in one Triton kernel.

        h[r] = silu(W1[e] x[r]) * (W3[e] x[r]),     e = expert_ids_sorted[r]

    The version is chosen by GPU and dtype (``versions.chosen_version``) and logged once. Compile and launch errors are raised
    as they are; no other path takes over.

    Args:
        x_sorted: (slots, C) token rows sorted by expert; any strides.
        expert_ids_sorted: (slots,) integer, rising. Counts say the same; only the shape is checked.
        counts: (E,) integer, slots per expert; they sum to the number of slots (checked where the host has them at hand).
        offsets: (E,) integer, first slot of each expert. Counts say the same; only the shape is checked.
        W1_stack: (E, F, C) gate weights; any strides.
        W3_stack: (E, F, C) up weights; any strides.

    Returns:
        (slots, F) hidden rows in the order of ``x_sorted``.

    Raises:
        ImportError: without Triton.
        ValueError: on shapes or dtypes that do not fit, or a GPU or dtype that the kernels do not run on.
        RuntimeError: for CPU tensors without Triton's interpreter.

    Source: the source documents' public name; chapter 10.
    """
    require_triton()
    if expert_ids_sorted.shape != x_sorted.shape[:1]:
        raise ValueError(
            f"expert_ids_sorted must have one id for each of the {x_sorted.shape[0]} slots, got "
            f"{tuple(expert_ids_sorted.shape)}; pass the ids that sorted the rows"
        )
    if offsets.shape != counts.shape:
        raise ValueError(
            f"offsets must have one entry for each of the {counts.shape[0]} experts, got "
            f"{tuple(offsets.shape)}; pass counts.cumsum(0) - counts"
        )
    return grouped_swiglu(x_sorted, counts, W1_stack, W3_stack)


def grouped_swiglu(
    x_sorted: Float[Tensor, "R C"],
    counts: Int[Tensor, "E"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    version: str = "auto",
) -> Float[Tensor, "R F"]:
    """Apply the gated half of each expert with a version by name; arguments and layout are the oracle's.

    Args:
        x_sorted, counts, w1, w3: as ``grouped_swiglu_reference``.
        version: "auto", "documents", "tuned" or "persistent".

    Returns:
        (R, F) hidden rows.

    Raises:
        As ``triton_moe_w1w3_silu``.

    Source: chapter 10, versions 2 to 5.
    """
    require_triton()
    x_sorted, w1, w3 = autocast_together(x_sorted, w1, w3)
    check_swiglu(x_sorted, counts, w1, w3)
    return _swiglu(x_sorted, counts, w1, w3, version)


@torch.library.custom_op("gptoss::grouped_swiglu", mutates_args=())
def _swiglu(x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, version: str) -> Tensor:
    with torch.cuda.device_of(x):  # Triton launches on the current device
        choice = choose(x, version)
        if counts.device.type == "cpu":
            rows_per_expert(counts, x.shape[0])
        if choice.version == "documents":
            from gptoss.kernels.swiglu_documents import swiglu_documents

            return swiglu_documents(x, counts, w1, w3)
        if choice.version == "tuned":
            from gptoss.kernels.swiglu_tuned import swiglu_tuned

            return swiglu_tuned(x, counts, w1, w3, choice.tiles["tuned"])
        from gptoss.kernels.descriptors import pad_to_engine
        from gptoss.kernels.expert_tiles import tile_table
        from gptoss.kernels.swiglu_persistent import swiglu_persistent

        tiles, ffn = choice.tiles["swiglu"], w1.shape[1]
        table = tile_table(counts, x.shape[0], tiles.m)
        x = pad_to_engine(x, (1,))
        w1, w3 = pad_to_engine(w1, (1, 2)), pad_to_engine(w3, (1, 2))
        hidden, _ = swiglu_persistent(x, table, w1, w3, tiles)
        return hidden[:, :ffn].contiguous()


@_swiglu.register_fake
def _(x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, version: str) -> Tensor:
    return x.new_empty(x.shape[0], w1.shape[1])


@torch.library.custom_op("gptoss::grouped_swiglu_backward", mutates_args=())
def _swiglu_backward(
    grad: Tensor, x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, version: str
) -> tuple[Tensor, Tensor, Tensor]:
    from gptoss.kernels.swiglu_backward import swiglu_backward

    with torch.cuda.device_of(x):  # Triton launches on the current device
        return swiglu_backward(grad, x, counts, w1, w3, choose(x, version).tiles)


@_swiglu_backward.register_fake
def _(
    grad: Tensor, x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, version: str
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), w1.new_empty(w1.shape), w3.new_empty(w3.shape)


def _context(ctx, inputs, output):
    *tensors, ctx.version = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, grad):
    if (
        ctx.version == "documents"
    ):  # differentiates a recomputed graph, which an operator cannot; eager mode only
        from gptoss.kernels.swiglu_documents import documents_backward

        dx, dw1, dw3 = documents_backward(grad, *ctx.saved_tensors)
    else:
        dx, dw1, dw3 = _swiglu_backward(grad, *ctx.saved_tensors, ctx.version)
    return dx, None, dw1, dw3, None


_swiglu.register_autograd(_gradient, setup_context=_context)
