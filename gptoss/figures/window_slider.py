"""Windows on sliders: how far back a stack of layers sees, in HTML without outside scripts (chapter 6)."""

import json
from collections.abc import Sequence

from .palette import CARD, COLORS, INK, QUIET
from .slider_style import slider_style

PATTERNS = {
    "windowed, global, windowed, …": (True, False),
    "every layer windowed": (True,),
    "every layer global": (False,),
}
TOKENS, MAX_LAYERS = 24, 6
LEFT, STEP, LOW, RISE = (
    92,
    18,
    216,
    32,
)  # of the picture, in SVG units: first column, column, embeddings, layer

_STYLE = slider_style(
    "window-slider",
    COLORS["windowed"],
    f"""\
#window-slider svg {{ width: 100%; height: auto; display: block; }}
#window-slider svg text {{ fill: {INK}; font-size: 11px; }}
#window-slider .windowed {{ stroke: {COLORS["windowed"]}; stroke-dasharray: 4 2; }}
#window-slider .global {{ stroke: {COLORS["global"]}; }}
#window-slider circle {{ fill: {CARD}; stroke: {QUIET}; }}
#window-slider circle.seen {{ fill: {INK}; stroke: {INK}; }}
#window-slider .out {{ display: none; }}
#window-slider .ask {{ margin: 0.4em 0; }}
""",
    f"""\
#window-slider select {{ font: inherit; color: {INK}; background: {CARD}; border: 1px solid {QUIET}; border-radius: 4px; }}
#window-slider input:focus-visible, #window-slider select:focus-visible {{
  outline: 3px solid {COLORS["queries"]}; outline-offset: 2px; }}
""",
)

_SCRIPT = """
(function () {
  const root = document.getElementById("window-slider"), c = CONSTANTS;
  const [width, depth] = root.querySelectorAll("input"), choice = root.querySelector("select");
  const outputs = root.querySelectorAll("output"), said = root.querySelector("p");
  const dots = root.querySelectorAll("circle"), fans = root.querySelectorAll("line.fan"), names = root.querySelectorAll(".name");
  function draw() {
    const W = Number(width.value), L = Number(depth.value), pattern = c.patterns[choice.value], n = c.tokens;
    const kinds = Array.from({length: L}, (_, i) => pattern[i % pattern.length]);
    const oldest = Array(L + 1).fill(n - 1);
    let pairs = 0;
    for (let l = L - 1; l >= 0; l--) {
      oldest[l] = kinds[l] ? Math.max(0, oldest[l + 1] - W + 1) : 0;
      for (let i = 0; i < n; i++) pairs += kinds[l] ? Math.min(i + 1, W) : i + 1;
    }
    dots.forEach(function (dot, k) {
      const level = Math.floor(k / n), i = k % n;
      dot.setAttribute("class", level > L ? "out" : i >= oldest[level] ? "seen" : "");
    });
    fans.forEach(function (fan, k) {
      const l = Math.floor(k / n), i = k % n, shown = l < L && i >= oldest[l + 1];
      fan.setAttribute("class", "fan " + (shown ? (kinds[l] ? "windowed" : "global") : "out"));
      if (shown) fan.setAttribute("x2", c.left + c.step * (kinds[l] ? Math.max(0, i - W + 1) : 0));
    });
    names.forEach(function (name, l) {
      name.setAttribute("class", l < L ? "name" : "name out");
      if (l < L) name.textContent = "layer " + l + (kinds[l] ? ", W" : ", all");
    });
    outputs[0].textContent = W; outputs[1].textContent = L;
    width.setAttribute("aria-valuetext", "a window of " + W + " tokens");
    depth.setAttribute("aria-valuetext", L + " layers");
    const all = L * n * (n + 1) / 2;
    said.textContent = "The last token depends on " + (n - oldest[0]) + " of " + n + " tokens. The layers compute " + pairs
      + " of the " + all + " pairs that global layers would, " + (100 * pairs / all).toFixed(1) + "%.";
  }
  [width, depth, choice].forEach(e => e.addEventListener("input", draw));
  draw();
})();
"""


def oldest_seen(windows: Sequence[int | None], tokens: int) -> list[int]:
    """The oldest token that the last one depends on, at each level of a stack: after the last layer first, embeddings last.

    oldest = max(0, oldest above − W + 1) below a windowed layer, 0 below a global one.

    Args:
        windows: W of each layer (tokens), None for a global one; the layer nearest the embeddings first.
        tokens: length of the sequence.

    Returns:
        One index a level, len(windows) + 1 of them.

    Source: chapter 6.
    """
    oldest = [tokens - 1]
    for window in reversed(windows):
        oldest.append(0 if window is None else max(0, oldest[-1] - window + 1))
    return oldest


