"""YaRN's ramp on three sliders: which rotary pairs are kept, blended and slowed, in HTML without outside scripts (chapter 8)."""

import json
import math

from .palette import CARD, INK, QUIET, RULE
from .slider_style import slider_style

LEFT, RIGHT, TOP, BOTTOM = 46, 506, 14, 170  # the plot's frame in SVG units
SCALE_STEPS = (0, 7)  # exponents of 2 that the sliders offer
FAST_STEPS = (0, 7)
SLOW_STEPS = (-4, 5)

_STYLE = slider_style(
    "yarn-slider",
    QUIET,
    f"""\
#yarn-slider svg {{ width: 100%; height: auto; display: block; }}
#yarn-slider svg text {{ fill: {INK}; font-size: 11px; }}
#yarn-slider .ask {{ margin: 0.4em 0; }}
""",
)

_SCRIPT = """
(function () {
  const root = document.getElementById("yarn-slider"), c = CONSTANTS, n = c.D / 2;
  const sliders = root.querySelectorAll("input"), outputs = root.querySelectorAll("output");
  const dots = root.querySelectorAll("circle"), said = root.querySelector("p");
  function pairWithTurns(r) { return c.D * Math.log(c.L / (2 * Math.PI * r)) / (2 * Math.log(c.theta)); }
  function draw() {
    const [s, fast, slow] = Array.from(sliders, e => Math.pow(2, Number(e.value)));
    const low = Math.max(pairWithTurns(fast), 0), high = Math.min(pairWithTurns(slow), c.D - 1), none = low >= high || s === 1;
    let kept = 0, blended = 0, slowed = 0, fresh = 0;
    for (let i = 0; i < n; i++) {
      const ramp = none ? 0 : Math.min(Math.max((i - low) / (high - low), 0), 1);
      const turns = c.L * Math.pow(c.theta, -2 * i / c.D) / (2 * Math.PI);
      if (ramp === 0) kept++; else if (ramp === 1) slowed++; else blended++;
      if (turns < 1 && (1 - ramp) * s + ramp > 1 + 1e-9) fresh++;
      dots[i].setAttribute("cy", (c.bottom - ramp * (c.bottom - c.top)).toFixed(1));
      dots[i].setAttribute("fill", ramp === 0 ? c.card : c.ink);
    }
    [s, fast, slow].forEach(function (value, i) {
      outputs[i].textContent = value;
      sliders[i].setAttribute("aria-valuetext", c.names[i] + " = " + value);
    });
    const factor = s > 1 ? 0.1 * Math.log(s) + 1 : 1;
    said.textContent = (s === 1 ? "s = 1 is plain RoPE. " : none ? "low \\u2265 high: there is no ramp, every pair stays plain. "
      : "The ramp runs from " + low.toFixed(2) + " to " + high.toFixed(2) + ". ")
      + kept + " pairs kept, " + blended + " blended, " + slowed + " divided by " + s + "; mscale " + factor.toFixed(3) + ". At "
      + Math.round(s * c.L).toLocaleString("en-US") + " tokens " + fresh + " pairs meet phases that plain training at "
      + c.L.toLocaleString("en-US") + " never showed.";
  }
  sliders.forEach(e => e.addEventListener("input", draw));
  draw();
})();
"""


def yarn_slider(
    head_dim: int = 96,
    theta: float = 100_000,
    original_max_seq_len: int = 4096,
    scale_factor: int = 32,
    beta_fast: float = 32,
    beta_slow: float = 1,
) -> str:
    """HTML of YaRN's ramp over the rotary pairs, with s, β_fast and β_slow moved by mouse or arrow keys.

    ramp_i = clamp((i − low)/(high − low), 0, 1) with low = c(β_fast), high = c(β_slow), c(r) = D·ln(L₀/(2πr))/(2 ln θ).
    A pair that made less than one turn in training meets a new phase at s·L₀ tokens unless it is slowed by s in full.
    Without scripts, and in print, it shows the state that is passed in.

    Args:
        head_dim: D, even.
        theta: rotary base θ.
        original_max_seq_len: L₀ (tokens).
        scale_factor, beta_fast, beta_slow: at the start; powers of 2 within the sliders' ranges.

    Returns:
        HTML with its style and script inside, for `IPython.display.HTML`. One a page.

    Raises:
        ValueError: an odd head_dim, or a start value that its slider does not offer.

    Source: Peng et al. (2024), section 3.2; chapter 8.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim}: expected a positive even number of dimensions")
    start = {
        "s": (scale_factor, SCALE_STEPS),
        "β_fast": (beta_fast, FAST_STEPS),
        "β_slow": (beta_slow, SLOW_STEPS),
    }
    for name, (value, (least, most)) in start.items():
        if value <= 0 or not math.log2(value).is_integer() or not least <= math.log2(value) <= most:
            raise ValueError(
                f"{name} = {value}: expected a power of 2 from 2^{least} to 2^{most}, as its slider has"
            )

    def pair_with_turns(turns: float) -> float:
        return (
            head_dim
            * math.log(original_max_seq_len / (2 * math.pi * turns))
            / (2 * math.log(theta))
        )

    n_pairs = head_dim // 2
    low, high = max(pair_with_turns(beta_fast), 0), min(pair_with_turns(beta_slow), head_dim - 1)
    none = low >= high or scale_factor == 1
    ramps = [0.0 if none else min(max((i - low) / (high - low), 0), 1) for i in range(n_pairs)]
    fresh = sum(
        original_max_seq_len * theta ** (-2 * i / head_dim) < 2 * math.pi
        and (1 - ramp) * scale_factor + ramp > 1 + 1e-9
        for i, ramp in enumerate(ramps)
    )
    x = [LEFT + (i + 0.5) * (RIGHT - LEFT) / n_pairs for i in range(n_pairs)]
    y = [BOTTOM - ramp * (BOTTOM - TOP) for ramp in ramps]
    one_turn = LEFT + (pair_with_turns(1) + 0.5) * (RIGHT - LEFT) / n_pairs
    picture = (
        '<svg viewBox="0 0 520 212" role="img" aria-label="The ramp over the rotary pairs">'
        + "".join(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{level}" y2="{level}" stroke="{RULE}"/>'
            f'<text x="{LEFT - 6}" y="{level + 4}" text-anchor="end">{name}</text>'
            for level, name in ((BOTTOM, "kept"), (TOP, "÷ s"))
        )
        + f'<line x1="{one_turn:.1f}" x2="{one_turn:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="{QUIET}" stroke-dasharray="3 3"/>'
        f'<text x="{one_turn + 5:.1f}" y="{BOTTOM - 8}">less than one turn in training →</text>'
        + "".join(
            f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3.6" fill="{INK if ramp else CARD}" stroke="{INK}"/>'
            for at, height, ramp in zip(x, y, ramps, strict=True)
        )
        + "".join(
            f'<text x="{x[i]:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{i}</text>'
            for i in range(0, n_pairs, max(1, n_pairs // 8))
        )
        + f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 36}" text-anchor="middle">rotary pair, fast to slow</text></svg>'
    )
    names = ["scale s", "beta fast", "beta slow"]
    labels = ("Scale factor s", "β_fast (turns)", "β_slow (turns)")
    asks = "".join(
        f'<div class="ask"><label>{label} = <output>{value:g}</output>'
        f'<input type="range" min="{least}" max="{most}" step="1" value="{math.log2(value):.0f}"></label></div>'
        for label, (value, (least, most)) in zip(labels, start.values(), strict=True)
    )
    kept, slowed = ramps.count(0.0), ramps.count(1.0)
    factor = 0.1 * math.log(scale_factor) + 1 if scale_factor > 1 else 1.0
    if scale_factor == 1:
        opening = "s = 1 is plain RoPE."
    elif none:
        opening = "low ≥ high: there is no ramp, every pair stays plain."
    else:
        opening = f"The ramp runs from {low:.2f} to {high:.2f}."
    said = (
        f"{opening} {kept} pairs kept, {n_pairs - kept - slowed} blended, {slowed} divided by {scale_factor:g}; "
        f"mscale {factor:.3f}. At {scale_factor * original_max_seq_len:,} tokens {fresh} pairs meet phases that plain "
        f"training at {original_max_seq_len:,} never showed."
    )
    constants = {
        "D": head_dim, "theta": theta, "L": original_max_seq_len, "top": TOP, "bottom": BOTTOM, "ink": INK, "card": CARD,
        "names": names,
    }  # fmt: skip
    return (
        f'<style>{_STYLE}</style><div id="yarn-slider" role="group" aria-label="The ramp of YaRN">{picture}{asks}'
        f'<p aria-live="polite">{said}</p></div>'
        f"<script>{_SCRIPT.replace('CONSTANTS', json.dumps(constants))}</script>"
    )
