"""One process or many: who is who, how the model is spread, and when gradients travel (chapter 17).

`torchrun --nproc-per-node 2 -m gptoss pretrain …` starts the processes; PyTorch's own engines do the rest. With DDP every
process holds the whole model; with FSDP2 each holds a share of every block, of its gradients and of Adam's moments.
Both average gradients over the processes. On several machines the command is the same on each, with `--nnodes`,
`--node-rank` and `--rdzv-endpoint` of torchrun.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gptoss.model.transformer import GPTOSS

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process among all processes of the run, and the device that it trains on."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """A tensor summed over all processes, in place; alone, the tensor as it is."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def from_main(self, work: Callable[[], Result]) -> Result:
        """Do something on the main process alone; every process gets its result, or raises its error."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = work()
            except Exception as error:  # raised below, on every process alike
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


@contextlib.contextmanager
def join_world(device: torch.device | str | None = None) -> Iterator[World]:
    """Join the other processes of a torchrun launch for as long as the context lasts; without one, be the only process.

    Args:
        device: where to train; the process's own GPU when left out, else the CPU. NCCL connects GPUs, gloo CPUs.

    Raises:
        ValueError: a CUDA device on a machine without one, or several processes told to share one numbered device.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {chosen}: PyTorch sees no CUDA device here; leave it out or say cpu"
        )
    launched = dist.is_initialized() or dist.is_torchelastic_launched()
    if not launched:
        if chosen.type == "cuda":
            chosen = torch.device("cuda", chosen.index or 0)
            torch.cuda.set_device(chosen)
        yield World(chosen)
        return
    if chosen.type == "cuda":
        if device is not None and torch.device(device).index is not None:
            raise ValueError(
                f"device {device}: under torchrun each process takes its own; say cuda"
            )
        local = dist.get_node_local_rank(fallback_rank=0)
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU of its own ({torch.cuda.device_count()} here): "
                "start as many processes as there are GPUs (--nproc-per-node)"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    mine = not dist.is_initialized()
    if mine:
        if chosen.type == "cuda":
            dist.init_process_group("nccl", device_id=chosen)
        else:
            dist.init_process_group("gloo")
    try:
        yield World(chosen, dist.get_rank(), dist.get_world_size())
    finally:
        if mine:
            gc.collect()  # a DDP module that outlives its process group waits for it for ever
            dist.destroy_process_group()


def spread(model: GPTOSS, world: World, engine: str) -> nn.Module:
    """Spread a model over the processes; alone, the model itself. Build the optimiser from its parameters afterwards.

    Args:
        model: the plain model, on the world's device, with equal weights everywhere.
        world: from `join_world`.
        engine: "ddp" or "fsdp2".

    Returns:
        the module to call in training. With FSDP2 it is `model`, changed in place.
    """
    if world.size == 1:
        return model
    if engine == "ddp":
        return DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # the buffers are tables that every process computes alike
            gradient_as_bucket_view=True,  # one copy of the gradients, not two
        )
    mesh = dist.init_device_mesh(world.device.type, (world.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def gradients_travel(module: nn.Module, now: bool) -> Iterator[None]:
    """Exchange gradients after the backward pass inside, or only add them up here (all micro-steps but the last)."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        yield
    elif isinstance(module, DistributedDataParallel) and not now:
        with module.no_sync():
            yield
    else:
        yield
