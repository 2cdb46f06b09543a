"""Margins around the results of a kernel, so that a store without a mask is seen instead of spoiling other memory.

Triton's interpreter writes where it is told to, also behind the end of a tensor. There lies whatever the process
keeps: the result looks right, or Python dies later. While an answer runs, the functions of PyTorch that make results
lay a margin of known numbers on both sides of them.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MAKERS = ("zeros", "zeros_like", "empty", "empty_like")
MARGIN = 4096  # numbers on each side: more than one tile of any exercise
MARK = 101  # fits every dtype


def with_margins(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with margins around every tensor that it makes.

    Args:
        function: an answer that allocates its results with one of MAKERS.

    Returns:
        A function of the same signature and results.

    Raises:
        RuntimeError: when called, if the function wrote into a margin.
    """

    @functools.wraps(function)
    def watched(*arguments: Any) -> Any:
        with _margins() as rooms:
            result = function(*arguments)
        for room in rooms:
            mark = torch.full((MARGIN,), MARK, dtype=room.dtype)
            if not (torch.equal(room[:MARGIN], mark) and torch.equal(room[-MARGIN:], mark)):
                raise RuntimeError("a program wrote outside the result: is the store masked?")
        return result

    return watched


@contextmanager
def _margins() -> Iterator[list[Tensor]]:
    """Replaces PyTorch's makers; the list fills with the whole tensors, margins and all."""
    rooms: list[Tensor] = []

    def with_room(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*arguments: Any, **options: Any) -> Tensor:
            plain = make(*arguments, **options)
            if plain.device.type != "cpu" or plain.requires_grad:
                return plain
            extent = plain.untyped_storage().nbytes() // plain.itemsize
            room = torch.full((extent + 2 * MARGIN,), MARK, dtype=plain.dtype)
            rooms.append(room)
            return room.as_strided(plain.shape, plain.stride(), MARGIN).copy_(plain)

        return made

    makers = {name: getattr(torch, name) for name in MAKERS}
    try:
        for name, make in makers.items():
            setattr(torch, name, with_room(make))
        yield rooms
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)
