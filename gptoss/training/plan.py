"""Before the run: how a step is cut into micro-batches, and one page that says what is about to happen (chapter 17).

Tokens a step are what stays fixed. They never depend on the number of processes or on the memory of a card.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gptoss.config import RunConfig, TrainingConfig
from gptoss.training.flops import MFU_CONVENTION
from gptoss.training.progress import duration

AUTO_REFERENCE = (
    8  # the production micro-batch: what "auto" stands for in micro-batch x accumulation
)


@dataclass(frozen=True)
class BatchPlan:
    """How one step is cut: micro_batch sequences at once, accumulation times, on world_size processes."""

    micro_batch: int
    accumulation: int
    world_size: int
    seq_len: int

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one step, all processes together."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step, all processes together."""
        return self.sequences_per_step * self.seq_len


def sequences_per_step(training: TrainingConfig) -> int:
    """Sequences of one step as the configuration writes them: micro_batch_size · gradient_accumulation_steps.

    With micro_batch_size "auto" the product is formed with 8, the production value: 8 · 4 · 4096 = 131,072 tokens.
    """
    written = training.micro_batch_size
    micro_batch = written if isinstance(written, int) else AUTO_REFERENCE
    return micro_batch * training.gradient_accumulation_steps


def plan_batches(
    training: TrainingConfig,
    seq_len: int,
    world_size: int = 1,
    predicted_gib: Callable[[int], float] | None = None,
    limit_gib: float | None = None,
    auto_at_most: int | None = None,
) -> BatchPlan:
    """Cut a step for a number of processes, keeping its tokens.

    Args:
        training: micro_batch_size (a number or "auto") and gradient_accumulation_steps.
        seq_len: tokens of a sequence.
        world_size: processes.
        predicted_gib: micro-batch → predicted peak memory of one process, GiB.
        limit_gib: what one process may use, GiB; None knows no limit.
        auto_at_most: the largest micro-batch that "auto" takes; on a CPU a larger one gains nothing.

    Returns:
        the plan; "auto" takes the largest micro-batch that divides each process's share and is predicted to fit.

    Raises:
        ValueError: the step cannot be shared evenly, or does not fit; the message says which values can.
    """
    total = sequences_per_step(training)
    tokens = f"{total} sequences ({total * seq_len:,} tokens) a step"
    if total % world_size:
        raise ValueError(
            f"{world_size} processes cannot share {tokens} evenly: start {_listed(_divisors(total))} processes, or "
            "change gradient_accumulation_steps"
        )
    share = total // world_size
    candidates = _divisors(share)

    def fits(micro_batch: int) -> bool:
        if predicted_gib is None or limit_gib is None:
            return True
        return predicted_gib(micro_batch) <= limit_gib

    wanted = training.micro_batch_size
    if isinstance(wanted, int):
        if wanted not in candidates:
            raise ValueError(
                f"training.micro_batch_size = {wanted}: {world_size} processes share {tokens}, {share} each; "
                f"micro_batch_size can be {_listed(candidates)}"
            )
        if fits(wanted):
            return BatchPlan(wanted, share // wanted, world_size, seq_len)
    fitting = [m for m in candidates if fits(m)]
    if not isinstance(wanted, int) and auto_at_most is not None:
        fitting = [m for m in fitting if m <= auto_at_most]
    if predicted_gib is not None and not fitting:
        raise ValueError(
            f"one sequence of {seq_len:,} tokens is predicted to take {predicted_gib(1):.1f} GiB, more than the "
            f"{limit_gib:.1f} GiB of this device: shorten max_seq_len, checkpoint more often "
            "(grad_checkpoint_every=1), or use parallel=fsdp2 on more GPUs"
        )
    if isinstance(wanted, int) and predicted_gib is not None:
        raise ValueError(
            f"training.micro_batch_size = {wanted} is predicted to take {predicted_gib(wanted):.1f} GiB, more than the "
            f"{limit_gib:.1f} GiB of this device; the largest that fits at {tokens} is {fitting[-1]}"
        )
    return BatchPlan(fitting[-1], share // fitting[-1], world_size, seq_len)


@dataclass(frozen=True)
class RunPlan:
    """What the page before a run says. Memory in GiB; None where it is not known."""

    run: RunConfig
    batch: BatchPlan
    device: str
    parameters: int
    active_parameters: int
    first_step: int
    train_tokens: int
    validation_tokens: int
    predicted_gib: float | None = None
    limit_gib: float | None = None
    shows_mfu: bool = False

    def page(self) -> str:
        """The page."""
        training, batch = self.run.training, self.batch
        steps_left = training.total_steps - self.first_step
        total_tokens = training.total_steps * batch.tokens_per_step
        memory = "not predicted"
        if self.predicted_gib is not None:
            memory = f"{self.predicted_gib:.2f} GiB predicted"
            memory += f" of {self.limit_gib:.1f} GiB" if self.limit_gib is not None else ""
        processes = f"{batch.world_size} × {self.device}"
        engine = f", {training.parallel}" if batch.world_size > 1 else ""
        rows = [
            ("model", f"{self.parameters:,} parameters, {self.active_parameters:,} active a token"),
            (
                "device",
                f"{processes}{engine}, {self.run.model.dtype}, compile {_on(training.compile)}",
            ),
            (
                "a step",
                f"{batch.tokens_per_step:,} tokens = {_counted(batch.micro_batch, 'sequence')} "
                f"× {_counted(batch.accumulation, 'micro-step')} × {_counted(batch.world_size, 'process')} "
                f"× {batch.seq_len:,} tokens",
            ),
            (
                "the run",
                f"{training.total_steps:,} steps, {total_tokens:,} tokens "
                f"({total_tokens / max(1, self.train_tokens):.2f} epochs); {steps_left:,} steps to go",
            ),
            (
                "data",
                f"{self.train_tokens:,} tokens to train on, {self.validation_tokens:,} held out",
            ),
            (
                "rate",
                f"{training.lr:.2e} after {training.warmup_steps:,} steps, cosine to {training.min_lr_ratio:.0%}",
            ),
            ("memory", memory),
            ("saved", f"{training.save_dir}, every {training.save_interval:,} steps"),
        ]
        if self.shows_mfu:
            rows.append(("MFU", MFU_CONVENTION))
        return "\n".join(f"  {name:<9}{text}" for name, text in rows)


def forecast(steps_left: int, seconds_per_step: float, tokens_per_step: int, gpus: int) -> str:
    """One line: how long the rest takes at the speed of the last steps.

    Args:
        steps_left: to the end of the run.
        seconds_per_step: measured, without compilation.
        tokens_per_step: all processes together.
        gpus: how many the run uses; 0 on a CPU.
    """
    seconds = steps_left * seconds_per_step
    line = (
        f"[plan] {steps_left:,} steps to go at {tokens_per_step / seconds_per_step:,.0f} tokens/s: "
        f"about {duration(seconds)}"
    )
    return line + (f", {gpus * seconds / 3600:.1f} GPU-hours" if gpus else "")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    *others, last = [str(n) for n in numbers]
    return f"{', '.join(others)} or {last}" if others else last


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _on(flag: bool) -> str:
    return "on" if flag else "off"
