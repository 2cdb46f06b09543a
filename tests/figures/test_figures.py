"""The visual language: colours that stay apart for every eye, helpers that draw what they are told."""

import itertools
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle

from gptoss import figures
from gptoss.figures.palette import color_of

GROUPS = (
    ("queries", "keys", "values", "sink", "windowed", "global"),
    ("routed", "shared"),
    ("bytes", "flops"),
)
# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


@pytest.fixture(autouse=True)
def style():
    mpl.use("Agg")
    with mpl.rc_context():
        figures.use_style()
        yield
    plt.close("all")


def lab(color: str, vision: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(VISION[vision] @ linear, 0, 1)
    t = TO_XYZ @ seen / TO_XYZ.sum(1)
    f = np.where(t > 216 / 24389, np.cbrt(t), (24389 / 27 * t + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(first: np.ndarray, second: np.ndarray) -> float:
    """Sharma, Wu and Dalal (2005); the test below holds it against three of their pairs."""
    (L1, a1, b1), (L2, a2, b2) = first, second
    c_mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(c_mean**7 / (c_mean**7 + 25**7))
    C1, C2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = np.arctan2(b1, a1 * stretch), np.arctan2(b2, a2 * stretch)
    turn = (h2 - h1 + np.pi) % (2 * np.pi) - np.pi
    dH = 2 * np.sqrt(C1 * C2) * np.sin(turn / 2)
    L, C, h = (L1 + L2) / 2, (C1 + C2) / 2, h1 + turn / 2
    T = (
        1
        - 0.17 * np.cos(h - np.pi / 6)
        + 0.24 * np.cos(2 * h)
        + 0.32 * np.cos(3 * h + np.pi / 30)
        - 0.20 * np.cos(4 * h - np.radians(63))
    )
    S_L = 1 + 0.015 * (L - 50) ** 2 / np.sqrt(20 + (L - 50) ** 2)
    S_C, S_H = 1 + 0.045 * C, 1 + 0.015 * C * T
    angle = np.radians(30) * np.exp(-(((np.degrees(h) % 360 - 275) / 25) ** 2))
    R = -2 * np.sqrt(C**7 / (C**7 + 25**7)) * np.sin(2 * angle)
    l_term, c_term, h_term = (L2 - L1) / S_L, (C2 - C1) / S_C, dH / S_H
    return float(np.sqrt(l_term**2 + c_term**2 + h_term**2 + R * c_term * h_term))


def test_colour_distance_agrees_with_published_pairs() -> None:
    pairs = (
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    )
    for first, second, distance in pairs:
        assert ciede2000(np.array(first), np.array(second)) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("vision", VISION)
def test_colours_stay_apart(vision: str) -> None:
    for first, second in itertools.combinations(figures.COLORS, 2):
        near = any(first in group and second in group for group in GROUPS)
        distance = ciede2000(
            lab(figures.COLORS[first], vision), lab(figures.COLORS[second], vision)
        )
        assert distance >= (10.0 if near else 7.5), (first, second)


def test_groups_cover_every_meaning() -> None:
    assert sorted(itertools.chain(*GROUPS)) == sorted(figures.COLORS)
    assert set(figures.MARKERS) == set(figures.LINESTYLES) == set(figures.COLORS)


def test_no_meaning_is_told_by_colour_alone() -> None:
    assert len(set(figures.MARKERS.values())) == len(figures.MARKERS)
    assert figures.LINESTYLES["windowed"] != figures.LINESTYLES["global"]


def test_words_and_lines_have_contrast() -> None:
    assert figures.contrast(figures.INK, figures.CARD) >= 7
    assert figures.contrast(figures.QUIET, figures.CARD) >= 4.5
    for meaning, color in figures.COLORS.items():
        assert figures.contrast(color, figures.CARD) >= 3  # WCAG 1.4.11, graphical objects
        assert figures.contrast(figures.INK, figures.tint(meaning)) >= 4.5


def test_no_grey_serves_both_pages() -> None:
    """Why figures stand on a card: on white and on the site's dark ground no grey reaches 4.5 twice."""
    greys = [to_hex((level / 255,) * 3) for level in range(256)]
    best = max(min(figures.contrast(g, "#ffffff"), figures.contrast(g, "#121212")) for g in greys)
    assert 4.2 < best < 4.5


def test_contrast_of_black_on_white() -> None:
    assert figures.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert figures.text_on("#000000") == figures.CARD
    assert figures.text_on("#ffffff") == figures.INK


def test_tint_runs_from_card_to_colour() -> None:
    assert figures.tint("sink", 0.0) == figures.CARD
    assert figures.tint("sink", 1.0) == figures.COLORS["sink"]


def test_unknown_meaning_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="queries, keys, values"):
        color_of("querys")


def test_style_puts_figures_on_the_card() -> None:
    figure, axes = plt.subplots()
    assert to_hex(figure.get_facecolor()) == figures.CARD
    assert to_hex(axes.get_facecolor()) == figures.CARD
    assert figure.get_size_inches()[0] == figures.WIDTH


def test_attention_map_draws_the_sink_apart() -> None:
    _, axes = plt.subplots()
    weights = np.array([[0.5, 0.0], [0.25, 0.25]])
    figures.attention_map(axes, weights, np.array([0.5, 0.5]), values=True)
    sink, keys = sorted(axes.images, key=lambda image: image.get_extent()[0])
    assert sink.get_extent()[1] <= keys.get_extent()[0] - 0.4
    np.testing.assert_array_equal(keys.get_array(), weights)
    np.testing.assert_array_equal(np.ravel(np.asarray(sink.get_array())), [0.5, 0.5])
    assert sorted(t.get_text() for t in axes.texts) == ["", ".25", ".25", ".50", ".50", ".50"]
    assert axes.get_xticklabels()[0].get_text() == "sink"
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # query 0 at the top


def test_mask_grid_marks_what_is_seen() -> None:
    _, axes = plt.subplots()
    visible = np.tril(np.ones((3, 3), dtype=bool))
    figures.mask_grid(axes, visible, "windowed")
    dots = {tuple(spot) for spot in np.asarray(axes.collections[0].get_offsets()).tolist()}
    assert dots == {(0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2)}  # (key, query)
    assert len(axes.patches) == 9


def test_bars_show_the_kind_of_number_by_their_fill() -> None:
    _, axes = plt.subplots()
    figures.compare_bars(axes, ["a"], predicted=[1], measured=[2], claimed=[3], meaning="flops")
    predicted, measured, claimed = axes.patches
    assert to_hex(predicted.get_facecolor()) == figures.CARD
    assert to_hex(measured.get_facecolor()) == figures.COLORS["flops"]
    assert claimed.get_hatch()
    assert not measured.get_hatch()
    heights = [p.get_height() for p in axes.patches if isinstance(p, Rectangle)]
    assert heights == [1, 2, 3]


def test_blocks_know_where_arrows_attach() -> None:
    _, axes = figures.diagram(2.0)
    block = figures.tensor_block(axes, (1.0, 0.5), (2.0, 1.0), "q", "(B, T)", "queries")
    assert (block.left, block.right) == ((1.0, 1.0), (3.0, 1.0))
    assert (block.top, block.bottom) == ((2.0, 1.5), (2.0, 0.5))
    assert [t.get_text() for t in axes.texts] == ["q", "(B, T)"]
    figures.flow_arrow(axes, block.right, (4.0, 1.0), "copy")
    assert axes.texts[-1].get_text() == "copy"


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda ax: figures.mask_grid(ax, np.ones(3)), r"visible must be \(T, S\)"),
        (lambda ax: figures.attention_map(ax, np.ones(3)), r"weights must be \(T, S\)"),
        (lambda ax: figures.attention_map(ax, np.ones((2, 2)), np.ones(3)), "one share a query"),
        (lambda ax: figures.compare_bars(ax, ["a"]), "at least one of"),
        (lambda ax: figures.compare_bars(ax, ["a"], measured=[1, 2]), "1 numbers, one a label"),
        (lambda ax: figures.series_line(ax, [1], [1], "sink", "guess"), "kind must be one of"),
    ],
)
def test_bad_input_says_what_was_expected(draw, words: str) -> None:
    _, axes = plt.subplots()
    with pytest.raises(ValueError, match=words):
        draw(axes)


