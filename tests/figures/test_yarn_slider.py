"""YaRN's ramp on sliders: what it shows without scripts, and that the script computes the same."""

import itertools
import re
import shutil
import subprocess

import pytest

from gptoss import figures


def still(**options: float) -> str:
    return figures.yarn_slider(**options).split("<script>")[0]


def test_still_picture_shows_the_production_ramp() -> None:
    page = figures.yarn_slider()
    text = page.split("<script>")[0]
    assert "The ramp runs from 12.57 to 27.02. 13 pairs kept, 15 blended, 20 divided by 32" in text
    assert "mscale 1.347. At 131,072 tokens 0 pairs meet phases" in text
    assert text.count("<circle") == 48
    assert text.count('type="range"') == 3  # native sliders: arrow keys move them
    assert text.count("<label>") == 3
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing from elsewhere
    assert "src=" not in page


def test_pairs_are_kept_below_the_ramp_and_slowed_above_it() -> None:
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', still())]
    assert heights[:13] == [170.0] * 13
    assert heights[28:] == [14.0] * 20
    assert all(a > b for a, b in itertools.pairwise(heights[12:29]))


def test_scale_one_is_plain() -> None:
    assert "s = 1 is plain RoPE. 48 pairs kept, 0 blended, 0 divided by 1; mscale 1.000. At 4,096 tokens 0 pairs" in still(scale_factor=1)  # fmt: skip


def test_an_empty_ramp_is_said_and_leaves_new_phases() -> None:
    assert "low ≥ high: there is no ramp, every pair stays plain. 48 pairs kept" in still(
        beta_fast=1, beta_slow=2
    )
    assert "20 pairs meet phases" in still(beta_fast=1, beta_slow=2)


def test_a_late_ramp_leaves_new_phases() -> None:
    assert "0 pairs meet phases" not in still(beta_slow=0.125)


def test_start_values_are_those_of_the_sliders() -> None:
    for option in ({"scale_factor": 3}, {"beta_fast": 256}, {"beta_slow": 0.0}):
        with pytest.raises(ValueError, match="expected a power of 2"):
            figures.yarn_slider(**option)
    with pytest.raises(ValueError, match="head_dim = 95"):
        figures.yarn_slider(head_dim=95)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is missing")
@pytest.mark.parametrize(
    "options",
    [{}, {"scale_factor": 1}, {"beta_slow": 0.125}, {"beta_fast": 1, "beta_slow": 2}, {"scale_factor": 4}],
)  # fmt: skip
def test_the_script_says_what_the_still_picture_says(options: dict[str, float]) -> None:
    page = figures.yarn_slider(**options)
    text, script = page.split("<script>")
    values = re.findall(r'value="(-?\d+)"', text)
    stage = f"""
      const said = {{}};
      const element = v => ({{value: v, setAttribute() {{}}, addEventListener() {{}}}});
      const root = {{
        querySelectorAll: q => q === "input" ? {values}.map(element) : Array.from({{length: 48}}, () => element("")),
        querySelector: q => said,
      }};
      const document = {{getElementById: () => root}};
    """
    program = stage + script.removesuffix("</script>") + "\nconsole.log(said.textContent);"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in text
