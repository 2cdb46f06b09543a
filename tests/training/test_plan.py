"""How a step is cut, and what the page before a run says."""

import pytest

from gptoss.config import RunConfig, TrainingConfig
from gptoss.training.plan import BatchPlan, RunPlan, forecast, plan_batches, sequences_per_step


def settings(micro: int | str = 8, accumulation: int = 4) -> TrainingConfig:
    return TrainingConfig(micro_batch_size=micro, gradient_accumulation_steps=accumulation)


def test_production_step_is_131072_tokens_on_any_number_of_processes():
    for world in (1, 2, 4):
        plan = plan_batches(settings(), 4096, world)
        assert plan.micro_batch == 8
        assert plan.accumulation == 4 // world
        assert plan.tokens_per_step == 131_072


def test_auto_takes_the_largest_divisor_that_fits():
    for limit, expected in ((3.9, 2), (4.0, 4), (31.0, 16), (1000.0, 32)):
        plan = plan_batches(settings("auto"), 4096, 1, predicted_gib=float, limit_gib=limit)
        assert plan.micro_batch == expected
        assert plan.tokens_per_step == 131_072
    assert plan_batches(settings("auto"), 4096, 4, float, 1000.0).micro_batch == 8


def test_auto_counts_eight_sequences_an_accumulation_step():
    assert sequences_per_step(settings("auto", 3)) == 24


def test_processes_that_cannot_share_a_step_are_told_which_can():
    with pytest.raises(ValueError, match=r"3 processes .* start 1, 2, 4, 8, 16 or 32 processes"):
        plan_batches(settings(), 4096, 3)


def test_a_micro_batch_that_does_not_divide_is_told_which_do():
    with pytest.raises(ValueError, match=r"= 8: 8 processes .* 4 each; .* can be 1, 2 or 4"):
        plan_batches(settings(), 4096, 8)


def test_too_large_a_micro_batch_is_refused_with_the_largest_that_fits():
    with pytest.raises(ValueError, match=r"= 8 .* 8.0 GiB, more than the 5.0 GiB .* fits .* is 4"):
        plan_batches(settings(), 4096, 1, float, 5.0)


def test_a_model_that_fits_not_even_one_sequence():
    with pytest.raises(ValueError, match=r"one sequence of 4,096 tokens .* 1.0 GiB"):
        plan_batches(settings("auto"), 4096, 1, float, 0.5)


def test_the_page_says_what_is_about_to_happen():
    plan = RunPlan(
        run=RunConfig(),
        batch=BatchPlan(8, 2, 2, 4096),
        device="cuda",
        parameters=501_836_640,
        active_parameters=247_032_672,
        first_step=1000,
        train_tokens=8_000_000_000,
        validation_tokens=1_000_000,
        predicted_gib=26.2,
        limit_gib=75.0,
        shows_mfu=True,
    )
    page = plan.page()
    for words in (
        "501,836,640 parameters, 247,032,672 active",
        "131,072 tokens = 8 sequences × 2 micro-steps × 2 processes × 4,096 tokens",
        "61,000 steps, 7,995,392,000 tokens (1.00 epochs); 60,000 steps to go",
        "26.20 GiB predicted of 75.0 GiB",
        "6 · active parameters",
    ):
        assert words in page
    assert len(page.splitlines()) < 20


def test_the_forecast_counts_gpu_hours():
    line = forecast(60_000, 0.6, 131_072, gpus=2)
    assert (
        line == "[plan] 60,000 steps to go at 218,453 tokens/s: about 10 h 00 min, 20.0 GPU-hours"
    )
    assert "GPU" not in forecast(100, 1.0, 10, gpus=0)
