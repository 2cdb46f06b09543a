"""A bar for whoever watches: plain text in a terminal, nothing anywhere else (chapter 17)."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gptoss.training.metrics import Interval


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    whole = round(max(0.0, seconds))
    days, hours = divmod(whole // 3600, 24)
    minutes, rest = whole % 3600 // 60, whole % 60
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class ProgressBar:
    """A context manager that shows a bar on standard output while it is a terminal, and prints lines above it.

    Args:
        total: the last step.
        step: the step that the run goes on from.
        enabled: False shows no bar whatever standard output is.
    """

    def __init__(self, total: int, step: int = 0, enabled: bool = True) -> None:
        self.is_live = enabled and sys.stdout.isatty()
        self._total = total
        self._progress: Progress | None = None
        if self.is_live:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}", markup=False),
                console=Console(),
                refresh_per_second=2,
            )
            self._task = self._progress.add_task("", total=total, completed=step, text="")

    def __enter__(self) -> "ProgressBar":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._progress:
            self._progress.stop()

    def echo(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._progress:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def show(
        self,
        step: int,
        loss: float,
        interval: Interval | None,
        mfu: float | None,
        memory_gib: float | None,
    ) -> None:
        """Move the bar to a step.

        Args:
            loss: of this step.
            interval: the last logged one, for tokens/s and the time left.
            mfu: model FLOPs utilisation, or None where it is not defined.
            memory_gib: peak memory of the device, or None.
        """
        if not self._progress:
            return
        parts = [f"loss {loss:.3f}"]
        if interval:
            parts.append(f"{interval.tokens_per_second:,.0f} tok/s")
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        if memory_gib is not None:
            parts.append(f"{memory_gib:.1f} GiB")
        if interval:
            parts.append(f"{duration((self._total - step) * interval.seconds_per_step)} left")
        self._progress.update(self._task, completed=step, text="  ".join(parts))
