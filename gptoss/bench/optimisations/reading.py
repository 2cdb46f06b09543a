"""One measured quantity, with an optimisation on and off, and what its numbers say.

Times are taken off, on, on, off, off, on, … so that a clock that drifts or a neighbour that works meets both sides alike.
The median of the rounds is the number, their spread the noise, and the verdict follows from these alone.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptoss.bench.timing import median_seconds

Row = dict[str, Any]
Run = Callable[[], object]

RATIO, DIFFERENCE = "off / on", "on - off"
GAINS, NOTHING, COSTS, RAISES = "gains", "no difference", "costs", "raises"
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 95%, by pairs − 1
TIME_RESOLUTION = 0.02  # a shorter gain than 2% of a time is none, however quiet the clock


@dataclass(frozen=True)
class Place:
    """Where it is measured: the device, the dtype of activations there, and what several entries make once."""

    device: torch.device
    dtype: torch.dtype
    shared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls) -> "Place":
        """The GPU in bf16, or this CPU in fp32."""
        cuda = torch.cuda.is_available()
        return cls(
            torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
        )

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave at its first call under this name."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    @property
    def cuda(self) -> bool:
        """Whether sizes are the production model's."""
        return self.device.type == "cuda"

    def name(self, text: str, dtype: torch.dtype | None = None) -> str:
        """A description with the dtype behind it."""
        return f"{text}, {'bf16' if (dtype or self.dtype) == torch.bfloat16 else 'fp32'}"


class Judgement(NamedTuple):
    """What two series of numbers come to; `compared` names the effect."""

    off: float
    on: float
    effect: float | None
    compared: str
    noise: float
    verdict: str


def judge(
    off: Sequence[float],
    on: Sequence[float],
    *,
    compared: str = RATIO,
    higher_is_better: bool = False,
    resolution: float = 0.0,
) -> Judgement:
    """Hold a difference against its noise.

    "off / on": the ratio of the medians; its noise is both sides' relative spreads, (max − min)/median, added.
    "on - off": the mean of the paired differences; its noise is the half-width of their 95% interval by Student's t.
    A single number a side (bytes, a computed size) has no noise.

    Args:
        off, on: repeated measurements, of equal number where they are pairs.
        compared: which of the two.
        higher_is_better: for shares and rates; times, bytes, errors and losses are better low.
        resolution: an effect below it counts as none even without noise.

    Returns:
        "gains" or "costs" where the effect exceeds noise and resolution, else "no difference".

    Raises:
        ValueError: an empty series, or pairs of unequal number.
    """
    if not off or not on or (compared == DIFFERENCE and len(off) != len(on)):
        raise ValueError(
            f"expected measurements of both sides, in pairs for differences; got {len(off)} and {len(on)}"
        )
    middle_off, middle_on = statistics.median(off), statistics.median(on)
    if compared == RATIO and middle_off > 0 and middle_on > 0:
        effect = middle_off / middle_on
        noise = sum((max(s) - min(s)) / m for s, m in ((off, middle_off), (on, middle_on)))
        better = effect - 1 if effect > 1 else 1 - 1 / effect  # alike in both directions
    else:
        compared = DIFFERENCE  # a ratio of nothing is none
        pairs = [b - a for a, b in zip(off, on, strict=False)]
        effect, noise = statistics.fmean(pairs), 0.0
        if len(pairs) > 1:
            quantile = STUDENT[min(len(pairs) - 1, len(STUDENT)) - 1]
            noise = quantile * statistics.stdev(pairs) / len(pairs) ** 0.5
        middle_off, middle_on = statistics.fmean(off), statistics.fmean(on)
        better = -effect
    if higher_is_better:
        better = -better
    settled = abs(better) > max(noise, resolution)
    verdict = (GAINS if better > 0 else COSTS) if settled else NOTHING
    return Judgement(middle_off, middle_on, effect, compared, noise, verdict)


def compare(
    where: str, measure: str, off: Sequence[float], on: Sequence[float], **settings: Any
) -> Row:
    """A row from numbers; `settings` are `judge`'s, and `ours`."""
    ours = settings.pop("ours", None)
    return _row(where, measure, judge(off, on, **settings), ours)


def compare_times(
    place: Place,
    where: str,
    off: Run,
    on: Run,
    *,
    ours: Run | None = None,
    measure: str = "ms",
    per_call: float = 1.0,
    rounds: int = 5,
    repeats: int = 10,
) -> Row:
    """Time both sides in turns, and the package's own piece with them.

    Args:
        place: CUDA events or the clock.
        where: what is timed, at which sizes.
        off, on, ours: one call each.
        measure: the unit, "ms" or "µs", maybe with what it is counted by.
        per_call: how many units of work one call does.
        rounds, repeats: turns, and calls whose median one turn is.
    """
    scale = (1e6 if measure.startswith("µs") else 1e3) / per_call
    sides = {"off": off, "on": on} | ({} if ours is None else {"ours": ours})
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side, run in list(sides.items())[:: -1 if turn % 2 else 1]:
            taken[side].append(scale * median_seconds(run, place.device, repeats))
    judged = judge(taken["off"], taken["on"], resolution=TIME_RESOLUTION)
    return _row(where, measure, judged, statistics.median(taken["ours"]) if ours else None)


def compare_peaks(
    place: Place, where: str, off: Run, on: Run, ours: Run | None = None
) -> list[Row]:
    """Peak memory above what was there before the call, in GiB: one row on a GPU, none elsewhere."""
    if not place.cuda:
        return []
    peaks = [None if run is None else peak_gib(run) for run in (off, on, ours)]
    return [compare(where, "peak GiB", [peaks[0] or 0], [peaks[1] or 0], ours=peaks[2])]


def peak_gib(run: Run) -> float:
    """Peak memory of one call on the GPU above what was there before, after a call that makes what is made once."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth, in float64."""
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def raised(where: str, measure: str, problem: BaseException) -> Row:
    """The row of something that does not run, with the reason."""
    reason = " ".join(str(problem).split())[:200] or type(problem).__name__
    return {"place": where, "measure": measure, "verdict": RAISES, "problem": reason}


def _row(where: str, measure: str, judged: Judgement, ours: float | None) -> Row:
    row: Row = {
        "place": where,
        "measure": measure,
        "off": _short(judged.off),
        "on": _short(judged.on),
    }
    if ours is not None:
        row["ours"] = _short(ours)
    return row | {
        "effect": None if judged.effect is None else _short(judged.effect),
        "compared": judged.compared,
        "noise": _short(judged.noise),
        "verdict": judged.verdict,
    }


def _short(value: float) -> float | int:
    """Four significant digits; whole numbers as they are."""
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")
