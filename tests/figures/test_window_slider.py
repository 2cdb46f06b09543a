"""The window and depth that the reader moves: what the picture shows without scripts."""

import pytest
import torch

from gptoss import figures
from gptoss.figures.window_slider import oldest_seen
from gptoss.model.attention import visible_keys


def test_windows_alone_reach_three_tokens_a_layer() -> None:
    page = figures.window_slider(window=4, layers=4, pattern="every layer windowed")
    still = page.split("<script>")[0]
    # 4 layers of W − 1 = 3 steps back, and itself: 13 tokens; 4 · (4·5/2 + 20·4) = 360 pairs of 4 · 300
    assert "depends on 13 of 24 tokens" in still
    assert "compute 360 of the 1200 pairs that global layers would, 30.0%." in still
    # the last token after the top layer, then 4, 7, 10 and 13 tokens
    assert still.count('class="seen"') == 1 + 4 + 7 + 10 + 13
    assert still.count('type="range"') == 2  # native sliders: arrow keys move them
    assert "http" not in page  # nothing from elsewhere
    assert "src=" not in page


def test_a_global_layer_reaches_everything() -> None:
    still = figures.window_slider(window=4, layers=2).split("<script>")[0]
    assert "depends on 24 of 24 tokens" in still
    assert "compute 390 of the 600 pairs" in still  # 90 through the window, 300 without
    assert still.count('class="fan global"') == 1
    assert still.count('class="fan windowed"') == 24


def test_the_oldest_token_is_that_of_the_masks_multiplied() -> None:
    index = torch.arange(24)
    for windows in ((3, 3, 3), (5, None, 2), (None, 4), (1, 1), (24, 2)):
        reach = torch.eye(24, dtype=torch.bool)[-1:]
        found = [23]
        for window in reversed(windows):
            mask = visible_keys(index, index, window)
            reach = (reach.float() @ mask.float()) > 0
            found.append(int(reach[0].nonzero()[0]))
        assert oldest_seen(windows, 24) == found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 0}, "got 0 and 4"),
        ({"layers": 7}, "got 4 and 7"),
        ({"pattern": "every second"}, "got 'every second'"),
    ],
)
def test_a_state_outside_the_sliders_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        figures.window_slider(**arguments)
