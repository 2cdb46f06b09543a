"""The data of whole steps, ready for the device (chapter 17).

A micro-batches of a step, B batch, T queries.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from gptoss.data.loader import SequenceSource, batches
from gptoss.training.distributed import World
from gptoss.training.plan import BatchPlan


class MicroBatches:
    """Steps of (inputs, targets), each (A, B, T) on this process's device, with the position behind them.

    A step's sequences depend on the seed and the position alone, not on how it is cut or shared. The copy to a GPU
    comes from page-locked memory and does not wait; the next step is fetched while the device works on this one.

    Args:
        source: the training sequences.
        batch: how a step is cut.
        seed: chooses the order.
        world: the processes.
        num_workers: processes that read ahead.
    """

    def __init__(
        self,
        source: SequenceSource,
        batch: BatchPlan,
        seed: int,
        world: World,
        num_workers: int = 0,
    ) -> None:
        self._batch, self._device = batch, world.device
        self._batches = batches(
            source,
            batch.micro_batch,
            seed,
            rank=world.rank,
            world_size=world.size,
            num_workers=num_workers,
        )

    @property
    def position(self) -> int:
        """Sequences handed out so far, all processes together."""
        return self._batches.position

    def seek(self, position: int) -> None:
        """Go on from a position."""
        self._batches.seek(position)

    def next_step(self) -> tuple[Int[Tensor, "A B T"], Int[Tensor, "A B T"]]:
        """The next step's data."""
        parts = [next(self._batches) for _ in range(self._batch.accumulation)]
        inputs, targets = (torch.stack(each) for each in zip(*parts, strict=True))  # (A, B, T)
        if self._device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return (
            inputs.to(self._device, non_blocking=True),
            targets.to(self._device, non_blocking=True),
        )

    def close(self) -> None:
        """End the worker processes."""
        self._batches.close()
