"""Save and load the whole state of a training run.

Tensors go into safetensors files, everything else into JSON: reading a checkpoint runs no code from it. The files and
the order in which they are written are `checkpoint_files`' subject, the names and layouts of tensors `model_state`'s and
`optimizer_state`'s; this file joins them, for one process or many.
Source: chapter 17 of this book.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from gptoss.training.checkpoint_files import (
    FORMAT,
    CheckpointDirectory,
    CheckpointError,
    read_tensors,
    records_of,
    require_json,
)
from gptoss.training.distributed import World
from gptoss.training.model_state import (
    gathered,
    model_differences,
    named_tensors,
    set_model_tensors,
)
from gptoss.training.optimizer_state import optimizer_mismatch, optimizer_parts, set_optimizer
from gptoss.training.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)
OPTIMIZER, RANDOM, EXTRA = "optimizer.", "random.", "extra."  # what a tensor's name starts with
OWN_KEYS = ("step", "checkpoint", "extra_state")


class CheckpointManager:
    """The checkpoints of one run, in one directory.

    Where torch.distributed is initialised every rank calls `save` and `load`; rank 0 alone writes, the files are the
    same at any world size, and every rank must see the directory. One run at a time may save into a directory: `pretrain`
    locks it (`directory_lock`), this class does not.

    Args:
        save_dir: the directory; the first save creates it.
    """

    def __init__(self, save_dir: str | Path) -> None:
        self.save_dir = Path(save_dir)
        self._directory = CheckpointDirectory(save_dir)

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        step: int,
        scheduler: Stateful | None = None,
        extra_meta: Mapping[str, Any] | None = None,
        extra_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save a step; when this returns it is complete and on the disk.

        The random states of torch, CUDA, NumPy and Python are saved with it, those of every rank.

        Args:
            model: plain or wrapped (torch.compile, DDP, FSDP2).
            optimizer: its state is stored by parameter name; None stores none.
            step: optimiser steps taken.
            scheduler: its state goes into the meta file.
            extra_meta: JSON values to keep in the meta file (data position, guard counters, configuration).
            extra_state: further tensors to keep, by name.

        Raises:
            ValueError: a negative step, a name that is taken, or a value that JSON or safetensors cannot hold.
            OSError: a file could not be written or flushed. It is named, and every earlier checkpoint stands. What was
                written of this step is gone or, where the last flush alone failed, complete: the message says which.
        """
        if step < 0:
            raise ValueError(f"step = {step}: expected the number of steps taken, 0 or more")
        for key in OWN_KEYS:
            if key in (extra_meta or {}):
                raise ValueError(
                    f"extra_meta has the key {key!r}, which checkpoints use: rename it"
                )
        tensors, tied = named_tensors(model)
        optim_tensors: dict[str, Tensor] = {}
        optim_rest: dict[str, Any] | None = None
        if optimizer is not None:
            optim_tensors, optim_rest = optimizer_parts(model, optimizer)
        random_tensors, random_rest = _random_states()
        checkpoint = {
            "format": FORMAT,
            "tied": tied,
            "optimizer": optim_rest,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "random": random_rest,
        }
        meta = {"step": step, **(extra_meta or {}), "checkpoint": checkpoint}
        require_json(meta, "meta")
        world = _world()
        model_data = gathered(tensors, keep=world.is_main)
        optim_data = {
            **_prefixed(OPTIMIZER, gathered(optim_tensors, keep=world.is_main)),
            **_prefixed(EXTRA, gathered(extra_state or {}, keep=world.is_main)),
            **_prefixed(RANDOM, random_tensors),
        }
        world.from_main(lambda: self._directory.write(step, model_data, optim_data, meta))
        if world.is_main:
            logger.info("[checkpoint] saved step %d → %s", step, self.save_dir)

    def load(
        self,
        model: nn.Module,
        step: int | None = None,
        device: str | torch.device = "cpu",
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        strict: bool = True,
        restore_random: bool | None = None,
    ) -> dict[str, Any]:
        """Load a step into a model and, with an optimiser, go on as if the run had never stopped.

        Tensors take the model's dtypes and devices; the optimiser's keep the file's dtypes. Nothing is changed unless
        the files are whole and everything fits.

        Args:
            model: plain or wrapped. On the meta device it becomes real, its tied weights tied.
            step: which one; None takes the latest that is complete and undamaged.
            device: where the tensors of a meta-device model go.
            optimizer: restored by parameter name when given; how it computes (fused, foreach) stays its own.
            scheduler: restored when given.
            strict: every tensor of the model and of the file must have its partner; otherwise the common ones are
                loaded and the rest is logged.
            restore_random: also restore the random states; None does so exactly when an optimiser is given.

        Returns:
            The meta: "step", the keys of extra_meta, "extra_state" (tensors by name) and "checkpoint" (the internals).

        Raises:
            FileNotFoundError: no such step, or none that is complete; damaged ones are named with what is wrong.
            CheckpointError: a file of the step is damaged, or its tensors do not fit the model or the optimiser.
        """
        world = _world()
        chosen, meta = world.from_main(lambda: self._choose(step))
        model_path, optim_path = (self.save_dir / record.name for record in records_of(meta))
        checkpoint = meta["checkpoint"]
        values = read_tensors(model_path)
        for further, name in checkpoint["tied"].items():
            values[further] = values[name]
        _check_fit(model, values, checkpoint["tied"], model_path, strict)
        state = read_tensors(
            optim_path, (RANDOM, EXTRA) if optimizer is None else (OPTIMIZER, RANDOM, EXTRA)
        )
        saved = checkpoint["optimizer"]
        if optimizer is not None and saved is not None:
            mismatch = optimizer_mismatch(model, optimizer, saved)
            if mismatch:
                raise CheckpointError(f"{optim_path}: {mismatch}")
        set_model_tensors(model, values, torch.device(device))
        if optimizer is not None:
            if saved is None:
                logger.warning(
                    "checkpoint of step %d holds no optimiser: it stays as it is", chosen
                )
            else:
                set_optimizer(model, optimizer, _under(OPTIMIZER, state), saved)
        if scheduler is not None and checkpoint["scheduler"] is not None:
            scheduler.load_state_dict(checkpoint["scheduler"])
        if restore_random or (restore_random is None and optimizer is not None):
            saved_ranks = checkpoint["random"]
            if world.rank < len(saved_ranks):  # a new rank keeps its own
                tensors = _under(f"{RANDOM}{world.rank}.", state)
                set_random_state(tensors, saved_ranks[world.rank])
        return {**meta, "extra_state": _under(EXTRA, state)}

    def latest_step(self, at_most: int | None = None) -> int | None:
        """The newest step that is complete and undamaged, or None; newer ones that are not are logged.

        Args:
            at_most: look at this step and earlier ones only.
        """
        for step in reversed(self._directory.steps()):
            if at_most is not None and step > at_most:
                continue
            fault = self._directory.fault(step)
            if fault is None:
                return step
            logger.warning("checkpoint of step %d skipped: %s", step, fault)
        return None

    def list_checkpoints(self) -> list[int]:
        """The complete steps, ascending; lengths are checked, checksums are left to `latest_step` and `load`."""
        return [s for s in self._directory.steps() if not self._directory.fault(s, checksum=False)]

    def delete_checkpoint(self, step: int) -> None:
        """Delete a step's files, complete or not; a step that has none is no error."""
        self._directory.delete(step)

    def keep_last_n(self, n: int) -> None:
        """Delete all but the n newest complete steps, with whatever incomplete steps are older than those.

        Raises:
            ValueError: n is below 1, which would leave nothing to resume from.
        """
        if n < 1:
            raise ValueError(
                f"n = {n}: expected at least 1, or nothing would be left to resume from"
            )
        kept = self.list_checkpoints()[-n:]
        for step in self._directory.steps():
            if kept and step < kept[0]:
                self._directory.delete(step)

    def _choose(self, step: int | None) -> tuple[int, dict[str, Any]]:
        """The step to load and its meta, its files checked byte for byte."""
        chosen = self.latest_step() if step is None else step
        if chosen is None:
            faults = [self._directory.fault(s) for s in self._directory.steps()]
            found = "; ".join(str(fault) for fault in faults) or "it holds no checkpoint file"
            raise FileNotFoundError(f"no complete checkpoint in {self.save_dir}: {found}")
        meta = self._directory.read_meta(chosen)
        fault = self._directory.fault(chosen)
        if fault:
            raise CheckpointError(f"checkpoint of step {chosen} cannot be loaded: {fault}")
        return chosen, meta


