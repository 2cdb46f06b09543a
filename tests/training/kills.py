"""Kill a process that saves checkpoints, or one that trains, again and again, and look at what it left.

Every save of `save` has a serial number, and every tensor and the meta file of that save hold it: a state put together from two
saves shows. The child tells its parent the serial number once `save` has returned; from then on it must never be lost.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from gptoss.config import RunConfig
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.pretrain import pretrain

SYSTEM_CALLS = ("open", "fsync", "replace", "unlink")  # where a save touches the disk


def state_of(serial: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimiser in which every number is `serial`."""
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        nn.init.constant_(parameter, serial)
        moment = torch.full_like(parameter, serial)
        optimizer.state[parameter] = {
            "step": torch.tensor(serial),
            "exp_avg": moment,
            "exp_avg_sq": moment.clone(),
        }
    return model, optimizer


def save(directory: Path, serial: int) -> None:
    """One save and the pruning after it; every third save overwrites the step of the one before."""
    manager = CheckpointManager(directory)
    manager.save(*state_of(serial), step=serial - serial % 3 // 2, extra_meta={"serial": serial})
    manager.keep_last_n(1)


def newest_serial(directory: Path) -> int:
    """Load the newest checkpoint and return its serial number, or 0 where there is none; fail where it is mixed."""
    manager = CheckpointManager(directory)
    if manager.latest_step() is None:
        return 0
    model, optimizer = state_of(-1)
    serial = manager.load(model, optimizer=optimizer)["serial"]
    held = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    for parameter in model.parameters():
        held |= {
            value for t in optimizer.state[parameter].values() for value in t.flatten().tolist()
        }
    assert held == {float(serial)}, f"save {serial} holds numbers of other saves: {sorted(held)}"
    return serial


def in_child(
    work: Callable[[Callable[[int], None]], None], after: float | None = None
) -> tuple[int, int]:
    """Run `work` in a forked process, killed after some seconds if it is still running.

    Returns:
        (the last number that it reported or -1, the number of the signal that ended it or 0).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            work(lambda number: os.write(writer, number.to_bytes(4, "little")))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    os.close(writer)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    reports = b""
    while part := os.read(reader, 1 << 16):
        reports += part
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    last = int.from_bytes(reports[-4:], "little") if reports else -1
    return last, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_before_call(directory: Path, serial: int, call: int) -> bool:
    """Save once in a child that kills itself before its n-th call into the file system; True where it came to that."""

    def work(report: Callable[[int], None]) -> None:
        calls = 0

        def counted(function: Callable) -> Callable:
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return run

        for name in SYSTEM_CALLS:
            setattr(os, name, counted(getattr(os, name)))
        save(directory, serial)

    return in_child(work)[1] == signal.SIGKILL


def kill_at_random(directory: Path, kills: int, seed: int = 0) -> int:
    """Kill a child that saves without pause, `kills` times; check what stands after each, and return the saves made."""
    generator = random.Random(seed)
    kept = newest_serial(directory)
    save(directory, kept + 1)  # the first one is slow
    start = time.perf_counter()
    in_child(lambda report: save(directory, kept + 2))
    longest = min(
        4 * (time.perf_counter() - start), 0.5
    )  # so that children live for about two saves
    kept = newest_serial(directory)

    for _ in range(kills):

        def work(report: Callable[[int], None], first: int = kept + 1) -> None:
            for serial in range(first, first + 100_000):
                save(directory, serial)
                report(serial)

        reported, _ = in_child(work, after=generator.uniform(0.0, longest))
        found = newest_serial(directory)
        assert max(kept, reported) <= found <= max(kept, reported) + 1, (kept, reported, found)
        kept = found
    return kept


@dataclass
class Toll:
    """How often each run was killed, and how many of all kills fell into a save."""

    per_run: list[int] = field(default_factory=list)
    during_a_save: int = 0

    @property
    def kills(self) -> int:
        return sum(self.per_run)


def kill_trainer(make_run: Callable[[str], RunConfig], kills: int, seed: int = 0) -> Toll:
    """Kill the trainer at random moments until `kills` kills are done; let every run come to its end in between.

    A run that ends before it could be killed often enough is followed by another in a new directory. After each kill
    the newest checkpoint is complete and holds every step up to the last save that was due.

    Args:
        make_run: name of a directory → the configuration of a run that saves there.
        kills: how many.
        seed: of the moments.

    Returns:
        The toll. Run i saved into "killed<i>"; its files are there to compare with those of "uninterrupted".
    """
    generator = random.Random(seed)
    start = time.perf_counter()
    pretrain(make_run("uninterrupted"), progress=False)
    whole = time.perf_counter() - start
    toll = Toll()
    while toll.kills < kills:
        run = make_run(f"killed{len(toll.per_run)}")
        toll.per_run.append(0)
        directory = Path(run.training.save_dir)
        manager = CheckpointManager(directory)
        reached = 0
        while reached < run.training.total_steps:

            def work(report: Callable[[int], None], run: RunConfig = run) -> None:
                pretrain(run, progress=False, on_step=lambda step, _: report(step))

            # Most of a life goes into starting, so a life is about as long as the whole run took.
            life = generator.uniform(0, whole) if toll.kills < kills else None
            last, signal_number = in_child(work, life)
            if signal_number == signal.SIGKILL:
                toll.per_run[-1] += 1
                toll.during_a_save += is_half_saved(directory)
            found = manager.latest_step() or 0
            interval = run.training.save_interval
            due = (last - 1) // interval * interval if last > 0 else 0
            assert found >= max(reached, due), (found, reached, last)
            reached = found
    return toll


def is_half_saved(directory: Path) -> bool:
    """Whether a save was cut off: a staged file, or files of a step that has no meta file."""
    names = [path.name for path in directory.glob("*_step_*")]
    steps = {name.split("_step_")[1].split(".")[0] for name in names}
    return any(n.endswith(".partial") for n in names) or any(
        f"meta_step_{step}.json" not in names for step in steps
    )
