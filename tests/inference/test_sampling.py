"""The sampling rules, with distributions small enough to check by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss.inference.sampling import (
    forbid,
    sample_next,
    token_probabilities,
    top_k_filter,
    top_p_filter,
)

FOUR = [0.3, 0.1, 0.1, 0.5]


def logits_of(probabilities: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().to(dtype)


def kept(filtered: torch.Tensor) -> list[int]:
    return [int(i) for i in filtered[0].isfinite().nonzero().flatten()]


# The nucleus


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [
        (0.0, [3]),
        (0.1, [3]),
        (0.5, [3]),  # the first token reaches 0.5 alone
        (0.51, [0, 3]),
        (0.79, [0, 3]),
        (0.8, [0, 3]),  # .5 + .3 reaches 0.8 exactly, whichever way the last bit rounds
        (0.81, [0, 1, 3]),  # of the two equal tokens the lower id comes first
        (0.9, [0, 1, 3]),
        (0.91, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_the_token_that_reaches_the_mass_is_the_last_one_kept(top_p, tokens, dtype):
    assert kept(top_p_filter(logits_of(FOUR, dtype), top_p)) == tokens


@pytest.mark.parametrize("shift", [0.0, 1.7, -3.3, 12.345])
def test_the_exact_boundary_does_not_depend_on_rounding(shift):
    # Shifted logits are the same distribution, but fp32 rounds them elsewhere: the sum comes out above or below 0.8.
    assert kept(top_p_filter(logits_of(FOUR) + shift, 0.8)) == [0, 3]
    assert kept(top_p_filter(logits_of([0.25, 0.35, 0.2, 0.2]) + shift, 0.6)) == [0, 1]


@settings(deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20), min_size=1, max_size=30),
    top_p=st.floats(0, 1),
)
def test_the_nucleus_is_the_smallest_top_set_that_reaches_the_mass(logits, top_p):
    x = torch.tensor([logits], dtype=torch.float64)
    p = x.softmax(-1)[0]
    tokens = kept(top_p_filter(x, top_p))
    mass = float(p[tokens].sum())
    assert mass >= top_p - 2e-6  # it reaches the mass …
    if len(tokens) > 1:
        assert mass - float(p[tokens].min()) < top_p  # … and not without its last token
    dropped = [i for i in range(len(logits)) if i not in tokens]
    if dropped:
        assert float(p[dropped].max()) <= float(p[tokens].min())


# Top-k and temperature


@pytest.mark.parametrize(
    ("k", "tokens"), [(1, [3]), (2, [0, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])]
)
def test_top_k_keeps_exactly_k_and_of_equal_ones_the_lower_id(k, tokens):
    assert kept(top_k_filter(logits_of(FOUR), k)) == tokens


@pytest.mark.parametrize("k", [5, 128_000])
def test_top_k_beyond_the_vocabulary_keeps_all(k):
    logits = logits_of(FOUR)
    assert torch.equal(top_k_filter(logits, k), logits)
    assert sample_next(logits, top_k=k).shape == (1,)


def test_temperature_comes_before_the_filters():
    # At temperature 1/2 the probabilities .3 .1 .1 .5 become 9 1 1 25 of 36.
    p = token_probabilities(logits_of(FOUR, torch.float64), temperature=0.5)
    torch.testing.assert_close(
        p, torch.tensor([[9, 1, 1, 25]], dtype=torch.float64) / 36, rtol=0, atol=1e-12
    )
    # and 25/36 = 0.694 alone reaches 0.6, which .5 does not
    assert kept(token_probabilities(logits_of(FOUR), 0.5, top_p=0.6).log()) == [3]
    assert kept(token_probabilities(logits_of(FOUR), 1.0, top_p=0.6).log()) == [0, 3]


def test_top_k_comes_before_the_nucleus():
    # Of the two most probable tokens (.5, .3 of .8) the first holds 0.625 and reaches 0.6 alone.
    p = token_probabilities(logits_of(FOUR), top_k=2, top_p=0.6)
    assert p.tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e4])
def test_extreme_temperatures_stay_finite(temperature):
    p = token_probabilities(torch.tensor([[80.0, -80.0, 3.0, -math.inf]]), temperature)
    assert p.isfinite().all()
    assert p.sum() == pytest.approx(1)
    assert p[0, 3] == 0


def test_temperature_zero_and_top_p_zero_take_the_largest_logit():
    logits = torch.randn(50, 40)
    greedy = logits.argmax(-1)
    assert torch.equal(sample_next(logits, temperature=0), greedy)
    assert torch.equal(sample_next(logits, top_p=0.0), greedy)
    assert torch.equal(sample_next(logits, top_k=1), greedy)
    assert torch.equal(token_probabilities(logits, 0.0).argmax(-1), greedy)


def test_temperature_zero_uses_no_randomness():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    sample_next(torch.randn(2, 5), temperature=0, generator=generator)
    assert torch.equal(generator.get_state(), before)


# The draw


def test_draws_follow_the_distribution():
    n = 40_000
    logits = logits_of(FOUR).expand(n, 4)
    drawn = sample_next(logits, generator=torch.Generator().manual_seed(1))
    shares = torch.bincount(drawn, minlength=4) / n
    # standard error at most sqrt(.25 / 40,000) = 0.0025; four of them
    torch.testing.assert_close(shares, torch.tensor(FOUR), rtol=0, atol=0.01)


@settings(deadline=None, max_examples=50)
@given(
    logits=st.lists(st.floats(-5, 5), min_size=2, max_size=20),
    top_p=st.floats(0, 1),
    top_k=st.integers(1, 25),
    temperature=st.floats(0.05, 5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_token_of_probability_zero_never_comes_out(logits, top_p, top_k, temperature, dtype):
    x = torch.tensor([logits]).to(dtype)
    p = token_probabilities(x, temperature, top_k, top_p)
    assert p.dtype == torch.float64
    assert p.sum() == pytest.approx(1)
    drawn = sample_next(
        x.expand(64, -1), temperature, top_k, top_p, torch.Generator().manual_seed(0)
    )
    assert (p[0, drawn] > 0).all()


def test_a_uniform_number_of_exactly_zero_skips_tokens_of_probability_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.zeros(*size, dtype=torch.float64))
    logits = torch.tensor([[-math.inf, 1.0, 2.0]])
    assert sample_next(logits).tolist() == [1]


def test_the_same_generator_state_gives_the_same_tokens():
    logits = torch.randn(8, 100)
    one, two = (sample_next(logits, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)


def test_no_function_changes_its_input():
    logits = torch.randn(3, 9)
    before = logits.clone()
    top_k_filter(logits, 2)
    top_p_filter(logits, 0.5)
    sample_next(logits, 0.7, 3, 0.9)
    forbid(logits, torch.tensor([1, 2]))
    assert torch.equal(logits, before)


def test_forbidden_tokens_have_no_chance():
    assert kept(forbid(logits_of(FOUR), torch.tensor([3, 1]))) == [0, 2]
    assert kept(forbid(logits_of(FOUR), torch.tensor([], dtype=torch.long))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.01}, "top_p must lie in .0, 1., got 1.01"),
        ({"top_p": -0.5, "temperature": 0}, "top_p must lie in"),
        ({"top_p": math.nan}, "top_p must lie in"),
    ],
)
def test_settings_without_meaning_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        sample_next(logits_of(FOUR), **setting)
