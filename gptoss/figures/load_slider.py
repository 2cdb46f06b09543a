"""A router on two sliders: what the experts' load and the balance loss do, as one piece of HTML (chapter 9).

No outside scripts; without scripts, and in print, it shows its first state.
"""

import json
import math
from collections.abc import Sequence

from .palette import CARD, COLORS, QUIET
from .slider_style import slider_style

_STYLE = slider_style(
    "load-slider",
    COLORS["routed"],
    f"""\
#load-slider .expert {{ display: grid; grid-template-columns: 5em 1fr 3.5em 3.5em; gap: 0.6em; align-items: center; }}
#load-slider .heads {{ color: {QUIET}; font-size: 0.92em; }}
#load-slider .track {{ height: 1.3em; border-left: 1px solid {QUIET}; }}
#load-slider .bar {{ height: 50%; box-sizing: border-box; min-width: 1px; }}
#load-slider .slots {{ background: {COLORS["routed"]}; }}
#load-slider .mean {{ background: {CARD}; border: 2px solid {COLORS["routed"]}; }}
#load-slider .number {{ text-align: right; font-variant-numeric: tabular-nums; }}
#load-slider .ask {{ margin: 0.5em 0; }}
""",
)

_SCRIPT = """
(function () {
  const root = document.getElementById("load-slider"), logits = LOGITS, k = CHOSEN, experts = logits[0].length;
  const [start, heat] = root.querySelectorAll("input"), rows = root.querySelectorAll(".expert.load");
  const said = root.querySelector("p"), [startShown, heatShown] = root.querySelectorAll("output");
  function draw() {
    const h = Number(start.value), tau = Math.pow(2, Number(heat.value));
    const slots = Array(experts).fill(0), mean = Array(experts).fill(0);
    for (const token of logits) {
      const z = token.map((value, e) => (value + (e < k ? h : 0)) / tau), top = Math.max(...z);
      const terms = z.map(value => Math.exp(value - top)), total = terms.reduce((x, y) => x + y, 0);
      terms.forEach((term, e) => { mean[e] += term / total / logits.length; });
      const order = [...z.keys()].sort((a, b) => z[b] - z[a] || a - b);
      order.slice(0, k).forEach(e => { slots[e] += 1 / (k * logits.length); });
    }
    let loss = 0;
    rows.forEach(function (row, e) {
      loss += experts * slots[e] * mean[e];
      row.querySelector(".slots").style.width = (100 * slots[e]).toFixed(2) + "%";
      row.querySelector(".mean").style.width = (100 * mean[e]).toFixed(2) + "%";
      const numbers = row.querySelectorAll(".number");
      numbers[0].textContent = slots[e].toFixed(3);
      numbers[1].textContent = mean[e].toFixed(3);
    });
    const idle = slots.filter(share => share === 0).length;
    startShown.textContent = h.toFixed(1);
    heatShown.textContent = tau.toFixed(2);
    start.setAttribute("aria-valuetext", "head start " + h.toFixed(1));
    heat.setAttribute("aria-valuetext", "temperature " + tau.toFixed(2));
    said.textContent = "Balance loss " + loss.toFixed(3) + ". Busiest expert: " + (100 * Math.max(...slots)).toFixed(1)
      + "% of the slots. Idle experts: " + idle + " of " + experts + ".";
  }
  start.addEventListener("input", draw);
  heat.addEventListener("input", draw);
  draw();
})();
"""


def load_slider(
    logits: Sequence[Sequence[float]], k: int, head_start: float = 0.0, temperature: float = 1.0
) -> str:
    """HTML of a router whose load over the experts the reader bends, by mouse or arrow keys.

    Two sliders change the logits z of every token: a head start h is added to the first k experts, and all are divided
    by a temperature τ. Each expert shows f, its share of the N·k slots, filled, and P, its mean probability, outlined;
    below stands the balance loss E·Σ f·P. τ moves P and never f.

    Args:
        logits: (N, E), one row a token. Equal logits go to the lower index.
        k: experts a token, fewer than E.
        head_start: at the start, within 0 … 6.
        temperature: at the start, within 1/8 … 8.

    Returns:
        HTML with its style and script inside, for `IPython.display.HTML`. One a page.

    Raises:
        ValueError: no token, rows of different lengths, a k that leaves no choice, or a start that its slider does not reach.

    Source: chapter 9.
    """
    widths = {len(token) for token in logits}
    if len(widths) != 1:
        raise ValueError(
            f"logits must be one or more rows of one length; got lengths {sorted(widths)}"
        )
    n_experts = widths.pop()
    if not 0 < k < n_experts:
        raise ValueError(f"k must lie between 1 and {n_experts - 1}; got {k}")
    if not 0 <= head_start <= 6 or not 1 / 8 <= temperature <= 8:
        raise ValueError(
            f"head_start must lie in 0..6 and temperature in 1/8..8; got {head_start} and {temperature}: the sliders end there"
        )
    slots, mean = _load(logits, k, head_start, temperature)
    loss = n_experts * sum(f * p for f, p in zip(slots, mean, strict=True))
    rows = "".join(
        f'<div class="expert load"><span>expert {e}</span><div class="track">'
        f'<div class="bar slots" style="width:{100 * f:.2f}%"></div>'
        f'<div class="bar mean" style="width:{100 * p:.2f}%"></div></div>'
        f'<span class="number">{f:.3f}</span><span class="number">{p:.3f}</span></div>'
        for e, (f, p) in enumerate(zip(slots, mean, strict=True))
    )
    script = _SCRIPT.replace("LOGITS", json.dumps([list(token) for token in logits]))
    return (
        f'<style>{_STYLE}</style><div id="load-slider" role="group" aria-label="A router and the load of its experts">'
        f'<div class="ask"><label>Head start of the first {k} experts = <output>{head_start:.1f}</output>'
        f'<input type="range" min="0" max="6" step="0.1" value="{head_start}"></label></div>'
        f'<div class="ask"><label>Temperature = <output>{temperature:.2f}</output>'
        f'<input type="range" min="-3" max="3" step="0.25" value="{math.log2(temperature)}"></label></div>'
        f'<div class="expert heads"><span></span><span>filled: share of the slots f; outlined: mean probability P</span>'
        f'<span class="number">f</span><span class="number">P</span></div>{rows}'
        f'<p aria-live="polite">Balance loss {loss:.3f}. Busiest expert: {100 * max(slots):.1f}% of the slots. '
        f"Idle experts: {slots.count(0)} of {n_experts}.</p></div>"
        f"<script>{script.replace('CHOSEN', str(k))}</script>"
    )


def _load(
    logits: Sequence[Sequence[float]], k: int, head_start: float, temperature: float
) -> tuple[list[float], list[float]]:
    """Each expert's share of the slots and its mean probability."""
    slots, mean = [0.0] * len(logits[0]), [0.0] * len(logits[0])
    for token in logits:
        z = [(s + (head_start if e < k else 0)) / temperature for e, s in enumerate(token)]
        terms = [math.exp(s - max(z)) for s in z]
        for e, term in enumerate(terms):
            mean[e] += term / sum(terms) / len(logits)
        for e in sorted(range(len(z)), key=lambda e: -z[e])[:k]:  # sorted is stable
            slots[e] += 1 / (k * len(logits))
    return slots, mean
