"""Ctrl-C and SIGTERM: finish the step, save, leave; the second one leaves at once (chapter 17)."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the run to end, and how."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """What to call it: Ctrl-C or SIGTERM."""
        return "Ctrl-C" if self.signal == signal.SIGINT else "SIGTERM"


@contextmanager
def stop_on_signal(announce: bool = False) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request that the loop reads between steps.

    With `announce` one line on standard error answers at once, since the step may take a while.

    The second one raises KeyboardInterrupt where the program stands. Files are written under another name and renamed,
    so nothing half-written takes a checkpoint's place. Outside the main thread Python delivers no signals; the request
    then never comes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def receive(number: int, frame: FrameType | None) -> None:
        if request:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)
        if announce:  # os.write, because a handler may interrupt another print
            line = f"\n[stop] {request.name}: finishing the step, then saving; once more leaves at once\n"
            os.write(2, line.encode())

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