def window_slider(
    window: int = 4, layers: int = 4, pattern: str = "windowed, global, windowed, …"
) -> str:
    """HTML of a stack of layers whose window and depth the reader moves, by mouse or arrow keys.

    Filled circles are what the last token depends on; from each one a line leads to the oldest key that it sees. Without
    scripts, and in print, it shows the state given here.

    Args:
        window: W at the start, 1 … 24 tokens.
        layers: depth at the start, 1 … 6.
        pattern: a key of `PATTERNS`.

    Returns:
        HTML with its style and script inside, for `IPython.display.HTML`. One a page.

    Raises:
        ValueError: a size outside its range, or no such pattern.

    Source: chapter 6.
    """
    if not 1 <= window <= TOKENS or not 1 <= layers <= MAX_LAYERS:
        raise ValueError(
            f"window must lie in 1..{TOKENS} and layers in 1..{MAX_LAYERS}; got {window} and {layers}"
        )
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}; got {pattern!r}")
    kinds = [PATTERNS[pattern][i % len(PATTERNS[pattern])] for i in range(layers)]
    oldest = oldest_seen([window if k else None for k in kinds], TOKENS)[::-1]  # embeddings first
    pairs = sum(min(i + 1, window) if k else i + 1 for k in kinds for i in range(TOKENS))
    most = layers * TOKENS * (TOKENS + 1) // 2
    fans, dots, names = [], [], []
    for level in range(MAX_LAYERS + 1):
        y = LOW - RISE * level
        for i in range(TOKENS):
            seen = level <= layers and i >= oldest[level]
            state = "out" if level > layers else "seen" if seen else ""
            dots.append(f'<circle class="{state}" cx="{LEFT + STEP * i}" cy="{y}" r="5"/>')
            if level == 0:
                continue
            windowed = level <= layers and kinds[level - 1]
            first = max(0, i - window + 1) if windowed else 0
            kind = ("windowed" if windowed else "global") if seen else "out"
            fans.append(
                f'<line class="fan {kind}" x1="{LEFT + STEP * i}" y1="{y}" x2="{LEFT + STEP * first}" y2="{y + RISE}"/>'
            )
        if level:
            text = f"layer {level - 1}, {'W' if level <= layers and kinds[level - 1] else 'all'}"
            shown = "name" if level <= layers else "name out"
            names.append(f'<text class="{shown}" x="4" y="{y + RISE / 2 + 4:.0f}">{text}</text>')
    picture = (
        f'<svg viewBox="0 0 520 {LOW + 28}" role="img" aria-label="What the last token depends on, layer by layer">'
        f'{"".join(fans)}{"".join(dots)}{"".join(names)}<text x="4" y="{LOW + 4}">embeddings</text>'
        f'<text x="{LEFT}" y="{LOW + 22}" text-anchor="middle">0</text>'
        f'<text x="{LEFT + STEP * (TOKENS - 1)}" y="{LOW + 22}" text-anchor="middle">{TOKENS - 1}</text>'
        f'<text x="{LEFT + STEP * (TOKENS - 1) / 2:.0f}" y="{LOW + 22}" text-anchor="middle">token</text></svg>'
    )
    options = "".join(
        f"<option{' selected' if name == pattern else ''}>{name}</option>" for name in PATTERNS
    )
    constants = {"patterns": PATTERNS, "tokens": TOKENS, "left": LEFT, "step": STEP}
    return (
        f'<style>{_STYLE}</style><div id="window-slider" role="group" aria-label="Windows and layers">{picture}'
        f'<div class="ask"><label>Layers: <select>{options}</select></label></div>'
        f'<div class="ask"><label>Window W = <output>{window}</output>'
        f'<input type="range" min="1" max="{TOKENS}" step="1" value="{window}"></label></div>'
        f'<div class="ask"><label>Number of layers = <output>{layers}</output>'
        f'<input type="range" min="1" max="{MAX_LAYERS}" step="1" value="{layers}"></label></div>'
        f'<p aria-live="polite">The last token depends on {TOKENS - oldest[0]} of {TOKENS} tokens. The layers compute {pairs} '
        f"of the {most} pairs that global layers would, {100 * pairs / most:.1f}%.</p></div>"
        f"<script>{_SCRIPT.replace('CONSTANTS', json.dumps(constants, ensure_ascii=False))}</script>"
    )
