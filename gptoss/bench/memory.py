"""Peak memory of a training step, predicted beforehand and measured on the GPU.

`gptoss bench memory`.
"""

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from gptoss.bench.evidence import make_evidence
from gptoss.bench.release import release_memory
from gptoss.config import load_config
from gptoss.training.memory import PeakMeter, predict_training_memory

COLUMNS = {
    "batch": "sequences of a micro-batch",
    "seq_len": "tokens of a sequence",
    "every": "every which block is checkpointed; 0 none",
    "predicted_gib": "peak predicted from the configuration in GiB",
    "measured_gib": "peak of the second step in GiB, by torch.cuda.max_memory_allocated",
    "ratio": "predicted over measured",
    "error": "why there is no number",
}
CONVENTION = "fp32 weights and AdamW moments, bf16 activations, compiled blocks, triton_grouped experts, logits of 4,096 tokens at once"


class Case(NamedTuple):
    """One setting."""

    batch: int
    seq_len: int
    every: int


PRODUCTION = (
    *(Case(8, 4096, every) for every in (0, 1, 2, 3, 4, 6, 12)),
    Case(16, 4096, 0),
    Case(4, 8192, 3),
    Case(32, 1024, 1),
)
ON_CPU = (Case(1, 128, 0), Case(1, 128, 1), Case(2, 128, 3))


def measure(
    cases: Sequence[Case] | None = None,
    *,
    config: str | None = None,
    command: str = "gptoss bench memory",
    commit: str | None = None,
) -> dict[str, Any]:
    """Predict the peak of each setting, then train two steps with it; settings of one shape share a model.

    Args:
        cases: settings; the production model's on a GPU, small ones of the tiny model on a CPU.
        config: a packaged configuration; "pretrain_a100_502m" on a GPU, "tiny" on a CPU.
        command, commit: for the evidence file.

    Returns:
        The evidence. A setting that fails is a row with the reason.
    """
    cuda = torch.cuda.is_available()
    model = load_config(config or ("pretrain_a100_502m" if cuda else "tiny")).model
    model = dataclasses.replace(model, moe_dispatch="triton_grouped" if cuda else "stacked")
    rows = []
    cases = cases or (PRODUCTION if cuda else ON_CPU)
    for (batch, seq_len), group in groupby(cases, lambda case: case[:2]):  # one model for a group
        sized = dataclasses.replace(model, max_seq_len=max(model.max_seq_len, seq_len))
        setting: dict[str, Any] = {"batch": batch, "seq_len": seq_len, "compiled": cuda, "device": "cuda" if cuda else "cpu"}  # fmt: skip
        meter = None
        for case in group:
            row: dict[str, Any] = case._asdict()
            predicted = predict_training_memory(sized, every=case.every, **setting).gib
            row["predicted_gib"] = round(predicted, 3)
            try:
                meter = meter or PeakMeter(sized, **setting)
                measured = meter.measure(case.every) / 2**30
                row |= {"measured_gib": round(measured, 3), "ratio": round(predicted / measured, 4)}
            except Exception as error:  # the reason is the row; the other settings still run
                row["error"] = " ".join(str(error).split())[:200]
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        del meter
        release_memory()
    notes = [] if cuda else ["no GPU here: the tiny model on the CPU, storages followed by hooks"]
    return make_evidence(
        "memory", "Peak memory of a training step", COLUMNS, rows,
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip
