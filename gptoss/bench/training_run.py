"""A finished run's curve as evidence: loss, validation, speed and samples, out of its metrics.jsonl.

`gptoss record RUN_DIRECTORY NAME`. Nothing is measured here: the run wrote its own
numbers, with its machine, its software and its commit.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from gptoss.bench.evidence import EVIDENCE_FORMAT, check_evidence
from gptoss.training.flops import MFU_CONVENTION
from gptoss.training.journal import read_journal
from gptoss.training.reporter import JOURNAL_FILE

COLUMNS = {
    "step": "optimiser steps taken",
    "tokens": "tokens trained on so far",
    "seconds": "time since the run began or was resumed in s",
    "loss": "mean training loss since the row before in nats a token",
    "grad_norm": "median gradient norm since the row before",
    "lr": "learning rate",
    "tokens_per_s": "trained tokens a second since the row before",
    "mfu": "model FLOPs utilisation",
    "peak_gib": "peak memory so far in GiB",
    "validation_loss": "loss on held-out text in nats a token",
    "bits_per_byte": "the same in bits a byte of text",
    "sample": "what the model wrote at this step",
    "training_tokens": "tokens of the training text",
    "training_bytes": "bytes of the training text",
    "held_out_tokens": "tokens of the held-out text",
    "held_out_bytes": "bytes of the held-out text",
    "counting_loss": "held-out loss of a model that knows only how often each token occurs, in nats a token",
    "forecast_tokens_per_s": "rate by which the run foretold its end, after its first steps",
}
START = "start"
KNOWN_AT_START = (
    *("training_tokens", "training_bytes", "held_out_tokens", "held_out_bytes"),
    "counting_loss",
)


def read_run(directory: Path, name: str, title: str, command: str) -> dict[str, Any]:
    """Turn a run's journal into evidence: what was known at the start, one row a logged interval, validation and samples.

    Args:
        directory: the run's save_dir.
        name, title: of the evidence.
        command: what started the run.

    Returns:
        The evidence, stamped with what the run itself says about its machine, software and commit.

    Raises:
        FileNotFoundError: no journal there.
        ValueError: the journal does not say where it was made, holds no logged step, or is damaged.
    """
    path = directory / JOURNAL_FILE
    records = read_journal(path)
    if not records:
        raise FileNotFoundError(f"{path} is missing or empty; name a run's save_dir")
    try:
        evidence = _evidence_of(path, records, name, title, command)
    except (KeyError, TypeError) as error:
        what = f"{error} is missing in a line" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not the journal of a run ({what}); restore it") from error
    check_evidence(evidence, name)
    return json.loads(json.dumps(evidence))


def _evidence_of(
    path: Path, records: list[dict[str, Any]], name: str, title: str, command: str
) -> dict[str, Any]:
    starts = [r for r in records if r.get("event") == START]
    if not starts:
        raise ValueError(
            f"{path} does not say on which machine it was made; runs from before that line cannot be recorded"
        )
    made = starts[-1]
    began = starts[0]["step"]
    rows: dict[int, dict[str, Any]] = {}
    # The last start that knows its text: the first may come from an older version, or from other text before step 1.
    telling = [start for start in starts if any(key in start for key in KNOWN_AT_START)]
    if telling:
        known = {key: _rounded(telling[-1][key]) for key in KNOWN_AT_START if key in telling[-1]}
        rows[began] = {"step": began} | known
    losses: list[float] = []
    norms: list[float] = []
    for record in records:
        step = record["step"]
        kind = record.get("event")
        if kind is None:
            losses.append(record["loss"])
            norms.append(record["grad_norm"])
            if "tokens_per_second" in record:
                rows.setdefault(step, {"step": step}).update(_interval(record, losses, norms))
                losses, norms = [], []
        elif kind == "validation":
            row = rows.setdefault(step, {"step": step})
            row["validation_loss"] = round(record["loss"], 5)
            if record.get("bits_per_byte") is not None:  # null in older journals of token ids alone
                row["bits_per_byte"] = round(record["bits_per_byte"], 5)
        elif kind == "forecast" and telling:
            rows[began].setdefault("forecast_tokens_per_s", round(record["tokens_per_second"]))
        elif kind == "sample":
            rows.setdefault(step, {"step": step})["sample"] = record["text"]
    if not any("loss" in row for row in rows.values()):
        raise ValueError(f"{path} holds no logged step; record the run when it has some")
    for row in rows.values():
        row["tokens"] = row["step"] * made["tokens_per_step"]
    return {
        "format": EVIDENCE_FORMAT,
        "name": name,
        "title": title,
        "date": made["date"],
        "machine": made["machine"],
        "software": made["software"],
        "commit": made["commit"],
        "command": command,
        "convention": MFU_CONVENTION,
        "columns": COLUMNS,
        "rows": [rows[step] for step in sorted(rows)],
        "notes": [f"resumed {len(starts) - 1} times"] if len(starts) > 1 else [],
    }


def _rounded(value: float | int) -> float | int:
    return round(value, 5) if isinstance(value, float) else value


def _interval(
    record: dict[str, Any], losses: list[float], norms: list[float]
) -> dict[str, float | int]:
    found = {
        "seconds": round(record["seconds"], 1),
        "loss": round(statistics.fmean(losses), 5),
        "grad_norm": round(statistics.median(norms), 4),
        "lr": float(f"{record['lr']:.4g}"),
        "tokens_per_s": round(record["tokens_per_second"]),
    }
    for name, key, digits in (("mfu", "mfu", 4), ("peak_gib", "memory_gib", 3)):
        if key in record:
            found[name] = round(record[key], digits)
    return found
