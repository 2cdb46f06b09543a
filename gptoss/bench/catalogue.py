"""The source documents' 24 optimisations, each measured on against off where it acts.

`gptoss bench catalogue`. It is outside `bench all`. The entries live in `optimisations/`; a verdict is computed from the
numbers and their noise (`optimisations/reading.py`), and an entry that fails is a row with the reason.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from gptoss.bench.agreement import BAND
from gptoss.bench.evidence import make_evidence
from gptoss.bench.release import release_memory

from .optimisations import (
    cache,
    decoding,
    experts,
    layout,
    loss_chunks,
    masks,
    router,
    shards,
    short_runs,
    trainer,
    update,
)
from .optimisations.reading import TIME_RESOLUTION, Place, Row, raised

COLUMNS = {
    "opt": "number in the documents' catalogue",
    "title": "what is switched on",
    "place": "where it is measured, at which sizes",
    "measure": "what is measured, with its unit",
    "off": "without the optimisation: the median for ratios, the mean for differences",
    "on": "with it, as the documents have it",
    "ours": "what this package does in its place, where that is a third way",
    "effect": "what switching it on does",
    "compared": "how the effect is computed",
    "noise": "both sides' relative spreads over the rounds, added, for ratios, half-width of the 95% interval for differences",
    "verdict": "gains or costs where the effect exceeds its noise, else no difference; raises where it does not run",
    "difference": "relative error of the on side's result against the off side's",
    "problem": "why there is no number",
}
CONVENTION = (
    f"off, on and ours in turns; ratio off / on: above 1 the optimisation is better; times under {TIME_RESOLUTION:.0%} apart and losses "
    f"under {BAND} nats apart count as no difference; 1 yes, 0 no: higher is better; else lower is better"
)


class Entry(NamedTuple):
    """One optimisation: its number, its title and what measures it."""

    opt: int
    title: str
    run: Callable[[Place], Iterable[Row]]


ENTRIES = (
    Entry(1, "masks kept by lru_cache", masks.kept_masks),
    Entry(2, "repeat_kv by expand and reshape", layout.repeated_heads),
    Entry(3, "sink by a mask column through SDPA", masks.sink_by_mask),
    Entry(4, "RMSNorm in bf16, statistic detached", layout.norm_dtype),
    Entry(5, "dispatch by one stable sort", experts.sorted_dispatch),
    Entry(6, "router's softmax in fp32", router.router_softmax),
    Entry(7, "every third block checkpointed", trainer.checkpointing),
    Entry(8, "clipping with foreach", update.clipping),
    Entry(9, "AdamW with foreach and fused", update.adamw),
    Entry(10, "shard lookup by bisection", shards.shard_lookup),
    Entry(11, "ring buffer in windowed layers", cache.ring),
    Entry(12, "global buffer grows by half", cache.growth),
    Entry(13, "output tensor allocated once", cache.output_tensor),
    Entry(14, "sinks clamped once a generation", decoding.sink_clamp),
    Entry(15, "rotary tables of one position", decoding.one_position),
    Entry(16, "compiled blocks", trainer.compilation),
    Entry(17, "Adam's eps 1e-6", short_runs.adam_eps),
    Entry(18, "warmup", short_runs.warmup),
    Entry(19, "load-balancing loss", short_runs.aux_loss),
    Entry(20, "switches for cuDNN, TF32 and BLAS", trainer.hardware_settings),
    Entry(21, "8,192 positions a loss chunk", loss_chunks.loss_chunks),
    Entry(22, "mask of one query", masks.one_query_mask),
    Entry(23, "rotary tables in the input's dtype", layout.rotary_dtype),
    Entry(24, "documents' fused expert kernel", experts.fused_kernel),
)
# Those that compile come last: what they leave behind must not stand in the others' way.
LATE = (4, 7, 20, 16)


def measure(
    only: Sequence[int] | None = None,
    *,
    commit: str | None = None,
    command: str = "gptoss bench catalogue",
) -> dict[str, Any]:
    """Measure the optimisations, all or some, on the GPU at the production model's sizes or on this CPU at small ones.

    Args:
        only: numbers of the catalogue; all 24 when left out.
        commit, command: for the evidence file.

    Returns:
        The evidence, one row a measured quantity, in the catalogue's order.

    Raises:
        ValueError: a number that the catalogue does not have.
    """
    known = {entry.opt: entry for entry in ENTRIES}
    wanted = list(known) if only is None else list(dict.fromkeys(only))
    for opt in wanted:
        if opt not in known:
            raise ValueError(f"OPT-{opt}: the catalogue has 1 to {max(known)}")
    if not wanted:
        raise ValueError("no optimisation to measure: name at least one of the catalogue's")
    place = Place.here()
    rows: dict[int, list[Row]] = {}
    for opt in sorted(wanted, key=lambda opt: (opt in LATE and LATE.index(opt) + 1, opt)):
        rows[opt] = run_entry(known[opt], place)
    place.shared.clear()
    release_memory()
    notes = [f"trainings: {describe_runs(place)}"]
    if not place.cuda:
        notes.insert(
            0,
            "no GPU here: small sizes in float32; kernels for GPUs do not run, peaks are not measured",
        )
    return make_evidence(
        "catalogue", "The documents' optimisations, on against off", COLUMNS,
        [row for opt in sorted(rows) for row in rows[opt]],
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip


def run_entry(entry: Entry, place: Place) -> list[Row]:
    """One entry's rows, numbered; where it fails, the rows so far and one with the reason. Prints a line."""
    start = time.perf_counter()
    torch.manual_seed(0)
    found: list[Row] = []
    try:
        found.extend(entry.run(place))
    except Exception as problem:  # the reason is the row; the other entries still run
        found.append(raised("what follows" if found else "the whole entry", "-", problem))
    if place.cuda:
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    verdicts = ", ".join(row["verdict"] for row in found)
    print(f"[opt] OPT-{entry.opt} {entry.title}: {verdicts} ({seconds:.1f} s)", flush=True)
    return [{"opt": entry.opt, "title": entry.title, **row} for row in found]


def describe_runs(place: Place) -> str:
    """The small model of the short trainings, in words."""
    model = short_runs.configuration(place).model
    return f"{model.n_layers} layers of width {model.d_model}, {model.n_routed_experts} experts, {model.dtype}, eager, the text of this package"
