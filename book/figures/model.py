"""Draws book/figures/model.svg, the picture of the model in README.md and on the front page.

Run it again after a change: `python book/figures/model.py`. The colours are those of `gptoss.figures`.
"""

from pathlib import Path

from gptoss.figures import CARD, COLORS, INK, QUIET, RULE, tint

WIDTH, HEIGHT = 940, 492
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"


def box(
    x: float, y: float, w: float, h: float, fill: str, edge: str, width: float = 1.5, dash: str = ""
) -> str:
    dashed = f" stroke-dasharray='{dash}'" if dash else ""
    return (
        f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='6' fill='{fill}' stroke='{edge}' "
        f"stroke-width='{width}'{dashed}/>"
    )


def words(
    x: float,
    y: float,
    text: str,
    size: float = 14,
    color: str = INK,
    weight: int = 400,
    anchor: str = "middle",
) -> str:
    return (
        f"<text x='{x}' y='{y}' font-size='{size}' fill='{color}' font-weight='{weight}' "
        f"text-anchor='{anchor}'>{text}</text>"
    )


def arrow(points: str, color: str = INK) -> str:
    return f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='1.6' marker-end='url(#tip)'/>"


def stack() -> list[str]:
    """Left: embedding, twelve blocks that alternate, the tied head."""
    left, width, middle = 36, 196, 134
    parts = [
        words(middle, 38, "12 layers, alternating", 13, QUIET),
        box(left, 440, width, 32, tint("bytes"), COLORS["bytes"]),
        words(middle, 461, "embedding, 128,000 × 768", 12),
        box(left, 54, width, 32, tint("bytes"), COLORS["bytes"]),
        words(middle, 75, "RMSNorm, tied head", 13),
    ]
    for layer in range(12):
        kind = "windowed" if layer % 2 == 0 else "global"
        y = 404 - layer * 26.5
        parts.append(
            box(
                left,
                y,
                width,
                21,
                tint(kind),
                COLORS[kind],
                1.5,
                "5 3" if kind == "windowed" else "",
            )
        )
        label = "last 128 tokens" if kind == "windowed" else "the whole past"
        parts.append(words(middle, y + 15, f"{layer} · {kind}: {label}", 11))
    parts.append(arrow("134,440 134,428"))
    parts.append(arrow(f"134,{404 - 11 * 26.5} 134,89"))
    # tied weights
    parts.append(
        f"<path d='M 36 456 H 18 V 70 H 30' fill='none' stroke='{COLORS['bytes']}' stroke-width='1.5' "
        "stroke-dasharray='2 3' marker-end='url(#tip)'/>"
    )
    return parts


def attention() -> list[str]:
    """Middle: one block's attention, eight query heads over four key-value heads and a sink."""
    parts = [
        box(272, 54, 310, 418, "#ffffff", RULE),
        words(427, 38, "in each layer: attention", 13, QUIET),
        words(427, 80, "x + Attention(RMSNorm(x))", 15, weight=600),
        words(427, 452, "RMSNorm", 14),
        box(372, 434, 110, 26, "none", INK, 1.2),
    ]
    for head in range(8):
        parts.append(box(292 + head * 34.2, 364, 28, 32, tint("queries"), COLORS["queries"]))
    parts.append(words(427, 416, "8 query heads of 96", 12.5))
    for head in range(4):
        x = 292 + head * 68.4
        parts.append(box(x, 290, 29, 32, tint("keys"), COLORS["keys"]))
        parts.append(box(x + 33.2, 290, 29, 32, tint("values"), COLORS["values"]))
        parts.append(words(x + 14.5, 311, "K", 13))
        parts.append(words(x + 47.7, 311, "V", 13))
        for side in (14, 48.2):
            parts.append(
                f"<line x1='{x + side}' y1='364' x2='{x + 31.1}' y2='322' stroke='{INK}' stroke-width='1.1'/>"
            )
    parts.append(words(427, 278, "4 key-value heads, rotary positions + YaRN", 12.5))
    # softmax with a sink
    heights = [18, 34, 12, 52, 26, 40]
    for index, height in enumerate(heights):
        parts.append(
            box(316 + index * 26, 236 - height, 20, height, tint("keys", 0.45), COLORS["keys"])
        )
    parts.append(box(480, 192, 20, 44, tint("sink", 0.5), COLORS["sink"], 1.8))
    parts.append(f"<line x1='308' y1='236' x2='556' y2='236' stroke='{INK}' stroke-width='1.3'/>")
    parts.append(words(392, 253, "softmax over the keys", 12.5))
    parts.append(words(524, 253, "and a sink", 12.5, COLORS["sink"], 600))
    parts.append(box(362, 118, 130, 28, "none", INK, 1.2))
    parts.append(words(427, 137, "output projection", 13))
    parts.append(arrow("427,176 427,150"))
    parts.append(arrow("427,434 427,422"))
    parts.append(arrow("427,118 427,90"))
    return parts


def experts() -> list[str]:
    """Right: the mixture of experts, two of eight and the shared one."""
    parts = [
        box(612, 54, 300, 418, "#ffffff", RULE),
        words(762, 38, "then: experts", 13, QUIET),
        words(762, 80, "x + MoE(RMSNorm(x))", 15, weight=600),
        box(707, 434, 110, 26, "none", INK, 1.2),
        words(762, 452, "RMSNorm", 14),
        box(652, 360, 150, 30, "#ffffff", COLORS["routed"], 1.8),
        words(727, 380, "router: 2 of 8", 14),
        arrow("745,434 727,393"),
        words(722, 172, "weighted sum of the two", 12.5),
    ]
    chosen = (2, 5)
    for expert in range(8):
        x = 630 + expert * 24
        on = expert in chosen
        parts.append(
            box(
                x,
                214,
                20,
                100,
                tint("routed", 0.5) if on else CARD,
                COLORS["routed"],
                2 if on else 1,
            )
        )
        parts.append(words(x + 10, 269, str(expert), 13, INK if on else QUIET, 600 if on else 400))
        if on:
            parts.append(arrow(f"727,360 {x + 10},318"))
            parts.append(arrow(f"{x + 10},214 722,181"))
    parts.append(box(836, 214, 62, 100, tint("shared", 0.3), COLORS["shared"], 2))
    parts.append(words(867, 269, "shared", 13, weight=600))
    parts.append(arrow("790,434 867,318"))
    parts.append(arrow("867,214 772,140"))
    parts.append(box(748, 114, 28, 28, "#ffffff", INK, 1.2))
    parts.append(words(762, 134, "+", 18))
    parts.append(arrow("726,158 750,144"))
    parts.append(arrow("762,114 762,90"))
    return parts


def draw() -> str:
    title = "GPT-OSS-Lite: twelve layers; in each, grouped-query attention with a sink, then two of eight experts"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' {FONT}>",
        f"<title>{title}</title>",
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0 0L8 4L0 8z' fill='{INK}'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='10' fill='{CARD}'/>",
        *stack(),
        arrow("234,266 268,266", QUIET),
        arrow("584,266 608,266", QUIET),
        *attention(),
        *experts(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("model.svg").write_text(draw())
