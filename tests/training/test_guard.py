"""The policy on refused steps."""

import pytest

from gptoss.training.guard import NanGuard, TrainingStopped


def test_a_taken_step_ends_the_row():
    guard = NanGuard(max_consecutive=3)
    assert [guard.refuse(0, 1), guard.refuse(2, 3)] == [False, False]
    guard.take(1)
    assert [guard.refuse(4, 5), guard.refuse(6, 7)] == [False, False]
    assert guard.refuse(8, 9)


def test_the_fifth_refusal_in_a_row_goes_back():
    guard = NanGuard()
    assert [guard.refuse(i, i) for i in range(5)] == [False] * 4 + [True]


def test_after_three_rollbacks_without_progress_it_stops_and_names_the_batches():
    guard = NanGuard(max_consecutive=2)
    guard.take(10)
    for turn in range(3):
        assert not guard.refuse(100 * turn, 100 * turn + 3)
        assert guard.refuse(100 * turn + 4, 100 * turn + 7)
        guard.take(8)  # an old step again: no progress
    guard.refuse(300, 303)
    with pytest.raises(TrainingStopped, match=r"beyond step 10; .* 0-3, 4-7, 100-103, .*, 304-307"):
        guard.refuse(304, 307)


def test_a_step_beyond_the_furthest_is_progress():
    guard = NanGuard(max_consecutive=1)
    for step in range(1, 8):  # seven rollbacks, each after one new step
        guard.take(step)
        assert guard.refuse(step, step)
