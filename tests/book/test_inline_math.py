"""A formula in a sentence and the punctuation that touches it stay on one line of the page."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "book" / "extensions" / "inline_math.py"
spec = importlib.util.spec_from_file_location("inline_math", PATH)
inline_math = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inline_math)

FORMULA = r'<span class="math notranslate nohighlight">\(K = 4\)</span>'


def test_a_formula_keeps_the_comma_behind_it_and_the_bracket_before_it():
    page = inline_math.keep_together(f"<p>with ({FORMULA}), and</p>")
    assert page == f'<p>with <span class="unbroken">({FORMULA}),</span> and</p>'


def test_a_formula_keeps_the_rest_of_its_word():
    page = inline_math.keep_together(f"<p>the {FORMULA}-th <i>key</i></p>")
    assert page == f'<p>the <span class="unbroken">{FORMULA}-th</span> <i>key</i></p>'


def test_a_formula_between_spaces_and_a_displayed_one_are_left_alone():
    page = rf'<p>a {FORMULA} b</p><div class="math notranslate nohighlight">\[a,\]</div>,'
    assert inline_math.keep_together(page) == page
