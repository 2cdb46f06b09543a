"""The sink on a slider: a softmax that the reader bends, as one piece of HTML without outside scripts (chapter 7)."""

import json
import math
from collections.abc import Sequence

from .palette import CARD, COLORS, INK, QUIET, RULE
from .slider_style import slider_style

_STYLE = slider_style(
    "sink-slider",
    COLORS["sink"],
    f"""\
#sink-slider .share {{ display: grid; grid-template-columns: 7em 1fr 3.5em; gap: 0.6em; align-items: center; }}
#sink-slider .track {{ background: {RULE}; height: 1.1em; border-radius: 2px; overflow: hidden; }}
#sink-slider .bar {{ height: 100%; background: {INK}; }}
#sink-slider .of-sink .bar {{ background: {COLORS["sink"]}; }}
#sink-slider .number {{ text-align: right; font-variant-numeric: tabular-nums; }}
#sink-slider .ask {{ margin: 0.5em 0; }}
""",
    f"""\
#sink-slider select {{ font: inherit; color: {INK}; background: {CARD}; border: 1px solid {QUIET}; border-radius: 4px; }}
#sink-slider input:focus-visible, #sink-slider select:focus-visible {{ outline: 3px solid {COLORS["queries"]};
  outline-offset: 2px; }}
""",
)

_SCRIPT = """
(function () {
  const root = document.getElementById("sink-slider"), cases = CASES;
  const slider = root.querySelector("input"), choice = root.querySelector("select");
  const rows = root.querySelectorAll(".share"), said = root.querySelector("p");
  function draw() {
    const b = Number(slider.value), scores = cases[choice.value];
    const top = Math.max(b, ...scores), terms = [...scores, b].map(s => Math.exp(s - top));
    const total = terms.reduce((x, y) => x + y, 0);
    terms.forEach(function (term, i) {
      const share = term / total;
      rows[i].querySelector(".bar").style.width = (100 * share).toFixed(2) + "%";
      rows[i].querySelector(".number").textContent = share.toFixed(3);
    });
    const lse = Math.log(total - terms[terms.length - 1]) + top, gate = 1 / (1 + Math.exp(b - lse));
    slider.setAttribute("aria-valuetext", "b = " + b.toFixed(1));
    root.querySelector("output").textContent = b.toFixed(1);
    said.textContent = "lse = " + lse.toFixed(2) + ", so the gate is " + gate.toFixed(3)
      + ": the keys keep " + (100 * gate).toFixed(1) + "% of the attention, the sink takes the rest.";
  }
  slider.addEventListener("input", draw);
  choice.addEventListener("change", draw);
  draw();
})();
"""


def sink_slider(cases: dict[str, Sequence[float]], b: float = 2.0) -> str:
    """HTML of a softmax over a few keys and a sink whose logit the reader moves, by mouse or arrow keys.

    p_j = exp(s_j) / (Σ exp(s_j) + exp(b)). Without scripts, and in print, it shows the state at `b`.

    Args:
        cases: scores of the keys, by the name of the situation; the first is shown at the start. All of one length.
        b: the sink's logit at the start, within −10 … 15.

    Returns:
        HTML with its style and script inside, for `IPython.display.HTML`. One a page.

    Raises:
        ValueError: no case, cases of different lengths, or a b that the slider does not reach.

    Source: chapter 7.
    """
    lengths = {len(scores) for scores in cases.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"cases must be one or more lists of scores of one length; got lengths {sorted(lengths)}"
        )
    if not -10 <= b <= 15:
        raise ValueError(f"b must lie in -10..15; got {b}: the slider ends there")
    first = next(iter(cases.values()))
    terms = [math.exp(score) for score in (*first, b)]
    names = [f"key {j}" for j in range(len(first))] + ["sink"]
    rows = "".join(
        f'<div class="share{" of-sink" if name == "sink" else ""}"><span>{name}</span>'
        f'<div class="track"><div class="bar" style="width:{100 * term / sum(terms):.2f}%"></div></div>'
        f'<span class="number">{term / sum(terms):.3f}</span></div>'
        for name, term in zip(names, terms, strict=True)
    )
    options = "".join(f"<option>{name}</option>" for name in cases)
    gate = 1 - terms[-1] / sum(terms)
    lse = math.log(sum(terms[:-1]))
    script = _SCRIPT.replace("CASES", json.dumps({k: list(v) for k, v in cases.items()}))
    return (
        f'<style>{_STYLE}</style><div id="sink-slider" role="group" aria-label="A softmax with a sink">'
        f'<div class="ask"><label>The scores of the keys: <select>{options}</select></label></div>'
        f"{rows}"
        f'<div class="ask"><label>Sink logit b = <output>{b:.1f}</output>'
        f'<input type="range" min="-10" max="15" step="0.1" value="{b}"></label></div>'
        f'<p aria-live="polite">lse = {lse:.2f}, so the gate is {gate:.3f}: the keys keep {100 * gate:.1f}% of the '
        f"attention, the sink takes the rest.</p></div><script>{script}</script>"
    )
