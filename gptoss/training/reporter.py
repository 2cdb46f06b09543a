"""Where a run's numbers go: the log line, the bar, metrics.jsonl and the trackers, on the main process alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gptoss.config import RunConfig
from gptoss.training.distributed import World
from gptoss.training.flops import bf16_peak, training_flops_per_token
from gptoss.training.journal import Journal
from gptoss.training.metrics import TrainingLogger
from gptoss.training.plan import BatchPlan, forecast
from gptoss.training.progress import ProgressBar
from gptoss.training.provenance import current_commit, machine, software
from gptoss.training.step import StepResult
from gptoss.training.trackers import open_trackers

JOURNAL_FILE = "metrics.jsonl"
FORECAST_FROM, FORECAST_AT = (
    3,
    8,
)  # steps between which the speed is measured: behind the compilation


class Reporter:
    """Tells whoever wants to know, and nobody on processes other than the main one.

    Args:
        run: the configuration.
        world: the processes.
        batch: how a step is cut.
        active_parameters: for MFU.
        first_step: the step that the run goes on from.
        last_step: where this call ends.
        talkative: print and show a bar; metrics.jsonl is written in any case.
    """

    def __init__(
        self,
        run: RunConfig,
        world: World,
        batch: BatchPlan,
        active_parameters: int,
        first_step: int,
        last_step: int,
        talkative: bool,
    ) -> None:
        self.run, self.world, self.batch = run, world, batch
        self.first_step, self.last_step = first_step, last_step
        self.talkative = talkative and world.is_main
        self.bar = ProgressBar(last_step, first_step, enabled=self.talkative)
        self.logger = TrainingLogger(
            run.training.log_interval,
            run.model.max_seq_len,
            batch.sequences_per_step,
            echo=self.say if self.talkative else None,
        )
        flops = training_flops_per_token(run.model, active_parameters, run.model.max_seq_len)
        peak = bf16_peak(world.device) if run.model.dtype == "bf16" else None
        self.flops_per_token_and_peak = (flops, peak * world.size) if peak else None
        self.peak_tokens_per_second: float | None = None
        self._journal: Journal | None = None
        self._began = time.perf_counter()
        self._mark: tuple[int, float] | None = None

    def open(self, **known: Any) -> None:
        """Start the bar, the journal and the trackers; the directory exists. `known` joins the journal's first line."""
        directory = Path(self.run.training.save_dir)
        if self.world.is_main:
            self._journal = Journal(directory / JOURNAL_FILE, self.first_step)
            self.logger.trackers = open_trackers(
                directory,
                self.first_step,
                self.run.to_dict(),
                self.run.training.tensorboard,
                echo=self.say,
            )
            self.event(
                "start",
                self.first_step,
                date=date.today().isoformat(),
                machine=machine(self.world.device.type != "cuda", self.world.size),
                software=software(),
                commit=current_commit(),
                tokens_per_step=self.batch.tokens_per_step,
                **known,
            )
        self.bar.__enter__()
        self.logger.restart()

    def close(self) -> None:
        """End the bar and close what is open."""
        self.bar.__exit__(None, None, None)
        self.logger.finish()
        if self._journal:
            self._journal.close()

    def say(self, line: str) -> None:
        """Print a line, if anybody is told anything."""
        if self.talkative:
            self.bar.echo(line)

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilisation by `flops.MFU_CONVENTION`; None where the device's peak is not known."""
        if self.flops_per_token_and_peak is None:
            return None
        flops, peak = self.flops_per_token_and_peak
        return tokens_per_second * flops / peak

    def memory_gib(self) -> float | None:
        """Peak memory of this process's GPU so far; None on a CPU."""
        if self.world.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.world.device) / 2**30

    def step(self, step: int, result: StepResult, position: int) -> None:
        """A step was taken.

        Args:
            step: counted from 1.
            result: what it came to.
            position: sequences consumed by all processes, this step's included.
        """
        record: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "aux": result.aux,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "position": position,
        }
        interval = self.logger.log(step, result.loss, {"aux": result.aux}, result.lr)
        if interval:
            rate = interval.tokens_per_second
            record["tokens_per_second"] = rate
            record["seconds"] = time.perf_counter() - self._began
            for name, value in (("mfu", self.mfu(rate)), ("memory_gib", self.memory_gib())):
                if value is not None:
                    record[name] = value
        if self._journal:
            self._journal.write(record)
        last = self.logger.last
        mfu = self.mfu(last.tokens_per_second) if last else None
        self.bar.show(step, result.loss, last, mfu, self.memory_gib() if self.bar.is_live else None)
        self._forecast(step)

    def event(self, kind: str, step: int, **values: Any) -> None:
        """Something else happened at a step; numbers of a validation also go to the trackers."""
        if self._journal:
            self._journal.write({"event": kind, "step": step, **values})
        if kind == "validation":
            for tracker in self.logger.trackers:
                tracker.write(step, {f"validation/{name}": value for name, value in values.items()})

    def rewind(self, step: int) -> None:
        """The run goes back to a step: what was written behind it is forgotten."""
        if self._journal:
            self._journal.rewind(step)
        for tracker in self.logger.trackers:
            tracker.rewind(step)
        self.logger.restart()

    def sync(self) -> None:
        """Make sure that the disk holds every line so far."""
        if self._journal:
            self._journal.sync()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside is not training time."""
        start = time.perf_counter()
        with self.logger.pause():
            yield
        if self._mark:
            self._mark = (self._mark[0], self._mark[1] + time.perf_counter() - start)

    def _forecast(self, step: int) -> None:
        """After a few steps, once: how long the rest of the run takes."""
        done = step - self.first_step
        if done == FORECAST_FROM:
            self._mark = (step, time.perf_counter())
        elif done == FORECAST_AT and self._mark:
            marked, at = self._mark
            seconds = (time.perf_counter() - at) / max(1, step - marked)
            gpus = self.world.size if self.world.device.type == "cuda" else 0
            left = self.run.training.total_steps - step
            self.say(forecast(left, seconds, self.batch.tokens_per_step, gpus))
            self.event("forecast", step, tokens_per_second=self.batch.tokens_per_step / seconds)
            self._mark = None