def test_sink_slider_shows_a_softmax_without_scripts() -> None:
    page = figures.sink_slider({"equal": [0.0, 0.0, 0.0]}, b=0.0)
    still = page.split("<script>")[0]
    assert still.count('<span class="number">0.250</span>') == 4  # three keys and the sink
    assert "the gate is 0.750" in still
    assert 'type="range"' in still  # a native slider: arrow keys move it
    assert "http" not in page  # nothing from elsewhere
    assert "src=" not in page


def test_sink_slider_wants_cases_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        figures.sink_slider({"one": [0.0], "two": [0.0, 1.0]})


@pytest.mark.parametrize("b", [800.0, -10.5, 15.5, float("nan")])
def test_sink_slider_wants_a_logit_that_it_reaches(b: float) -> None:
    with pytest.raises(ValueError, match=r"b must lie in -10\.\.15"):
        figures.sink_slider({"equal": [0.0]}, b=b)
    for end in (-10.0, 15.0):
        assert f'value="{end}"' in figures.sink_slider({"equal": [0.0]}, b=end)


def test_notation_page_shows_the_palette() -> None:
    page = (Path(__file__).parents[2] / "book" / "notation.md").read_text(encoding="utf-8")
    for meaning, color in figures.COLORS.items():
        assert color in page, meaning
