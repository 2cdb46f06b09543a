"""The full pretraining run: from a configuration to a trained model on disk (chapter 17).

`pretrain` is the one entry: the command line and the book's last chapter call it. Each thing that it does is a small
file of this folder; here they meet, in the order in which they happen.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from gptoss.config import RunConfig
from gptoss.data.tokenizers import Tokenizer
from gptoss.model.transformer import GPTOSS
from gptoss.training.assembly import assemble
from gptoss.training.compiling import drop_compiled_blocks
from gptoss.training.directory_lock import hold_directory
from gptoss.training.distributed import World, join_world
from gptoss.training.interrupt import stop_on_signal
from gptoss.training.plan import RunPlan
from gptoss.training.preflight import check_directory, check_run
from gptoss.training.reporter import Reporter
from gptoss.training.restore import changed_settings, write_description
from gptoss.training.trainer import OnStep, Trainer
from gptoss.training.validation import (
    Validation,
    Validator,
    unigram_baseline,
    validation_windows,
)


@dataclass(frozen=True)
class PretrainResult:
    """What a call of `pretrain` came to.

    Attributes:
        step: steps that the model has taken, earlier calls included.
        first_step: the step that this call went on from.
        losses: cross-entropy of each step of this call, nats a token; `losses[i]` is step `first_step + 1 + i`.
        validation: one entry each time the model was validated in this call, the end included.
        unigram_baseline: validation loss of a model that knows token frequencies only, nats a token.
        unigram_bits_per_byte: the same in bits a byte; None without a tokenizer.
        tokens_per_step: all processes together.
        tokens_per_second: all processes together, in the last logged interval; None before the first.
        checkpoint_dir: where the checkpoints, config.json, tokenizer.json and metrics.jsonl are.
        tokenizer: None when the shards came without one.
        model: the trained model, plain: not compiled, not wrapped (with FSDP2 it is sharded).
        samples: (step, text) of each sample.
        stopped_by: "Ctrl-C", "SIGTERM" or "another process" (that got either) when the run was asked to end, else None.
        peak_memory_gib: of this process's GPU; None on a CPU.
    """

    step: int
    first_step: int
    losses: list[float]
    validation: list[Validation]
    unigram_baseline: float
    unigram_bits_per_byte: float | None
    tokens_per_step: int
    tokens_per_second: float | None
    checkpoint_dir: Path
    tokenizer: Tokenizer | None
    model: GPTOSS
    samples: list[tuple[int, str]]
    stopped_by: str | None
    peak_memory_gib: float | None


def pretrain(
    run: RunConfig,
    *,
    resume: str | int = "auto",
    device: torch.device | str | None = None,
    progress: bool = True,
    on_step: OnStep | None = None,
    max_steps: int | None = None,
) -> PretrainResult:
    """Train a model as a configuration says, going on where its directory left off.

    Everything is checked before anything is written. A line is printed every `log_interval` steps, every step is a line
    of metrics.jsonl, and the run may be killed at any moment: calling again goes on from the latest complete
    checkpoint, on a CPU with the same bits as a run that was never stopped.

    Args:
        run: the configuration.
        resume: "auto" takes the latest checkpoint of `training.save_dir`, or starts anew where there is none; "never"
            starts anew and refuses a directory that holds checkpoints; a number takes that step, and later checkpoints
            go when the first new one is saved.
        device: where to train; a GPU where there is one, else the CPU. Under torchrun each process takes its own.
        progress: print the plan and the log, and show a bar where somebody watches; False is silent.
        on_step: called with (step, result) after each step that was taken.
        max_steps: at most this many steps in this call; the schedule stays that of `total_steps`.

    Returns:
        losses, validation curve and baseline, and where the checkpoint is.

    Raises:
        ValueError: the configuration, the data or the checkpoint cannot be used; nothing was written.
        OSError: a file that cannot be read, a directory that cannot be written, or one that another trainer works in.
        TrainingStopped: loss or gradients stay non-finite; the latest checkpoint is safe.

    Source: chapter 17.
    """
    if max_steps is not None and max_steps < 0:
        raise ValueError(f"max_steps = {max_steps}: expected 0 or more")
    with join_world(device) as world:
        return _run(run, world, resume, progress, on_step, max_steps)


def _run(
    run: RunConfig,
    world: World,
    resume: str | int,
    progress: bool,
    on_step: OnStep | None,
    max_steps: int | None,
) -> PretrainResult:
    """The run inside its world: what it builds is gone when it returns, before the processes part."""
    settings = run.training
    directory = Path(settings.save_dir)
    with ExitStack() as stack:

        def hold() -> bool:
            check_directory(directory)
            if not directory.is_dir():
                return False
            stack.enter_context(hold_directory(directory))
            return True

        held = world.from_main(hold)
        ready = check_run(run, resume, world)
        first, total = ready.first_step, settings.total_steps
        last = total if max_steps is None else min(total, first + max_steps)
        request = stack.enter_context(stop_on_signal(announce=progress and world.is_main))

        built = assemble(run, world)
        windows = validation_windows(
            ready.data.validation, settings.validation_batches * ready.batch.micro_batch
        )
        tokenizer, sizes = ready.data.tokenizer, ready.data.sizes()
        training_tokens = sizes["training_tokens"]
        validator = Validator(
            built.module,
            windows,
            ready.batch.micro_batch,
            world,
            tokenizer.token_byte_lengths() if tokenizer else None,
            unigram_baseline(ready.data.train, training_tokens, windows, run.model.vocab_size),
            built.autocast,
            settings.loss_chunk_size,
        )
        active = built.model.num_active_parameters()
        reporter = Reporter(run, world, ready.batch, active, first, last, progress)
        plan = RunPlan(
            run=run,
            batch=ready.batch,
            device=str(world.device.type),
            parameters=built.model.num_parameters(),
            active_parameters=active,
            first_step=first,
            train_tokens=training_tokens,
            validation_tokens=sizes["held_out_tokens"],
            predicted_gib=ready.predicted_gib,
            limit_gib=ready.limit_gib,
            shows_mfu=reporter.flops_per_token_and_peak is not None,
        )
        reporter.say(plan.page())
        trainer = Trainer(run, ready, world, built, validator, reporter, request, on_step)
        stack.callback(trainer.close)

        def move_in() -> list[str]:
            if not held:  # a new directory is made only now that all is well
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold_directory(directory))
                if trainer.manager.list_checkpoints() != ready.checkpoints:
                    raise ValueError(
                        f"{directory}: another trainer has saved here meanwhile: start again to go on from there"
                    )
            changed = changed_settings(directory, run) if ready.resumes else []
            write_description(directory, run, tokenizer)
            return changed

        changed = world.from_main(move_in)
        stack.callback(reporter.close)
        reporter.open(**sizes, counting_loss=validator.unigram_loss)
        if ready.resumes:
            reporter.say(f"[resume] going on from step {first} in {directory}")
            if changed:
                reporter.say(f"[resume] otherwise than before: {', '.join(changed)}")
        done = trainer.train(last)
        stopped_by = None
        if trainer.step < last:
            stopped_by = request.name if request else "another process"
        if stopped_by:
            reporter.say(
                f"[stop] {stopped_by}: step {trainer.step} of {total} is saved in {directory}; the same command goes on"
            )
        else:
            reporter.say(f"[done] step {trainer.step} of {total} is saved in {directory}")
        interval = reporter.logger.last
        drop_compiled_blocks(built.model)  # whoever asks it for text would compile for each length
        return PretrainResult(
            step=trainer.step,
            first_step=first,
            losses=done.losses,
            validation=done.validation,
            unigram_baseline=validator.unigram_loss,
            unigram_bits_per_byte=validator.bits_per_byte(validator.unigram_loss),
            tokens_per_step=ready.batch.tokens_per_step,
            tokens_per_second=interval.tokens_per_second if interval else None,
            checkpoint_dir=directory,
            tokenizer=tokenizer,
            model=built.model,
            samples=done.samples,
            stopped_by=stopped_by,
            peak_memory_gib=reporter.memory_gib(),
        )
