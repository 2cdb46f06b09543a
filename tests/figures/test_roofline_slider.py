"""The roofline that the reader moves: what it shows without scripts."""

import pytest

from gptoss import figures


def test_still_picture_says_what_the_formula_says() -> None:
    page = figures.roofline_slider(1000e12, 4e12)
    still = page.split("<script>")[0]
    assert "10.7 FLOP a byte: at most 42.7 TFLOP/s, 4.3% of the peak; bound by memory." in still
    assert still.count('type="range"') == 2  # native sliders: arrow keys move them
    assert "http" not in page  # nothing from elsewhere
    assert "src=" not in page


def test_a_large_tile_meets_the_flat_roof() -> None:
    still = figures.roofline_slider(1000e12, 4e12, rows=512, columns=512).split("<script>")[0]
    assert (
        "256.0 FLOP a byte: at most 1000.0 TFLOP/s, 100.0% of the peak; bound by arithmetic."
        in still
    )


def test_sides_are_powers_of_two() -> None:
    with pytest.raises(ValueError, match="got 3 and 32"):
        figures.roofline_slider(1e12, 1e12, rows=3)
