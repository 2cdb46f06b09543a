"""A bar for work that is counted in bytes of text; silent when nobody watches."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ByteProgress:
    """Shows the stage, bytes done, bytes a second and the time left, on stderr.

    Args:
        total: bytes expected, or None when unknown; more than expected turns it into unknown.
        show: None shows the bar when stderr is a terminal.
    """

    def __init__(self, total: int | None, show: bool | None = None):
        watched = sys.stderr.isatty() if show is None else show
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not watched,
        )
        self._total = total
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "ByteProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """Start a new part of the work at zero."""
        self._bar.reset(self._task, description=name, total=self._total)

    def advance(self, n_bytes: int) -> None:
        """Count bytes of text as done."""
        self._bar.advance(self._task, n_bytes)
        task = self._bar.tasks[self._task]
        if task.total is not None and task.completed > task.total:
            self._total = None
            self._bar.update(self._task, total=None)
