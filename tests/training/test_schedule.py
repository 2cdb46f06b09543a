"""Warmup and cosine, by hand; and the table on the device."""

import math

import pytest
import torch

from gptoss.training.schedule import Schedule, make_warmup_cosine_lambda


def test_production_curve_at_hand_computed_steps():
    factor = make_warmup_cosine_lambda(3000, 61_000, 0.05)
    assert factor(0) == 0
    assert factor(200) == pytest.approx(1 / 15)
    assert factor(3000) == 1
    assert factor(32_000) == pytest.approx(0.525)  # half-way: (1 + 0.05) / 2
    assert factor(61_000) == 0.05
    assert factor(99_999) == 0.05


def test_area_is_31950_peak_steps():
    factor = make_warmup_cosine_lambda(3000, 61_000, 0.05)
    area = sum((factor(s) + factor(s + 1)) / 2 for s in range(61_000))  # trapezia
    assert area == pytest.approx(31_950, abs=0.01)


def test_no_warmup_starts_at_the_peak():
    factor = make_warmup_cosine_lambda(0, 4, 0.0)
    assert [round(factor(s), 6) for s in range(6)] == [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]


def test_one_step_of_warmup():
    factor = make_warmup_cosine_lambda(1, 3, 0.2)
    assert [factor(0), factor(1)] == [0.0, 1.0]
    assert factor(2) == pytest.approx(0.6)


@pytest.mark.parametrize("warmup", [5, 8])
def test_warmup_as_long_as_the_run_or_longer(warmup):
    factor = make_warmup_cosine_lambda(warmup, 5, 0.1)
    assert [factor(s) for s in range(5)] == [s / warmup for s in range(5)]
    assert factor(5) == 0.1
    assert all(math.isfinite(factor(s)) for s in range(20))


@pytest.mark.parametrize("bad", [(-1, 5, 0.0), (0, 0, 0.0), (0, 5, 1.5)])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match="expected"):
        make_warmup_cosine_lambda(*bad)


def rates(schedule: Schedule, count: int) -> list[float]:
    seen = []
    for _ in range(count):
        seen.append(schedule.rate().item())
        schedule.advance(torch.tensor(True))
    return seen


def test_step_n_is_taken_at_lambda_of_n():
    factor = make_warmup_cosine_lambda(3, 20, 0.1)
    expected = [2e-3 * factor(n) for n in range(1, 21)]
    assert rates(Schedule(2e-3, 3, 20, 0.1), 20) == pytest.approx(expected, rel=1e-6)


def test_behind_the_end_the_floor_stays():
    assert rates(Schedule(1.0, 0, 3, 0.25), 6)[3:] == [0.25, 0.25, 0.25]


def test_resume_at_step_7_of_20_gives_the_same_rates():
    straight = rates(Schedule(4e-4, 5, 20, 0.05), 20)
    first = Schedule(4e-4, 5, 20, 0.05)
    begun = rates(first, 7)
    second = Schedule(4e-4, 5, 20, 0.05)
    second.load_state_dict(first.state_dict())
    assert begun + rates(second, 13) == straight


def test_a_refused_update_does_not_advance():
    schedule = Schedule(1.0, 4, 10, 0.0)
    schedule.advance(torch.tensor(True))
    before = schedule.rate().item()
    schedule.advance(torch.tensor(False))
    assert schedule.rate().item() == before
    assert schedule.state_dict() == {"taken": 1}
