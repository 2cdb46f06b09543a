"""Measured numbers as files: what was measured, on what, with which software, at which commit, by which command.

Each table of this book is one JSON file under `book/evidence`. Pages read numbers from there and nowhere else.
"""

import json
import os
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from gptoss.data.atomic import write_atomically
from gptoss.training.provenance import current_commit, machine, software

EVIDENCE_FORMAT = 1
CPU = "CPU"  # how `machine()` begins where no GPU was used
REQUIRED = {
    "format": int,
    "name": str,
    "title": str,
    "date": str,
    "machine": str,
    "software": dict,
    "commit": str,
    "command": str,
    "convention": str,
    "columns": dict,
    "rows": list,
    "notes": list,
}


def evidence_folder() -> Path:
    """`book/evidence` of the checkout that this package is run from.

    Raises:
        FileNotFoundError: the package is installed without its book.
    """
    folder = Path(__file__).parents[2] / "book" / "evidence"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: the evidence comes with the book's checkout")
    return folder


def prepare_folder(folder: Path | None) -> Path:
    """Where evidence goes, found or made before anything is measured: a given folder, else `evidence_folder()`.

    Raises:
        OSError: it cannot be made, is a file or cannot be written.
    """
    if folder is None:
        try:
            folder = evidence_folder()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}: name a folder for the evidence (--out)") from error
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name a folder for the evidence")
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written: name another folder for the evidence")
    return folder


def load_evidence(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Read one evidence file and check its form.

    Args:
        name: the file's name without `.json`.
        folder: where it is; `evidence_folder()` unless given.

    Raises:
        FileNotFoundError: there is no such file; the message lists those there are.
        ValueError: the file does not follow the format.
    """
    folder = evidence_folder() if folder is None else folder
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none yet"
        raise FileNotFoundError(f"no evidence {name!r} in {folder}; there is: {known}")
    evidence = _read(path)
    check_evidence(evidence, path.stem)
    return evidence


def _read(path: Path) -> dict[str, Any]:
    try:
        evidence = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); restore it") from error
    if not isinstance(evidence, dict):
        raise ValueError(f"{path}: not evidence, but a {type(evidence).__name__}; restore it")
    return evidence


def check_evidence(evidence: dict[str, Any], name: str) -> None:
    """Hold an evidence file against the format.

    Raises:
        ValueError: the first thing that is wrong with it.
    """
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ValueError(f"evidence {name!r}: expected a name of letters, digits, - and _, without .json")  # fmt: skip
    for key, kind in REQUIRED.items():
        if not isinstance(evidence.get(key), kind):
            raise ValueError(f"evidence {name}: {key!r} must be there, as {kind.__name__}")
    if evidence["format"] != EVIDENCE_FORMAT or evidence["name"] != name:
        raise ValueError(f"evidence {name}: expected format {EVIDENCE_FORMAT} and its file's name")
    date.fromisoformat(evidence["date"])
    if not evidence["rows"]:
        raise ValueError(f"evidence {name}: no rows")
    for number, row in enumerate(evidence["rows"]):
        unknown = sorted(set(row) - set(evidence["columns"]))
        if unknown:
            raise ValueError(
                f"evidence {name}, row {number}: columns without a meaning: {', '.join(unknown)}"
            )


def make_evidence(
    name: str,
    title: str,
    columns: dict[str, str],
    rows: Sequence[dict[str, Any]],
    *,
    command: str,
    convention: str = "",
    notes: Sequence[str] = (),
    commit: str | None = None,
    on_cpu: bool = False,
    gpus: int = 1,
) -> dict[str, Any]:
    """Put a table together with where it comes from.

    Args:
        name: of the file, without `.json`.
        title: what the table shows, in one line.
        columns: each column's key and what it means, with its unit.
        rows: one dict a row, with keys of `columns`.
        command: what was run.
        convention: how derived numbers are counted (FLOPs, percentages), if there are any.
        notes: what a reader must know beside the numbers.
        commit: the version of this package; asked of git unless given.
        on_cpu: it was measured on the processor, whether there is a GPU or not.
        gpus: how many it was measured on, where there are any.

    Raises:
        ValueError: a row has a key that `columns` does not explain.
    """
    evidence = {
        "format": EVIDENCE_FORMAT,
        "name": name,
        "title": title,
        "date": date.today().isoformat(),
        "machine": machine(on_cpu, gpus),
        "software": software(),
        "commit": commit or current_commit(),
        "command": command,
        "convention": convention,
        "columns": columns,
        "rows": list(rows),
        "notes": list(notes),
    }
    check_evidence(evidence, name)
    return evidence


def write_evidence(evidence: dict[str, Any], folder: Path) -> Path:
    """Write an evidence file whole or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{evidence['name']}.json"
    text = json.dumps(evidence, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())
    return path


def keep_evidence(evidence: dict[str, Any], folder: Path, *, replace: bool) -> str:
    """Write evidence, unless that would put a CPU's numbers in the place of a GPU's; returns a line that says which.

    A file that cannot be read may hold a GPU's.

    Args:
        evidence: to write.
        folder: where.
        replace: write in any case, as where the user named the folder.
    """
    path = folder / f"{evidence['name']}.json"
    if not replace and path.is_file() and evidence["machine"].startswith(CPU):
        try:
            there = str(_read(path).get("machine"))
        except ValueError as problem:
            return f"not written: {problem}, or --out FOLDER keeps this table elsewhere"
        if not there.startswith(CPU):
            return f"not written: {path} was measured on {there}; --out FOLDER keeps this table elsewhere"
    return f"written: {write_evidence(evidence, folder)}"


def format_table(evidence: dict[str, Any]) -> str:
    """The table as plain text, with its machine, software, commit and convention below."""
    keys = [key for key in evidence["columns"] if any(key in row for row in evidence["rows"])]
    cells = [keys] + [[_cell(row.get(key)) for key in keys] for row in evidence["rows"]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(keys))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    versions = ", ".join(f"{name} {version}" for name, version in evidence["software"].items())
    footer = f"{evidence['machine']}; {versions}; commit {evidence['commit']}; {evidence['date']}"
    rest = [line for line in (evidence["convention"], *evidence["notes"]) if line]
    return "\n".join([evidence["title"], *lines, footer, *rest])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
