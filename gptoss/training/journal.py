"""metrics.jsonl: what a run measured, one JSON object a line, no step lost and none twice (chapter 17).

A line is a step ({"step": 200, "loss": …}) or an event at a step ({"event": "validation", "step": 200, …}). A run that
goes back to step c, by a resume or by the NaN guard, first cuts away what lies behind c: those steps happen again.
"""

import json
import os
from pathlib import Path
from typing import Any, TextIO

from gptoss.data.atomic import remove_partial, write_atomically


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a journal, in order; a last line that a crash cut short is left out.

    Raises:
        ValueError: a line that is no JSON object, other than a cut last one.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):  # no newline after it: the write was cut
                break
            raise ValueError(
                f"{path}, line {number}: not a JSON object ({error}); mend the line, or move the file away"
            ) from error
        records.append(record)
    return records


class Journal:
    """An open metrics.jsonl.

    Args:
        path: the file; its directory exists.
        step: the step that the run goes on from. Lines behind it are cut away before anything is added.
    """

    def __init__(self, path: str | Path, step: int = 0) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Forget everything behind a step; the file is replaced whole, so a crash leaves the old or the new one."""
        self.close()
        remove_partial(self.path.parent, self.path.name)
        if self.path.exists():
            kept = [r for r in read_journal(self.path) if r.get("step", 0) <= step]
            text = "".join(_line(record) for record in kept)
            write_atomically(self.path, text.encode())
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(self, record: dict[str, Any]) -> None:
        """Add one line."""
        assert self._file is not None
        self._file.write(_line(record))
        self._file.flush()

    def sync(self) -> None:
        """Make sure that the disk holds every line; called before a checkpoint that vouches for them."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
