"""Square pictures of attention: which query sees which key, and with what weight."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from .palette import CARD, INK, QUIET, RULE, color_of, ramp, text_on, tint


def _label_axes(ax: Axes, queries: int, keys: int) -> None:
    ax.set(xlabel="key", ylabel="query")
    ax.set_xticks(range(0, keys, max(1, (keys + 7) // 8)))
    ax.set_yticks(range(0, queries, max(1, (queries + 7) // 8)))
    ax.tick_params(length=0)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)


def mask_grid(ax: Axes, visible: np.ndarray, meaning: str = "global") -> None:
    """Draw a mask: a seen key is a tinted cell with a dot, an unseen one an empty cell.

    Args:
        ax: axes to draw in; equal cells, query 0 at the top.
        visible: (T, S) bool, True where the query sees the key; a torch tensor will do.
        meaning: "windowed" or "global", or another key of `COLORS`.

    Raises:
        ValueError: `visible` is not a matrix.
    """
    seen = np.asarray(visible, dtype=bool)
    if seen.ndim != 2:
        raise ValueError(
            f"visible must be (T, S); got shape {seen.shape}: pick one head and batch row"
        )
    queries, keys = seen.shape
    for row in range(queries):
        for column in range(keys):
            face = tint(meaning, 0.35) if seen[row, column] else CARD
            ax.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=face, edgecolor=RULE, lw=0.7)
            )
    rows, columns = np.nonzero(seen)
    ax.scatter(columns, rows, s=min(14.0, 900 / keys**2 + 1), color=color_of(meaning), zorder=2)
    ax.set(xlim=(-0.55, keys - 0.45), ylim=(queries - 0.45, -0.55), aspect="equal")
    _label_axes(ax, queries, keys)


def attention_map(
    ax: Axes,
    weights: np.ndarray,
    sink: np.ndarray | None = None,
    *,
    values: bool = False,
    largest: float | None = None,
) -> None:
    """Draw attention weights: the darker a cell, the more of the query's mass the key has.

    Args:
        ax: axes to draw in; query 0 at the top.
        weights: (T, S) weights of the real keys, each 0 to 1.
        sink: (T,) the sink's share of each query; drawn as a column of its own, left of the keys.
        values: write each weight (two digits) into its cell; for small maps.
        largest: the weight drawn darkest; None takes the largest that occurs.

    Raises:
        ValueError: the shapes do not fit.
    """
    mass = np.asarray(weights, dtype=float)
    if mass.ndim != 2:
        raise ValueError(
            f"weights must be (T, S); got shape {mass.shape}: pick one head and batch row"
        )
    queries, keys = mass.shape
    share = None if sink is None else np.asarray(sink, dtype=float)
    if share is not None and share.shape != (queries,):
        raise ValueError(f"sink must be ({queries},), one share a query; got shape {share.shape}")
    most = max(float(mass.max()), 0.0 if share is None else float(share.max()))
    top = largest or most or 1.0
    left = -0.5
    edge = (queries - 0.5, -0.5)
    parts: list[tuple[np.ndarray, str | None, tuple[float, float, float, float]]] = [
        (mass, None, (-0.5, keys - 0.5, *edge))
    ]
    if share is not None:
        wide = max(1.0, keys / 16)  # broad enough to see and to label
        left = -1.0 - 1.5 * wide
        parts.append((share[:, None], "sink", (left, left + wide, *edge)))
    for block, meaning, extent in parts:
        picture = ramp(meaning)
        ax.imshow(block, cmap=picture, vmin=0, vmax=top, extent=extent, aspect="auto")
        outline = INK if meaning is None else color_of(meaning)
        ax.add_patch(
            Rectangle(
                (extent[0], -0.5), extent[1] - extent[0], queries, fill=False, ec=outline, lw=1
            )
        )
        if values:
            for (row, column), weight in np.ndenumerate(block):
                shade = to_hex(picture(min(weight / top, 1.0)))
                ax.text(
                    (extent[0] + extent[1]) / 2 if meaning else column,
                    row,
                    f"{weight:.2f}".removeprefix("0") if weight else "",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=text_on(shade),
                )
    ax.set(xlim=(left - 0.05, keys - 0.45), ylim=(queries - 0.45, -0.55), aspect="equal")
    _label_axes(ax, queries, keys)
    if share is not None:
        ax.set_xticks([left + wide / 2, *ax.get_xticks()])
        labels = ["sink", *(str(int(tick)) for tick in ax.get_xticks()[1:])]
        ax.set_xticklabels(labels)
        ax.get_xticklabels()[0].set_color(QUIET)
