"""Tables without a clock in them, measured side by side: each by a process of its own, on the same GPU."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from gptoss.bench.launch import end, leave_on_signals, reason_in


def measure_side_by_side(
    names: Sequence[str], out: Path | None
) -> Iterator[tuple[str, str | None]]:
    """Start `gptoss bench NAME` for each name; print what each says; yield its name and why it failed, or None.

    Args:
        names: of tables, printed and yielded in this order.
        out: the command's `--out`.
    """
    with ExitStack() as stack:
        stack.enter_context(leave_on_signals())
        # Files, since a pipe that nobody empties stops its writer.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gptoss-bench-")))
        started = []
        for name in names:
            started.append(_start(name, out, folder))
            stack.callback(end, started[-1])
        for name, process in zip(names, started, strict=True):
            code = process.wait()
            print(_printed(folder / f"{name}.out"), end="", flush=True)
            yield name, reason_in(_printed(folder / f"{name}.err")) if code else None


def _start(name: str, out: Path | None, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gptoss", "bench", name]
    with (folder / f"{name}.out").open("w") as said, (folder / f"{name}.err").open("w") as error:
        return subprocess.Popen(
            command + (["--out", str(out)] if out else []),
            stdout=said, stderr=error, text=True,
            start_new_session=True,  # a terminal's Ctrl-C comes here alone, and one signal goes on from here
        )  # fmt: skip


def _printed(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
