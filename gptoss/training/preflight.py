"""Everything that can be wrong with a run is found before anything is written (chapter 17)."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from gptoss.config import RunConfig
from gptoss.data.tokenizers import Tokenizer
from gptoss.model.moe.dispatch import require_triton_on
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.distributed import World
from gptoss.training.journal import read_journal
from gptoss.training.memory import predict_run_memory
from gptoss.training.plan import AUTO_REFERENCE, BatchPlan, plan_batches, sequences_per_step
from gptoss.training.reporter import JOURNAL_FILE
from gptoss.training.restore import require_same_rotation
from gptoss.training.run_data import RunData, open_run_data
from gptoss.training.trackers import require_tensorboard


@dataclass(frozen=True)
class Preflight:
    """A run that can start.

    `first_step` is the step to go on from, `resumes` whether a checkpoint is loaded, `checkpoints` the complete steps
    in the directory. Memory in GiB; the limit is None where it is not known.
    """

    data: RunData
    batch: BatchPlan
    first_step: int
    resumes: bool
    checkpoints: list[int]
    predicted_gib: float
    limit_gib: float | None


def check_run(run: RunConfig, resume: str | int, world: World) -> Preflight:
    """Open the data, find the checkpoint, cut the step; write nothing but the cache of the default corpus.

    Args:
        run: the configuration.
        resume: "auto", "never" or a step.
        world: the processes.

    Raises:
        ValueError, OSError: what is wrong, in one line.
    """
    training, on_gpu = run.training, world.device.type == "cuda"
    limit = device_memory_gib(world.device)
    share = max(1, sequences_per_step(training) // world.size)

    def predicted(micro_batch: int) -> float:
        return predict_run_memory(
            run.model,
            training,
            micro_batch,
            accumulation=max(1, share // micro_batch),
            world_size=world.size,
            device="cuda" if on_gpu else "cpu",
        ).gib

    check_kernels(run, world.device)
    check_recording(run, world)
    check_directory(Path(training.save_dir))
    if training.sample_interval and not training.sample_prompt:
        raise ValueError("training.sample_prompt is empty: give a text to go on from, as in 'def '")
    if training.tensorboard:
        world.from_main(require_tensorboard)
    batch = plan_batches(
        training,
        run.model.max_seq_len,
        world.size,
        predicted,
        limit,
        auto_at_most=None if on_gpu else AUTO_REFERENCE,
    )
    first_step, resumes, checkpoints = world.from_main(lambda: find_start(run, resume))
    if resumes:
        world.from_main(lambda: require_same_rotation(Path(training.save_dir), run))
    # Read for its errors alone: a journal that cannot go on is refused before anything is written.
    world.from_main(lambda: len(read_journal(Path(training.save_dir) / JOURNAL_FILE)))
    data = open_run_data(run, world)
    check_sample_prompt(run, data.tokenizer)
    return Preflight(
        data, batch, first_step, resumes, checkpoints, predicted(batch.micro_batch), limit
    )


def check_kernels(run: RunConfig, device: torch.device) -> None:
    """See that the configured kernels can train on a device.

    Raises:
        ValueError, ImportError: they cannot; the message says what to set.
    """
    if run.model.attention_backend == "flex" and device.type != "cuda":
        raise ValueError(
            f"model.attention_backend = 'flex' has no backward pass on {device.type}: set model.attention_backend=auto"
        )
    if run.model.moe_dispatch == "triton_grouped":
        require_triton_on(device)


def check_recording(run: RunConfig, world: World) -> None:
    """See that a step can be recorded as a CUDA graph where that is asked for.

    Raises:
        ValueError: on a CPU or several processes, or with kernels that ask the host for something.
    """
    if not run.training.cuda_graph:
        return
    if world.device.type != "cuda" or world.size > 1:
        raise ValueError(
            f"training.cuda_graph records the step of one process on one GPU, got {world.size} on {world.device.type}: "
            "set training.cuda_graph=false"
        )
    if run.model.moe_dispatch != "triton_grouped":
        raise ValueError(
            f"training.cuda_graph: moe_dispatch = {run.model.moe_dispatch!r} may ask for the rows of each expert; set "
            "model.moe_dispatch=triton_grouped"
        )
    if run.model.attention_backend not in ("auto", "triton"):
        raise ValueError(
            f"training.cuda_graph records the kernels of attention_backend auto or triton, got {run.model.attention_backend!r}"
        )


def check_sample_prompt(run: RunConfig, tokenizer: Tokenizer | None) -> None:
    """See that the model can go on from the sample prompt, where samples are written at all.

    Args:
        run: the configuration.
        tokenizer: of the run's data; None, without which no sample is written.

    Raises:
        ValueError: the prompt has more tokens than the model reads.
    """
    if not run.training.sample_interval or tokenizer is None:
        return
    length, most = len(tokenizer.encode(run.training.sample_prompt)), run.model.eval_max_seq_len
    if length > most:
        raise ValueError(
            f"training.sample_prompt is {length} tokens long, more than model.eval_max_seq_len = {most}: shorten it"
        )


def check_directory(directory: Path) -> None:
    """See that a directory can be written, or made, without making it.

    Raises:
        NotADirectoryError, PermissionError: it cannot; the message names what stands in the way.
    """
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"training.save_dir = {directory}: {nearest} is a file, not a directory; choose another"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(
            f"training.save_dir = {directory}: {nearest} cannot be written; choose another with "
            "--set training.save_dir=…"
        )


def find_start(run: RunConfig, resume: str | int) -> tuple[int, bool, list[int]]:
    """Which step a run goes on from.

    Returns:
        (step, whether it is loaded from a checkpoint, all complete steps of the directory).

    Raises:
        ValueError: `resume` is none of its values, a fresh start in a directory that holds checkpoints, a step that is
            not there, or one behind the end of the run.
    """
    manager = CheckpointManager(run.training.save_dir)
    present = manager.list_checkpoints() if Path(run.training.save_dir).is_dir() else []
    if resume == "never":
        if present:
            raise ValueError(
                f"{run.training.save_dir} holds checkpoints up to step {present[-1]}: resume with --resume auto, or "
                "choose another directory with --set training.save_dir=…"
            )
        return 0, False, present
    if resume == "auto":
        step = manager.latest_step() if present else None
        if present and step is None:
            raise ValueError(
                f"no checkpoint in {run.training.save_dir} is undamaged (tried {', '.join(map(str, present))}): restore "
                "one, or choose another directory with --set training.save_dir=…"
            )
    elif isinstance(resume, int) and not isinstance(resume, bool):
        if resume not in present:
            known = ", ".join(map(str, present)) or "none"
            raise ValueError(
                f"no complete checkpoint of step {resume} in {run.training.save_dir}; there: {known}"
            )
        step = resume
    else:
        raise ValueError(f'resume = {resume!r}: expected "auto", "never" or a step')
    if step is None:
        return 0, False, present
    if step > run.training.total_steps:
        raise ValueError(
            f"the checkpoint in {run.training.save_dir} is of step {step}, behind training.total_steps = "
            f"{run.training.total_steps}: raise total_steps or choose another directory"
        )
    return step, True, present


def device_memory_gib(device: torch.device) -> float | None:
    """What a process may use: 95% of what is free on its GPU, or of the machine's memory; None where nobody can say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 0.95 / 2**30
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.95 / 2**30
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
