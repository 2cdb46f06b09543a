"""What each colour, marker and line means, from chapter 1 to chapter 17.

A meaning never changes its colour and is never told by colour alone: every one has its own marker, and layer kinds
have their own line. All figures stand on one light card with dark ink, so that they read the same on a white page,
on a dark page and in print. No grey reaches a contrast of 4.5 on white and on the site's dark background at once
(the best possible is 4.33), so a transparent figure would fail on one of the two.

The ten colours were chosen by search: seen with normal vision, deuteranopia, protanopia or tritanopia, any two of one
group (attention, experts, costs) differ by at least 10 and any two at all by at least 7.5 (CIEDE2000). Each has a
contrast of at least 3 against the card, enough for lines and marks; words are always written in `INK`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb

CARD = "#fafaf7"  # every figure's background
INK = "#23262b"  # words, axes, arrows
QUIET = "#5f646b"  # secondary words and ticks
RULE = "#d9d9d3"  # grid lines and empty cells

COLORS: Mapping[str, str] = MappingProxyType(
    {
        "queries": "#0172d2",
        "keys": "#fa5014",
        "values": "#118256",
        "sink": "#954a88",
        "windowed": "#1a9bc3",
        "global": "#292f4f",
        "routed": "#9c8c3b",
        "shared": "#53250e",
        "bytes": "#6d747c",
        "flops": "#c3003a",
    }
)
MARKERS: Mapping[str, str] = MappingProxyType(
    {
        "queries": "o",
        "keys": "s",
        "values": "^",
        "sink": "D",
        "windowed": "v",
        "global": "P",
        "routed": "X",
        "shared": "*",
        "bytes": "h",
        "flops": "p",
    }
)
LINESTYLES: Mapping[str, str] = MappingProxyType(
    {meaning: "--" if meaning in ("windowed", "bytes") else "-" for meaning in COLORS}
)
CLAIM_HATCH = "////"  # what the source documents claim


def color_of(meaning: str) -> str:
    """The colour of a meaning.

    Args:
        meaning: a key of `COLORS`.

    Returns:
        Hex colour.

    Raises:
        ValueError: no such meaning.

    Source: the palette's key, in the notation appendix.
    """
    if meaning not in COLORS:
        raise ValueError(
            f"meaning must be one of {', '.join(COLORS)}; got {meaning!r}: pick the one the figure shows"
        )
    return COLORS[meaning]


def tint(meaning: str, amount: float = 0.25) -> str:
    """A meaning's colour thinned with the card, pale enough to carry words.

    Args:
        meaning: a key of `COLORS`.
        amount: share of the full colour, 0 (the card) to 1 (the colour).

    Returns:
        Hex colour.
    """
    strong, card = to_rgb(color_of(meaning)), to_rgb(CARD)
    red, green, blue = (amount * s + (1 - amount) * c for s, c in zip(strong, card, strict=True))
    return to_hex((red, green, blue))


def ramp(meaning: str | None = None) -> LinearSegmentedColormap:
    """A colour map from the card (0) to a meaning's colour (1), or to the ink without a meaning.

    Args:
        meaning: a key of `COLORS`, or None.

    Returns:
        A matplotlib colour map.
    """
    end = INK if meaning is None else color_of(meaning)
    return LinearSegmentedColormap.from_list(f"card_to_{meaning or 'ink'}", [CARD, end])


def luminance(color: str) -> float:
    """WCAG relative luminance of a colour, 0 (black) to 1 (white)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """WCAG contrast of two colours, 1 (the same) to 21 (black on white)."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def text_on(background: str) -> str:
    """`INK` or `CARD`, whichever reads better on a background."""
    return max((INK, CARD), key=lambda ink: contrast(ink, background))
