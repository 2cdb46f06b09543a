"""The largest tensor that a call makes, at a length that fits and computed for one that does not.

Every tensor that PyTorch allocates passes through its dispatcher, where it can be looked at: no GPU is needed, and a
mask shows beside the scores that it is added to.

Shapes: T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .reading import Row, Run, compare

LONG = 131_072


class _Watch(TorchDispatchMode):
    """Keeps the size of the largest storage among all results."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


def largest_tensor(run: Run) -> int:
    """Bytes of the largest tensor made, or seen as a view, during a call."""
    with _Watch() as watch:
        run()
    return watch.bytes


def extrapolate(half: int, whole: int, length: int, target: int = LONG) -> int:
    """a·t² + b·t at a target length, through its values at half a length and at the whole.

    What grows more slowly than the length (a < 0) is given its linear bound, whole·target/length.

    Args:
        half, whole: at length/2 and at length.
        length: an even number of tokens.
        target: tokens.
    """
    square = 2 * whole - 4 * half  # a·length²
    linear = 4 * half - whole  # b·length
    if square < 0:
        square, linear = 0, whole
    return round(square * target**2 / length**2 + linear * target / length)


def compare_largest(
    where: str, length: int, off: Callable[[int], Run], on: Callable[[int], Run],
    ours: Callable[[int], Run] | None = None,
) -> list[Row]:  # fmt: skip
    """Two rows: the largest tensor at `length`, and at 131,072 by `extrapolate`. Each side makes a call for a length."""
    found: list[list[int]] = []
    for side in (off, on, ours):
        if side is not None:
            half, whole = (largest_tensor(side(n)) for n in (length // 2, length))
            found.append([whole, extrapolate(half, whole, length)])
    rows = []
    for column, name in enumerate((f"{length:,}", f"{LONG:,}, computed")):
        sizes = [side[column] for side in found]
        measure = "bytes of the largest tensor"
        rows.append(
            compare(
                f"{where}, T = {name}",
                measure,
                [sizes[0]],
                [sizes[1]],
                ours=sizes[2] if ours else None,
            )
        )
    return rows
