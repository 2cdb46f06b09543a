"""The router on two sliders: what it shows without scripts, and what it refuses."""

import re

import pytest
import torch

from gptoss import aux_load_balancing_loss
from gptoss.figures import load_slider

TWO_TOKENS = [[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]]


def still(page: str) -> str:
    return page.split("<script>")[0]


def test_still_picture_shows_slots_and_mean_probability() -> None:
    page = load_slider(TWO_TOKENS, 2)
    # both tokens take experts 0 and 1 (the second by the rule for ties): f = ½, ½, 0, 0;
    # P = mean of softmax(2, 1, 0, −1) = (.6439, .2369, .0871, .0321) and ¼ each
    numbers = re.findall(r'class="number">([\d.]+)<', still(page))
    assert numbers == ["0.500", "0.447", "0.500", "0.243", "0.000", "0.169", "0.000", "0.141"]
    assert "Balance loss 1.381. Busiest expert: 50.0% of the slots. Idle experts: 2 of 4." in page


def test_sliders_are_native_and_nothing_comes_from_elsewhere() -> None:
    page = load_slider(TWO_TOKENS, 2)
    assert still(page).count('type="range"') == 2  # arrow keys move them
    assert "http" not in page
    assert "src=" not in page
    assert "LOGITS" not in page
    assert "CHOSEN" not in page


def test_loss_is_the_packages() -> None:
    logits = torch.randn(24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bent = logits.clone()
    bent[:, :2] += 1.5
    loss = aux_load_balancing_loss(bent / 0.5, 8, 2).item()
    page = load_slider(logits.tolist(), 2, head_start=1.5, temperature=0.5)
    assert f"Balance loss {loss:.3f}." in still(page)


def test_temperature_moves_probability_and_never_the_slots() -> None:
    logits = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).tolist()
    hot, cold = (load_slider(logits, 1, temperature=t) for t in (4.0, 0.25))
    shares = [re.findall(r'class="number">([\d.]+)<', still(page)) for page in (hot, cold)]
    assert shares[0][0::2] == shares[1][0::2]
    assert shares[0][1::2] != shares[1][1::2]


@pytest.mark.parametrize(
    ("logits", "k", "words"),
    [([], 1, "got lengths"), ([[1.0], [1.0, 2.0]], 1, r"\[1, 2\]"), ([[1.0, 2.0]], 2, "got 2")],
)
def test_wrong_input_is_named(logits: list[list[float]], k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_slider(logits, k)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ({"temperature": 0.0}, "got 0.0 and 0.0"),
        ({"temperature": 9.0}, "got 0.0 and 9.0"),
        ({"temperature": float("nan")}, "got 0.0 and nan"),
        ({"head_start": -0.1}, "got -0.1 and 1.0"),
        ({"head_start": 6.5}, "got 6.5 and 1.0"),
    ],
)
def test_a_start_that_no_slider_reaches_is_refused(start: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_slider(TWO_TOKENS, 2, **start)


@pytest.mark.parametrize(("head_start", "temperature"), [(0.0, 0.125), (6.0, 8.0)])
def test_the_sliders_ends_are_starts_too(head_start: float, temperature: float) -> None:
    page = load_slider(TWO_TOKENS, 2, head_start, temperature)
    assert f'value="{head_start}"' in page