def _check_fit(
    model: nn.Module,
    values: Mapping[str, Tensor],
    tied: Mapping[str, str],
    path: Path,
    strict: bool,
) -> None:
    """Hold a file's tensors against the model's names, shapes and ties; further names of the file's own may be extra."""
    missing, unexpected, fault = model_differences(model, values)
    unexpected = [name for name in unexpected if name not in tied]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path}: does not fit the model; missing: {', '.join(missing[:5]) or 'none'} ({len(missing)}), "
            f"unexpected: {', '.join(unexpected[:5]) or 'none'} ({len(unexpected)})"
        )
    if missing or unexpected:
        logger.warning("%s: missing %s, unexpected %s: left as they are", path, missing, unexpected)
    if fault:
        raise CheckpointError(f"{path}: {fault}")


def _world() -> World:
    """This process among those of torch.distributed; the device does not matter to files."""
    device = torch.device("cpu")
    if not (dist.is_available() and dist.is_initialized()):
        return World(device)
    return World(device, dist.get_rank(), dist.get_world_size())


def _random_states() -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Every rank's random states: tensors as "<rank>.<generator>", and the rest in the order of the ranks."""
    own = random_state()
    states: list[Any] = [own]
    if (size := _world().size) > 1:
        states = [None] * size
        dist.all_gather_object(states, own)
    tensors = {f"{rank}.{k}": t for rank, (part, _) in enumerate(states) for k, t in part.items()}
    return tensors, [rest for _, rest in states]


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
