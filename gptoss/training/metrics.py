"""What a run says while it trains: the log line, and the same numbers to whoever else keeps them (chapter 17)."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


class Tracker(Protocol):
    """Something that keeps a curve: TensorBoard, Weights & Biases."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep some values of one step."""

    def rewind(self, step: int) -> None:
        """The run goes back to a step: forget what was kept behind it, where that can be."""

    def close(self) -> None:
        """Finish."""


@dataclass(frozen=True)
class Interval:
    """The steps since the last log line, averaged."""

    step: int
    loss: float
    tokens_per_second: float
    seconds_per_step: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where a float ends."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


def log_line(interval: Interval, lr: float, metrics: Mapping[str, float]) -> str:
    """The source documents' log line.

    `step=    200 | loss=3.2145 | ppl=24.89 | lr=2.67e-04 | tps=142,350 | aux=0.0031`

    The loss is the cross-entropy alone, in nats a token, averaged over the interval; further metrics follow in order.
    """
    parts = [
        f"step={interval.step:>7}",
        f"loss={interval.loss:.4f}",
        f"ppl={interval.perplexity:.2f}",
        f"lr={lr:.2e}",
        f"tps={interval.tokens_per_second:,.0f}",
        *(f"{name}={value:.4f}" for name, value in metrics.items()),
    ]
    return " | ".join(parts)


class TrainingLogger:
    """Prints one line every `log_interval` steps and passes the numbers on.

    Tokens per second count every token of every step in the interval, on all devices, over the time that was spent
    training. (The source documents count one sequence a step, whatever the batch, the accumulation and the ranks.)

    Args:
        log_interval: steps a line.
        seq_len: tokens of one sequence.
        sequences_per_step: micro-batch · accumulation · processes.
        trackers: who else is told.
        echo: what prints the line; None prints nothing.
        clock: seconds, monotonic.

    Raises:
        ValueError: a count below 1.
    """

    def __init__(
        self,
        log_interval: int = 50,
        seq_len: int = 4096,
        sequences_per_step: int = 1,
        trackers: Iterable[Tracker] = (),
        echo: Callable[[str], None] | None = print,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for name, value in (
            *(("log_interval", log_interval), ("seq_len", seq_len)),
            ("sequences_per_step", sequences_per_step),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value}: expected at least 1")
        self.log_interval = log_interval
        self.tokens_per_step = seq_len * sequences_per_step
        self.trackers = list(trackers)
        self.last: Interval | None = None
        self._echo = echo
        self._clock = clock
        self._losses: list[float] = []
        self._since = clock()
        self._paused = 0.0

    def log(
        self, step: int, loss: float, metrics: Mapping[str, float] | None = None, lr: float = 0.0
    ) -> Interval | None:
        """Take in one step; at the end of an interval print its line and return it.

        Args:
            step: counted from 1.
            loss: cross-entropy of this step, nats a token.
            metrics: further values of this step, printed in order.
            lr: the rate at which this step was taken.
        """
        self._losses.append(loss)
        if step % self.log_interval:
            return None
        count = len(self._losses)
        seconds = max(self._clock() - self._since - self._paused, 1e-9)
        interval = Interval(
            step=step,
            loss=sum(self._losses) / count,
            tokens_per_second=count * self.tokens_per_step / seconds,
            seconds_per_step=seconds / count,
        )
        self.last = interval
        if self._echo:
            self._echo(log_line(interval, lr, metrics or {}))
        values = {
            "loss": interval.loss,
            "perplexity": interval.perplexity,
            "lr": lr,
            "tokens_per_second": interval.tokens_per_second,
            **(metrics or {}),
        }
        for tracker in self.trackers:
            tracker.write(step, values)
        self.restart()
        return interval

    def restart(self) -> None:
        """Begin a new interval here: after a line, and where a run goes back to an earlier step."""
        self._losses = []
        self._since = self._clock()
        self._paused = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is not training (validation, samples, saving) does not count."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - start

    def finish(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []
