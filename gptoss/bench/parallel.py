"""One process against several: the same training steps alone, with DDP and with FSDP2, each as a user launches it.

`gptoss parallel`, on a machine with several GPUs; two CPU processes elsewhere. Micro-batches
hold the same sequences in all three, so the losses must agree too: only the order of sums differs.

A launch ends with a checkpoint, 6 GB for the production model. It lies in the temporary folder (TMPDIR names another)
and goes with the launch. Whatever stops the comparison, Ctrl-C or a signal, ends the launch first.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from gptoss.bench.evidence import make_evidence
from gptoss.bench.launch import Engine, launch
from gptoss.config import RunConfig, load_config

COLUMNS = {
    "who": "how the processes share the model",
    "processes": "one a GPU; without GPUs, of one CPU",
    "micro_batch": "sequences that a process runs at once",
    "tokens_per_step": "of all processes together",
    "tokens_per_s": "trained tokens a second of all processes, median of the logged intervals behind the first third",
    "against": "times the tokens a second of one process in the same run",
    "peak_gib": "peak memory of the main process in GiB",
    "apart": "largest difference of a step's loss from one process, in nats a token",
    "step": "optimiser steps taken",
    "loss": "loss of that step in nats a token",
    "error": "why there is no number",
}
CONVENTION = (
    "one launch after another on the same machine, from the same weights, with the same sequences in each micro-batch; "
    "losses by step; time of saving and validation is left out"
)
INTERVALS = 8  # log lines of a launch


def engines_of(processes: int) -> tuple[Engine, ...]:
    """What is compared, one process first."""
    return (
        Engine("one process", 1, "ddp"),
        Engine("DDP", processes, "ddp"),
        Engine("FSDP2", processes, "fsdp2"),
    )


def compare_engines(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    steps: int = 40,
    processes: int | None = None,
    command: str = "gptoss parallel",
    commit: str | None = None,
) -> dict[str, Any]:
    """Train the same steps in one process and in several, and hold speed and losses side by side.

    Args:
        config: a configuration by name or path. When left out, the production run on GPUs and "tiny" elsewhere, with
            as many micro-steps as the processes need.
        overrides: "section.key=value" for every launch; steps, saving and validation are this comparison's own.
        steps: of each launch.
        processes: how many share a step; all GPUs, or two on a CPU.
        command, commit: for the evidence.

    Returns:
        The evidence. A launch that fails is a row with its reason.

    Raises:
        ValueError: fewer than two processes or steps, more processes than GPUs, micro-steps that do not divide among
            the processes, or no launch that ended.
    """
    gpus = torch.cuda.device_count()
    processes = (gpus or 2) if processes is None else processes
    if processes < 2 or steps < 2:
        raise ValueError(
            f"expected at least 2 processes and 2 steps, got {processes} and {steps}; this compares one process with several"
        )
    if gpus and processes > gpus:
        raise ValueError(
            f"{processes} processes need as many GPUs, and there are {gpus}: ask for fewer"
        )
    if config is None:
        config = "pretrain_a100_502m" if gpus else "tiny"
        micro_steps = math.lcm(load_config(config).training.gradient_accumulation_steps, processes)
        overrides = [f"training.gradient_accumulation_steps={micro_steps}", *overrides]
    run = load_config(config, overrides)
    check_shares(run, processes)
    told = [*overrides, *_settings(run, steps)]
    load_config(config, told)  # a setting that is refused is found before anything starts
    summary: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    alone: list[float] = []
    for engine in engines_of(processes):
        row: dict[str, Any] = {
            "who": engine.who,
            "processes": engine.processes,
            "micro_batch": run.training.micro_batch_size,
        }
        summary.append(row)
        print(f"[launch] {engine.who}, {engine.processes} of {steps} steps", flush=True)
        try:
            records = launch(engine, config, told)
            losses = [r["loss"] for r in records if "event" not in r]
            if len(losses) != steps:
                raise RuntimeError(f"it ended after {len(losses)} of {steps} steps")
        except (
            RuntimeError,
            ValueError,
            OSError,
        ) as problem:  # the reason is the row; the others still run
            row["error"] = " ".join(str(problem).split())
        else:
            row |= _measured(records)
            if engine.processes == 1:
                alone = losses
            elif alone:
                row["against"] = round(row["tokens_per_s"] / summary[0]["tokens_per_s"], 3)
                row["apart"] = round(max(abs(a - b) for a, b in zip(losses, alone, strict=True)), 6)
            every = max(1, steps // INTERVALS)
            shown = sorted({1, *range(every, steps + 1, every), steps})
            curves += [{"who": engine.who, "step": s, "loss": round(losses[s - 1], 6)} for s in shown]  # fmt: skip
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if not curves:
        raise ValueError("no launch ended: " + "; ".join(f"{r['who']}: {r['error']}" for r in summary))  # fmt: skip
    notes = [] if gpus else ["no GPU here: gloo between CPU processes that share its cores"]
    if processes < gpus:
        notes.append(f"{processes} of {gpus} GPUs")
    return make_evidence(
        "parallel", f"One process and {processes}, {config}", COLUMNS, summary + curves,
        command=command, convention=CONVENTION, notes=notes, commit=commit, gpus=processes,
    )  # fmt: skip


def check_shares(run: RunConfig, processes: int) -> None:
    """See that one process and several cut a step into the same micro-batches.

    Raises:
        ValueError: a micro-batch that each launch would choose for itself, or micro-steps that do not divide.
    """
    if not isinstance(run.training.micro_batch_size, int):
        raise ValueError(
            f"training.micro_batch_size = {run.training.micro_batch_size}: each launch would choose its own; "
            "set a number"
        )
    micro_steps = run.training.gradient_accumulation_steps
    if micro_steps % processes:
        raise ValueError(
            f"training.gradient_accumulation_steps = {micro_steps} does not divide among {processes} processes; "
            f"set a multiple of {processes}"
        )


def _settings(run: RunConfig, steps: int) -> list[str]:
    """What every launch is told beside the user's overrides: one save, at the end, and nothing else in between."""
    return [
        f"training.total_steps={steps}",
        f"training.warmup_steps={min(run.training.warmup_steps, steps // 2)}",
        f"training.log_interval={max(1, steps // INTERVALS)}",
        f"training.save_interval={steps}",
        "training.nan_guard=false",  # it would save before the first step too
        "training.validation_interval=0",
        "training.sample_interval=0",
        "training.tensorboard=false",
    ]


def _measured(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The columns of a launch that ended, from its journal; logged intervals alone carry speed and memory."""
    logged = [r for r in records if "tokens_per_second" in r]
    rates = [r["tokens_per_second"] for r in logged]
    found = {
        "tokens_per_step": next(r for r in records if r.get("event") == "start")["tokens_per_step"],
        "tokens_per_s": round(statistics.median(rates[len(rates) // 3 :])),
    }
    if "memory_gib" in logged[-1]:
        found["peak_gib"] = round(logged[-1]["memory_gib"], 2)  # of the run so far, before its save
    return found
