"""A roofline on two sliders: the reader sets a tile and sees which roof it meets, in HTML without outside scripts (chapter 2)."""

import json
import math

from .palette import CARD, COLORS, INK, QUIET, RULE
from .slider_style import slider_style

SIDES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LEFT, RIGHT, TOP, BOTTOM = 52, 500, 12, 188  # the plot's frame in SVG units
LOW_X, HIGH_X, LOW_Y, HIGH_Y = -1.0, 3.0, 11.0, 15.5  # decades of FLOP/B and of FLOP/s

_STYLE = slider_style(
    "roofline-slider",
    COLORS["flops"],
    f"""\
#roofline-slider svg {{ width: 100%; height: auto; display: block; }}
#roofline-slider svg text {{ fill: {INK}; font-size: 11px; }}
#roofline-slider .ask {{ margin: 0.4em 0; }}
""",
    f"""\
#roofline-slider select {{ font: inherit; color: {INK}; background: {CARD}; border: 1px solid {QUIET}; border-radius: 4px; }}
#roofline-slider input:focus-visible, #roofline-slider select:focus-visible {{
  outline: 3px solid {COLORS["queries"]}; outline-offset: 2px; }}
""",
)

_SCRIPT = """
(function () {
  const root = document.getElementById("roofline-slider"), c = CONSTANTS;
  const [rows, columns] = root.querySelectorAll("input"), kind = root.querySelector("select");
  const outputs = root.querySelectorAll("output"), dot = root.querySelector(".here"), drop = root.querySelector(".drop");
  const said = root.querySelector("p");
  function draw() {
    const T = c.sides[Number(rows.value)], N = c.sides[Number(columns.value)], m = Number(kind.value);
    const intensity = 2 * m / (c.b * (m / T + 1 / N)), memory = intensity * c.bandwidth, rate = Math.min(memory, c.peak);
    const x = c.left + (Math.log10(intensity) - c.lowX) / (c.highX - c.lowX) * (c.right - c.left);
    const y = c.bottom - (Math.log10(rate) - c.lowY) / (c.highY - c.lowY) * (c.bottom - c.top);
    dot.setAttribute("cx", x.toFixed(1)); dot.setAttribute("cy", y.toFixed(1));
    drop.setAttribute("x1", x.toFixed(1)); drop.setAttribute("x2", x.toFixed(1)); drop.setAttribute("y1", y.toFixed(1));
    outputs[0].textContent = T; outputs[1].textContent = N;
    rows.setAttribute("aria-valuetext", T + " rows"); columns.setAttribute("aria-valuetext", N + " columns");
    said.textContent = intensity.toFixed(1) + " FLOP a byte: at most " + (rate / 1e12).toFixed(1) + " TFLOP/s, "
      + (100 * rate / c.peak).toFixed(1) + "% of the peak; bound by " + (memory < c.peak ? "memory." : "arithmetic.");
  }
  [rows, columns, kind].forEach(e => e.addEventListener("input", draw));
  draw();
})();
"""


def roofline_slider(
    peak: float, bandwidth: float, rows: int = 16, columns: int = 32, element_bytes: int = 2
) -> str:
    """HTML of a roofline on which the reader moves a tile's two sides, by mouse or arrow keys.

    I = 2m / (b (m/T + 1/N)) for m weight matrices that share one tile of rows; P = min(peak, I · bandwidth). Without
    scripts, and in print, it shows the plain product (m = 1) at the given tile.

    Args:
        peak: FLOP/s of the machine.
        bandwidth: bytes a second of the memory that all loads are charged to.
        rows: T at the start, one of `SIDES`.
        columns: N at the start, one of `SIDES`.
        element_bytes: b.

    Returns:
        HTML with its style and script inside, for `IPython.display.HTML`. One a page.

    Raises:
        ValueError: a side that is not in `SIDES`.

    Source: chapter 2; Williams et al. 2009.
    """
    if rows not in SIDES or columns not in SIDES:
        raise ValueError(
            f"rows and columns must be powers of two from 1 to 512; got {rows} and {columns}"
        )
    intensity = 2 / (element_bytes * (1 / rows + 1 / columns))
    rate = min(peak, intensity * bandwidth)
    x, y = _x(intensity), _y(rate)
    ridge = peak / bandwidth
    start = 10**LOW_X
    axes = "".join(
        f'<line x1="{_x(10.0**d):.1f}" x2="{_x(10.0**d):.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="{RULE}"/>'
        f'<text x="{_x(10.0**d):.1f}" y="{BOTTOM + 15}" text-anchor="middle">{10.0**d:g}</text>'
        for d in range(int(LOW_X), int(HIGH_X) + 1)
    ) + "".join(
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{_y(10.0**d):.1f}" y2="{_y(10.0**d):.1f}" stroke="{RULE}"/>'
        f'<text x="{LEFT - 6}" y="{_y(10.0**d) + 4:.1f}" text-anchor="end">{10.0 ** (d - 12):g}</text>'
        for d in range(math.ceil(LOW_Y), int(HIGH_Y) + 1)
    )
    picture = (
        f'<svg viewBox="0 0 520 225" role="img" aria-label="Roofline with the chosen tile">{axes}'
        f'<polyline points="{_x(start):.1f},{_y(start * bandwidth):.1f} {_x(ridge):.1f},{_y(peak):.1f} '
        f'{RIGHT},{_y(peak):.1f}" fill="none" stroke="{INK}" stroke-width="2"/>'
        f'<line class="drop" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{BOTTOM}" stroke="{QUIET}" stroke-dasharray="3 3"/>'
        f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{COLORS["flops"]}" stroke="{INK}"/>'
        f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 32}" text-anchor="middle">intensity, FLOP a byte</text>'
        f'<text x="{LEFT + 6}" y="{TOP + 12}">TFLOP/s</text></svg>'
    )
    constants = {
        "sides": SIDES, "b": element_bytes, "peak": peak, "bandwidth": bandwidth, "left": LEFT, "right": RIGHT,
        "top": TOP, "bottom": BOTTOM, "lowX": LOW_X, "highX": HIGH_X, "lowY": LOW_Y, "highY": HIGH_Y,
    }  # fmt: skip
    last = len(SIDES) - 1
    return (
        f'<style>{_STYLE}</style><div id="roofline-slider" role="group" aria-label="A tile on a roofline">{picture}'
        '<div class="ask"><label>Product: <select><option value="1">plain, one weight matrix</option>'
        '<option value="2">dual, two matrices share the rows</option></select></label></div>'
        f'<div class="ask"><label>Rows of the tile T = <output>{rows}</output>'
        f'<input type="range" min="0" max="{last}" step="1" value="{SIDES.index(rows)}"></label></div>'
        f'<div class="ask"><label>Columns of the tile N = <output>{columns}</output>'
        f'<input type="range" min="0" max="{last}" step="1" value="{SIDES.index(columns)}"></label></div>'
        f'<p aria-live="polite">{intensity:.1f} FLOP a byte: at most {rate / 1e12:.1f} TFLOP/s, '
        f"{100 * rate / peak:.1f}% of the peak; bound by "
        f"{'memory' if intensity * bandwidth < peak else 'arithmetic'}.</p></div>"
        f"<script>{_SCRIPT.replace('CONSTANTS', json.dumps(constants))}</script>"
    )


def _x(intensity: float) -> float:
    return LEFT + (math.log10(intensity) - LOW_X) / (HIGH_X - LOW_X) * (RIGHT - LEFT)


def _y(rate: float) -> float:
    return BOTTOM - (math.log10(rate) - LOW_Y) / (HIGH_Y - LOW_Y) * (BOTTOM - TOP)
