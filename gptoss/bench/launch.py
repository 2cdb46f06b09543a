"""A training run as a process of its own: started as a user starts it, read by its journal, ended with its starter."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gptoss.training.journal import read_journal
from gptoss.training.reporter import JOURNAL_FILE

GRACE = 90  # seconds that a launch may take to end when asked to; torchrun gives its processes 30
EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?((?:\w+\.)*(\w*(?:Error|Exception|Stopped)))(?::\s*(.*))?")  # fmt: skip


class Engine(NamedTuple):
    """A way to launch: its name in the table, processes, and the setting `training.parallel`."""

    who: str
    processes: int
    parallel: str


def launch(engine: Engine, config: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Start `gptoss pretrain` as a user does, in a folder that goes with it, and read what its journal says.

    Raises:
        RuntimeError: the run failed; the reason in one line.
    """
    start = [sys.executable, "-m"]
    if engine.processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(engine.processes), "-m"]  # fmt: skip
    # Every process must say why it failed (--traceback): the first that fails ends the others, the main one too.
    start += ["gptoss", "pretrain", "--quiet", "--traceback", "--config", config]
    with (
        leave_on_signals(),
        tempfile.TemporaryDirectory(
            prefix="gptoss-parallel-", ignore_cleanup_errors=True
        ) as folder,
    ):
        told = [*overrides, f"training.parallel={engine.parallel}", f"training.save_dir={folder}"]
        process = subprocess.Popen(
            [*start, *(word for override in told for word in ("--set", override))],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            env={"OMP_NUM_THREADS": "1"} | os.environ,  # torchrun's own default, for one process too
            start_new_session=True,  # a terminal's Ctrl-C comes here alone, and one signal goes on from here
        )  # fmt: skip
        try:
            stderr = process.communicate()[1]
        except BaseException:
            end(process)
            raise
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {reason_in(stderr)}")
        return read_journal(Path(folder) / JOURNAL_FILE)


@contextmanager
def leave_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP, which end a program on the spot, leave by way of the `finally`s. Ctrl-C does so by itself."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGHUP] if here else []  # elsewhere Python delivers none
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def end(process: subprocess.Popen[str]) -> None:
    """Ask a process to end, as torchrun passes on to its own; they finish a step. What does not end is killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=GRACE)
    except BaseException as late:
        process.kill()
        process.wait()
        if not isinstance(late, subprocess.TimeoutExpired):
            raise


def reason_in(stderr: str) -> str:
    """The line of standard error that says why a launch failed.

    The first exception of any process, since the others follow from it; without one, the signal that ended a process,
    as torchrun reports it; else the last line.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" =-")]
    for line in lines:
        found = EXCEPTION.fullmatch(line)
        if found and found[2] != "ChildFailedError":  # torchrun's own, which says nothing
            said = found[3] or found[1]
            return (said if found[2] == "ValueError" else line)[:300]
    signals = [line for line in lines if "Signal" in line and "received" in line]
    return (signals or lines[-1:] or ["nothing on standard error"])[0][:300]
