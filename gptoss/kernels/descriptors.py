"""Tensor descriptors: what the copy engine of a Hopper GPU needs to know to fetch a tile by its coordinates.

A descriptor asks for a contiguous last axis and for a base and strides that are multiples of 16 bytes. Reads past an extent
give zeros, so a last, partial tile needs no mask. On GPUs without the engine Triton turns the same code into masked loads.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ENGINE_BYTES = 16
MAX_STRIDE_BYTES = 1 << 40


def describable(tensor: Tensor) -> Tensor:
    """The tensor itself where a descriptor can describe it, else a contiguous copy (its width must be whole 16 bytes)."""
    aligned = tensor.data_ptr() % ENGINE_BYTES == 0 and all(
        stride > 0 and stride * tensor.itemsize % ENGINE_BYTES == 0
        for stride in tensor.stride()[:-1]
    )
    return (
        tensor
        if aligned and tensor.stride(-1) == 1
        else tensor.clone(memory_format=torch.contiguous_format)
    )


def pad_to_engine(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Append zeros to the given axes until each is a whole number of 16 bytes; the tensor itself where they already are."""
    multiple = ENGINE_BYTES // tensor.itemsize
    missing = {axis % tensor.ndim: -tensor.shape[axis] % multiple for axis in axes}
    if not any(missing.values()):
        return tensor
    pads = [n for axis in reversed(range(tensor.ndim)) for n in (0, missing.get(axis, 0))]
    return torch.nn.functional.pad(tensor, pads)


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a tensor for tiles of the given block shape."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def describe_pair(first: Tensor, second: Tensor, block: list[int]) -> tuple[TensorDescriptor, bool]:
    """Describe two equal-shaped tensors as one with a leading axis of 2, without copying them.

    The stride of the leading axis is the distance between the two allocations. It must be positive, so the one that lies
    lower in memory comes first; the flag says whether that is ``second``. Allocations a terabyte apart are stacked instead.
    The descriptor holds one of the two alive: the caller keeps both until the launch.

    Returns:
        The descriptor of (2, *shape) and whether the order is (second, first).
    """
    low, high = (first, second) if first.data_ptr() < second.data_ptr() else (second, first)
    distance = high.data_ptr() - low.data_ptr()
    if distance >= MAX_STRIDE_BYTES or distance % ENGINE_BYTES or first.stride() != second.stride():
        both = torch.stack((first, second))
        return describe(both, block), False
    strides = [distance // first.itemsize, *first.stride()]
    return TensorDescriptor(low, [2, *first.shape], strides, block), low is second
