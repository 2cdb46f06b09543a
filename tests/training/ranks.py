"""Several processes on gloo inside one test: forked, so that nothing is imported again."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def on_ranks(directory: Path, work: Callable[[int], None], world: int = 2) -> None:
    """Run `work(rank)` in `world` processes; an assertion that fails in one of them fails the test."""
    meeting = directory / "rendezvous"

    def run(rank: int) -> None:
        store = dist.FileStore(str(meeting), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        work(rank)
        dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=run, args=(rank,)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    for child in children:
        child.kill()
    meeting.unlink(missing_ok=True)
    assert [child.exitcode for child in children] == [0] * world
