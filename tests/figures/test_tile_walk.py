"""The walk over tiles that the reader steers: what it counts, and what it shows without scripts."""

import pytest

from gptoss import figures
from gptoss.figures.tile_walk import walk_misses


def test_two_by_two_tiles_by_hand() -> None:
    # row by row with room for two strips: x0, w0 | w1 (x0 stays) | x1, w0 | w1
    assert walk_misses([0, 0], 2, 1, 2) == [(0, 0, 2), (0, 1, 1), (1, 0, 2), (1, 1, 1)]
    # column by column in one group: x0, w0 | x1 (w0 stays) | x0, w1 | x1
    assert walk_misses([0, 0], 2, 2, 2) == [(0, 0, 2), (1, 0, 1), (0, 1, 2), (1, 1, 1)]


def test_every_tile_is_walked_once_and_a_large_cache_fetches_every_strip_once() -> None:
    owner = [0, 0, 0, 2, 3, 3, 3]
    for group in (1, 2, 3, 8):
        walked = walk_misses(owner, 5, group, 100)
        assert sorted((row, column) for row, column, _ in walked) == [
            (row, column) for row in range(7) for column in range(5)
        ]
        assert sum(n for *_, n in walked) == 7 + 3 * 5  # rows of x, columns of three experts


def test_groups_save_fetches_where_the_cache_is_small() -> None:
    owner = [0] * 8
    fetched = [sum(n for *_, n in walk_misses(owner, 12, group, 8)) for group in (1, 4)]
    assert fetched[0] == 8 + 8 * 12  # each row of tiles fetches all columns again
    assert fetched[1] == 8 + 2 * 12  # each of two groups does


def test_still_picture_says_what_the_walk_counts() -> None:
    page = figures.tile_walk((2, 0, 1), columns=3, group=1, strips=2)
    still = page.split("<script>")[0]
    # 3 rows of x, and no column survives a row of three: 9
    assert (
        "After 9 of 9 programs: 18 strips asked for, 12 fetched from main memory, 33% found"
        in still
    )
    assert still.count('type="range"') == 3  # native sliders: arrow keys move them
    assert "expert 2" in still
    assert "expert 1" not in still  # idle: no tile
    assert "http" not in page  # nothing from elsewhere
    assert "src=" not in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tiles": (0, 0)}, "got 0 and 12"),
        ({"group": 9}, "got 9 and 8"),
        ({"strips": 1}, "got 1 and 1"),
    ],
)
def test_what_the_sliders_do_not_reach_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        figures.tile_walk(**arguments)
