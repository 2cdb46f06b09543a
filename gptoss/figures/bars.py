"""Numbers beside numbers: predicted is outlined, measured is filled, the documents' claim is hatched."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from .palette import CARD, CLAIM_HATCH, INK, LINESTYLES, MARKERS, color_of

KINDS = ("predicted", "measured", "claimed")
LEGEND = {"predicted": "predicted", "measured": "measured", "claimed": "the documents' claim"}


def compare_bars(
    ax: Axes,
    labels: Sequence[str],
    *,
    predicted: Sequence[float] | None = None,
    measured: Sequence[float] | None = None,
    claimed: Sequence[float] | None = None,
    meaning: str | Sequence[str] = "bytes",
    number: str | None = "{:.3g}",
    horizontal: bool = False,
) -> None:
    """Draw one group of bars per label, one bar for each kind of number that is given.

    Args:
        ax: axes to draw in; name the unit on its value axis yourself.
        labels: one a group.
        predicted: what the formula says, outlined.
        measured: what was measured, filled.
        claimed: what the source documents say, hatched.
        meaning: a key of `COLORS` for all bars, or one a group.
        number: format of the number at the end of each bar; None writes none.
        horizontal: draw bars to the right instead of upwards, for long labels.

    Raises:
        ValueError: a series has another length than `labels`, or none is given.
    """
    given = dict(zip(KINDS, (predicted, measured, claimed), strict=True))
    series = {kind: list(numbers) for kind, numbers in given.items() if numbers is not None}
    if not series:
        raise ValueError("give at least one of predicted, measured, claimed; got none")
    for kind, numbers in series.items():
        if len(numbers) != len(labels):
            raise ValueError(
                f"{kind} must have {len(labels)} numbers, one a label; got {len(numbers)}"
            )
    meanings = [meaning] * len(labels) if isinstance(meaning, str) else list(meaning)
    thick = 0.8 / len(series)
    for place, (kind, numbers) in enumerate(series.items()):
        offset = (place - (len(series) - 1) / 2) * thick
        if horizontal:
            offset = -offset
        spots = np.arange(len(labels)) + offset
        colors = [color_of(m) for m in meanings]
        look: dict[str, Any] = {
            "color": colors if kind == "measured" else CARD,
            "edgecolor": colors,
            "linewidth": 1.8,
            "hatch": CLAIM_HATCH if kind == "claimed" else None,
            "label": LEGEND[kind],
        }
        if horizontal:
            bars = ax.barh(spots, numbers, thick * 0.86, **look)
        else:
            bars = ax.bar(spots, numbers, thick * 0.86, **look)
        if number is not None:
            ax.bar_label(
                bars, [number.format(n) for n in numbers], padding=3, fontsize=8.5, color=INK
            )
    ticks = np.arange(len(labels))
    if horizontal:
        ax.set_yticks(ticks, labels)
        ax.grid(False, axis="y")
        ax.margins(x=0.15)
        ax.invert_yaxis()
    else:
        ax.set_xticks(ticks, labels)
        ax.grid(False, axis="x")
        ax.margins(y=0.15)
    if len(series) > 1:
        ax.legend()


def series_line(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    meaning: str,
    kind: str = "measured",
    label: str = "",
) -> None:
    """Draw one curve with its meaning's colour, marker and line.

    Args:
        ax: axes to draw in.
        x: horizontal positions.
        y: heights.
        meaning: a key of `COLORS`.
        kind: "measured" fills the markers, "predicted" leaves them open on a thinner line, "claimed" dots the line.
        label: for the legend.

    Raises:
        ValueError: no such kind or meaning.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    color = color_of(meaning)
    spots = np.unique(np.linspace(0, len(x) - 1, min(len(x), 9)).astype(int)).tolist()
    ax.plot(
        x,
        y,
        color=color,
        linestyle=":" if kind == "claimed" else LINESTYLES[meaning],
        linewidth=1.2 if kind == "predicted" else 1.8,
        marker=MARKERS[meaning],
        markevery=spots,
        markerfacecolor=color if kind == "measured" else CARD,
        markeredgecolor=color,
        label=label or None,
    )
