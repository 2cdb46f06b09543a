"""torch.compile, a block at a time (chapter 14)."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType

import torch

from gptoss.model.transformer import GPTOSS, GPTOSSBlock

# Modes that record CUDA graphs, and what they become. A graph replays fixed shapes at fixed addresses: rows per expert
# change with every batch, grouped_mm cannot be captured where PyTorch has no kernel for it, and each block runs several times before its gradients are
# used (accumulation, recomputation), which overwrites the graph's outputs. The kernels stay as tuned.
WITHOUT_CUDA_GRAPHS = {
    "max-autotune": "max-autotune-no-cudagraphs",
    "reduce-overhead": "default",
}
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def block_compile_mode(mode: str, device: torch.device) -> str:
    """The mode that a block is compiled with: without CUDA graphs, and without tuning where that is for GPUs only.

    Raises:
        ValueError: a mode that torch.compile does not have.
    """
    if mode not in COMPILE_MODES:
        raise ValueError(
            f"training.compile_mode = {mode!r}: expected one of {', '.join(COMPILE_MODES)}"
        )
    if device.type != "cuda":
        return "default"
    return WITHOUT_CUDA_GRAPHS.get(mode, mode)


def compile_blocks(model: GPTOSS, mode: str, device: torch.device) -> None:
    """Compile each block's forward as one graph; the embedding, the head and the loop between blocks stay as they are.

    Blocks of a kind share their code, so two are compiled, not twelve; another model in the same process shares nothing
    with them, and its shapes neither count nor leave a trace here. Names in the state dict do not change; what DDP, FSDP2
    and gradient checkpointing hook around a block stays outside its graph. A graph break is an error.

    Args:
        model: changed in place. Call before `distributed.spread`.
        mode: `training.compile_mode`.
        device: where the model is.
    """
    chosen = block_compile_mode(mode, device)
    forward = _forward_of_its_own()
    for block in model.blocks:
        block.forward = torch.compile(MethodType(forward, block), fullgraph=True, mode=chosen)


def drop_compiled_blocks(model: GPTOSS) -> None:
    """Give each block its plain forward back, for good; what DDP and FSDP2 hook around a block stays.

    Args:
        model: changed in place. Blocks that were never compiled stay as they are.
    """
    for block in model.blocks:
        block.__dict__.pop("forward", None)


@contextmanager
def eager_blocks(model: GPTOSS) -> Iterator[None]:
    """Run the blocks uncompiled for a while: a sample's many lengths are not worth compiling for."""
    compiled = [block.__dict__.pop("forward", None) for block in model.blocks]
    try:
        yield
    finally:
        for block, forward in zip(model.blocks, compiled, strict=True):
            if forward is not None:
                block.forward = forward


def _forward_of_its_own() -> FunctionType:
    """A copy of a block's forward that Dynamo takes for another function.

    It counts graphs, eight at most, by code object, and remembers which sizes have changed by the code's file, line and
    name: a second model of another width would be compiled for any size.
    """
    shared = GPTOSSBlock.forward
    code = shared.__code__.replace(co_name=f"forward_{uuid.uuid4().hex}")
    copy = FunctionType(
        code, shared.__globals__, "forward", shared.__defaults__, shared.__closure__
    )
    copy.__kwdefaults__ = shared.__kwdefaults__
    return copy
