"""An arm's result as a file that says what it was made with, so that results of other settings are never mixed in.

It says where it was made too: arms are made on one machine, or on several, and their table is put together anywhere.
"""

import json
from collections.abc import Container, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from gptoss.config import RunConfig
from gptoss.data.atomic import write_atomically
from gptoss.training.provenance import current_commit, machine, software

MADE = {"date": str, "machine": str, "software": dict, "commit": str}

MAY_DIFFER = {"training.save_dir", "training.log_interval", "data.num_workers"}


def settings_of(run: RunConfig, lengths: Sequence[int], trials: int) -> dict[str, Any]:
    """What an arm was made with, flat: "section.key" of its run, and how it was read."""
    flat = {f"{part}.{k}": v for part, values in run.to_dict().items() for k, v in values.items()}
    return flat | {"lengths": list(lengths), "trials": trials}


def require_same(place: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse to go on where something was made with other settings.

    Raises:
        ValueError: the first setting that differs.
    """
    for name, value in here.items():
        if there.get(name) != value and name not in MAY_DIFFER:
            raise ValueError(
                f"{place}: {name} is {there.get(name)!r} there and {value!r} here; delete it or name another folder"
            )


def read_result(
    path: Path, asked: dict[str, Any], columns: Container[str]
) -> dict[str, Any] | None:
    """An arm's result, None where it has none yet.

    Args:
        path: of the file.
        asked: `settings_of` what is asked for now.
        columns: keys that a row of it may have.

    Raises:
        ValueError: the file is damaged, does not say where it was made, or was made with other settings.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"{path}: not a file; delete it or name another folder")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        there = settings_of(
            RunConfig.from_saved(result["run"]), result["lengths"], result["trials"]
        )
        made = result.get("made")
        if made is not None:
            date.fromisoformat(made["date"])
        if not isinstance(result["tokens_per_step"], int) or not result["rows"]:
            raise ValueError("no rows, or no number of tokens")
        for column in {column for row in result["rows"] for column in dict(row)}:
            if column not in columns:
                raise ValueError(f"column {column!r} has no meaning here")
    except (ValueError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not a result of this experiment ({what}); delete it") from error
    if made is None or not all(isinstance(made.get(key), kind) for key, kind in MADE.items()):
        raise ValueError(
            f"{path}: does not say on which machine and at which commit it was made; delete it, and the same command "
            "reads its model again"
        )
    require_same(path, there, asked)
    return result


def write_result(
    path: Path,
    run: RunConfig,
    lengths: Sequence[int],
    trials: int,
    found: dict[str, Any],
    commit: str | None = None,
) -> dict[str, Any]:
    """Write a result with its settings and where it was made, whole or not at all, and return what was written.

    Args:
        path: of the file.
        run, lengths, trials: what it was made with.
        found: what came out.
        commit: the version of this package; asked of git unless given.
    """
    made = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "software": software(),
        "commit": commit or current_commit(),
    }
    settings = {"run": run.to_dict(), "lengths": list(lengths), "trials": trials}
    result = {"made": made} | settings | found
    write_atomically(path, json.dumps(result).encode())
    return result


def made_where(results: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Where a table of several results was made: as the latest of them says, and a note on each thing that differs.

    Args:
        results: by the name of the arm.

    Returns:
        (date, machine, software and commit for the evidence, notes).
    """
    made = {name: result["made"] for name, result in results.items()}
    latest = max(made.values(), key=lambda one: one["date"])
    notes = []
    for key, words in (
        ("machine", "on different machines"),
        ("commit", "at different commits"),
        ("software", "with different software"),
    ):
        groups: dict[str, list[str]] = {}
        for name, one in made.items():
            groups.setdefault(_in_words(one[key]), []).append(name)
        if len(groups) > 1:
            each = "; ".join(f"{what}: {', '.join(names)}" for what, names in groups.items())
            notes.append(f"arms were made {words}; {each}")
    return {key: latest[key] for key in MADE}, notes


def _in_words(value: str | dict[str, str]) -> str:
    return value if isinstance(value, str) else ", ".join(f"{k} {v}" for k, v in value.items())
