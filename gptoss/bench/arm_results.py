"""An arm's result as a file that says what it was made with, so that results of other settings are never mixed in."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptoss.config import RunConfig

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


def read_result(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """An arm's result, None where it has none yet.

    Raises:
        ValueError: the file is damaged, or was made with other settings.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text())
        there = settings_of(
            RunConfig.from_saved(result["run"]), result["lengths"], result["trials"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a result of this experiment ({error}); delete it") from error
    require_same(path, there, asked)
    return result


def write_result(
    path: Path, run: RunConfig, lengths: Sequence[int], trials: int, found: dict[str, Any]
) -> dict[str, Any]:
    """Write a result with its settings, whole or not at all, and return what was written."""
    result = {"run": run.to_dict(), "lengths": list(lengths), "trials": trials} | found
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(result))
    partial.replace(path)
    return result
