"""Data flow: tensors as boxes that carry their name and shape, arrows between them.

The same shapes mean the same things in every chapter: a square-cornered box is a tensor, a round one an operation,
an arrow the way the data goes.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from .palette import CARD, INK, QUIET, color_of, tint
from .style import WIDTH

Point = tuple[float, float]


@dataclass(frozen=True)
class Block:
    """Where a box stands: lower left corner and size, in the diagram's inches."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> Point:
        """Middle of the left edge."""
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> Point:
        """Middle of the right edge."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> Point:
        """Middle of the upper edge."""
        return self.x + self.width / 2, self.y + self.height

    @property
    def bottom(self) -> Point:
        """Middle of the lower edge."""
        return self.x + self.width / 2, self.y


def diagram(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty sheet whose coordinates are inches, (0, 0) at the lower left.

    Args:
        height: inches.
        width: inches; `WIDTH` unless the figure has a reason.

    Returns:
        Figure and axes, without ticks or frame.
    """
    figure = plt.figure(figsize=(width, height), layout="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def tensor_block(
    ax: Axes,
    xy: Point,
    size: Point,
    name: str,
    shape: str = "",
    meaning: str | None = None,
) -> Block:
    """Draw a tensor: a square-cornered box with its name and, below, its shape.

    Args:
        ax: a sheet from `diagram`, or any axes.
        xy: lower left corner.
        size: width and height.
        name: what it is called in the text, mathtext allowed.
        shape: for instance "(B, H, T, D)"; empty leaves it out.
        meaning: a key of `COLORS`; None draws it in ink.

    Returns:
        The box, with `.left`, `.right`, `.top`, `.bottom` to attach arrows to.
    """
    block = Block(*xy, *size)
    edge = INK if meaning is None else color_of(meaning)
    face = CARD if meaning is None else tint(meaning)
    ax.add_patch(Rectangle(xy, *size, facecolor=face, edgecolor=edge, linewidth=1.6))
    middle_x, middle_y = block.top[0], block.left[1]
    lift = min(0.1, 0.17 * block.height) if shape else 0.0
    ax.text(middle_x, middle_y + lift, name, ha="center", va="center", fontsize=10.5)
    if shape:
        ax.text(middle_x, middle_y - lift - 0.02, shape, ha="center", va="center", fontsize=8.5)
    return block


def operation_block(ax: Axes, xy: Point, size: Point, name: str) -> Block:
    """Draw an operation: a round-cornered box with its name.

    Args:
        ax: a sheet from `diagram`, or any axes.
        xy: lower left corner.
        size: width and height.
        name: for instance "softmax".

    Returns:
        The box, to attach arrows to.
    """
    block = Block(*xy, *size)
    radius = 0.35 * min(size)
    ax.add_patch(
        FancyBboxPatch(
            xy,
            *size,
            boxstyle=f"round,pad=0,rounding_size={radius}",
            facecolor=CARD,
            edgecolor=INK,
        )
    )
    ax.text(block.top[0], block.left[1], name, ha="center", va="center", fontsize=10)
    return block


def flow_arrow(
    ax: Axes,
    start: Point,
    end: Point,
    label: str = "",
    meaning: str | None = None,
    bend: float = 0.0,
) -> None:
    """Draw the way the data goes, from one point to another.

    Args:
        ax: the axes that hold both.
        start: for instance `block.right`.
        end: for instance `other.left`.
        label: words beside the middle of the arrow.
        meaning: a key of `COLORS`; None draws it in ink.
        bend: curvature, 0 is straight, positive bends to the left of the direction of travel.
    """
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            linewidth=1.3,
            shrinkA=1,
            shrinkB=1,
            connectionstyle=f"arc3,rad={bend}",
            color=INK if meaning is None else color_of(meaning),
        )
    )
    if label:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        upright = abs(end[1] - start[1]) > abs(end[0] - start[0])
        ax.annotate(
            label,
            middle,
            xytext=(6, 0) if upright else (0, 5),
            textcoords="offset points",
            ha="left" if upright else "center",
            va="center" if upright else "bottom",
            fontsize=8.5,
            color=QUIET,
        )
