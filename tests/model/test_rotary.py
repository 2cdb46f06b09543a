import math
import warnings

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gptoss.config import ModelConfig
from gptoss.model.rotary import YaRNRoPE, apply_rope, compute_yarn_freqs, compute_yarn_mscale
from gptoss.model.transformer import GPTOSS

PRODUCTION = (96, 100_000, 32, 4096, 131_072)


def test_rotation_by_hand() -> None:
    x = torch.tensor([[[[1.0, 0.0, 0.0, 2.0]]]], dtype=torch.float64)
    angle = torch.tensor([[math.pi / 2, math.pi]], dtype=torch.float64)
    expected = torch.tensor([[[[0.0, 1.0, 0.0, -2.0]]]], dtype=torch.float64)
    torch.testing.assert_close(apply_rope(x, angle.cos(), angle.sin()), expected)


def test_scores_depend_on_the_offset_alone() -> None:
    rope = YaRNRoPE(96, mode="plain")
    q, k = torch.randn(2, 1, 1, 1, 96, dtype=torch.float64).unbind(0)

    def score(m: int, n: int) -> torch.Tensor:
        turn = lambda x, p: apply_rope(x, *rope(torch.tensor([p]), dtype=torch.float64))  # noqa: E731
        return (turn(q, m) * turn(k, n)).sum()

    torch.testing.assert_close(score(130_000, 129_900), score(100, 0), rtol=0, atol=1e-9)


def test_production_ramp_touches_the_documented_pairs() -> None:
    plain, yarn = compute_yarn_freqs(96, 100_000, 1, 4096, 131_072), compute_yarn_freqs(*PRODUCTION)
    ratio = plain / yarn
    assert torch.equal(yarn[:13], plain[:13])  # low = 12.567
    assert ((ratio[13:28] > 1) & (ratio[13:28] < 32)).all()  # high = 27.016
    torch.testing.assert_close(ratio[28:], torch.full_like(ratio[28:], 32), rtol=1e-12, atol=0)
    assert math.isclose(compute_yarn_mscale(32), 1.34657, abs_tol=1e-5)
    assert compute_yarn_mscale(1) == 1 == compute_yarn_mscale(0.5)


def test_one_blended_pair_by_hand() -> None:
    low = 96 * math.log(4096 / (2 * math.pi * 32)) / (2 * math.log(1e5))
    high = 96 * math.log(4096 / (2 * math.pi)) / (2 * math.log(1e5))
    assert (round(low, 3), round(high, 3)) == (12.567, 27.016)
    base, ramp = 1e5 ** (-40 / 96), (20 - low) / (high - low)
    expected = base * (1 - ramp) + base / 32 * ramp
    assert math.isclose(compute_yarn_freqs(*PRODUCTION)[20].item(), expected, rel_tol=1e-14)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "theta", "scale", "length"),
    [
        (96, 100_000, 32, 4096),
        (64, 150_000, 32, 4096),
        (128, 10_000, 4, 2048),
        (64, 10_000, 16, 4096),
        (32, 10_000, 8, 256),
        (80, 500_000, 8, 8192),
        (96, 1_000_000, 2, 32_768),
        (48, 50_000, 40, 1024),
        (256, 100_000, 10, 512),
        (64, 20_000, 1.5, 300),
        (8, 150_000, 32, 64),
    ],
)
def test_frequencies_equal_transformers(
    head_dim: int, theta: float, scale: float, length: int, truncate: bool
) -> None:
    config = GptOssConfig(
        head_dim=head_dim,
        max_position_embeddings=int(scale * length),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": scale,
            "original_max_position_embeddings": length,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": truncate,
        },
    )
    theirs, mscale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = compute_yarn_freqs(
        head_dim, theta, scale, length, int(scale * length), truncate=truncate
    )
    # theirs are fp32: 2⁻²⁴ from rounding the result, a few more from the power and the ramp
    torch.testing.assert_close(ours, theirs.double(), rtol=2e-6, atol=0)
    assert math.isclose(mscale, compute_yarn_mscale(scale), rel_tol=1e-12)


def test_bounds_are_not_rounded_unless_asked() -> None:
    exact, rounded = compute_yarn_freqs(*PRODUCTION), compute_yarn_freqs(*PRODUCTION, truncate=True)
    assert not torch.allclose(exact, rounded, rtol=1e-3)


def test_rounded_upper_bound_is_clamped_to_the_last_dimension() -> None:
    # D = 8, θ = 10, L₀ = 10⁶: c(1) = 8·ln(159154.9)/(2·ln 10) = 20.81, so high = min(21, 7); c(32) = 14.8 > 7: empty
    with pytest.warns(UserWarning, match="ramp"):
        assert torch.equal(
            compute_yarn_freqs(8, 10, 4, 1_000_000, 4_000_000, truncate=True),
            compute_yarn_freqs(8, 10, 1, 1_000_000, 4_000_000),
        )


def test_scale_one_is_plain_rope() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        freqs = compute_yarn_freqs(64, 10_000, 1, 4096, 4096)
    expected = 10_000 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(freqs, expected)


def test_empty_ramp_warns_and_stays_plain() -> None:
    with pytest.warns(UserWarning, match="stay plain"):
        freqs = compute_yarn_freqs(96, 100_000, 32, 4096, 131_072, beta_fast=1, beta_slow=32)
    assert torch.equal(freqs, compute_yarn_freqs(96, 100_000, 1, 4096, 131_072))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 95}, "even"),
        ({"original_max_seq_len": 0}, "positive"),
        ({"target_seq_len": -1}, "positive"),
        ({"target_seq_len": 4096}, "target_seq_len > original"),
        ({"scale_factor": 0.5}, "at least 1"),
        ({"theta": 1.0}, "theta > 1"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, float], words: str) -> None:
    names = ("head_dim", "theta", "scale_factor", "original_max_seq_len", "target_seq_len")
    settings = dict(zip(names, PRODUCTION, strict=True)) | change
    with pytest.raises(ValueError, match=words):
        compute_yarn_freqs(**settings)  # type: ignore[arg-type]  # the point is bad input


@pytest.mark.parametrize("position", [257, 15_968, 131_071])
@pytest.mark.parametrize("mode", ["plain", "yarn"])
def test_tables_are_exact_under_bf16_autocast(position: int, mode: str) -> None:
    rope = YaRNRoPE(*PRODUCTION, mode=mode)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cos, sin = rope(torch.tensor([position]))
    scale = compute_yarn_mscale(32) if mode == "yarn" else 1.0
    for pair in range(48):  # math.cos of the exact float64 product is the oracle
        base = 100_000 ** (-2 * pair / 96)
        low, high = (96 * math.log(4096 / (2 * math.pi * r)) / (2 * math.log(1e5)) for r in (32, 1))
        ramp = min(max((pair - low) / (high - low), 0), 1) if mode == "yarn" else 0
        angle = position * (base * (1 - ramp) + base / 32 * ramp)
        assert abs(cos[0, pair].item() - scale * math.cos(angle)) < 2e-6
        assert abs(sin[0, pair].item() - scale * math.sin(angle)) < 2e-6


def test_pruned_pairs_do_not_turn_and_carry_no_mscale() -> None:
    cos, sin = YaRNRoPE(*PRODUCTION)(torch.arange(100), n_pruned_dims=24)
    assert (cos[:, :24] == 1).all()
    assert (sin[:, :24] == 0).all()
    assert cos[0, 24].item() == pytest.approx(1.34657, abs=1e-5)
    with pytest.raises(ValueError, match="0 to 48"):
        YaRNRoPE(*PRODUCTION)(torch.arange(3), n_pruned_dims=49)


def test_mscale_of_pruned_pairs_sharpens_every_dimension_alike() -> None:
    positions = torch.tensor([0, 70_000])
    cos, sin = YaRNRoPE(*PRODUCTION, mscale_pruned=True)(positions, n_pruned_dims=24)
    mscale = compute_yarn_mscale(32)
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full((2, 48), mscale))
    assert (sin[:, :24] == 0).all()
    plain, _ = YaRNRoPE(*PRODUCTION, mscale_pruned=True, mode="plain")(positions, 24)
    assert (plain[:, :24] == 1).all()


@pytest.mark.parametrize("layers", ["global", "all"])
def test_yarn_changes_the_layers_that_the_setting_names(layers: str) -> None:
    cfg = ModelConfig(vocab_size=7, n_layers=2, yarn_layers=layers, yarn_mscale_pruned=False)
    with torch.device("meta"):
        model = GPTOSS(cfg)
    positions = torch.arange(5000)
    for mode in ("plain", "yarn"):
        model.set_rope_mode(mode)
        windowed, whole = model.rotary_tables(positions, torch.float32)
        own = mode if layers == "all" else "plain"
        for table, wanted in zip(
            (*windowed, *whole),
            (*YaRNRoPE(*PRODUCTION, mode=own)(positions), *YaRNRoPE(*PRODUCTION, mode=mode)(positions, 24)),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(table, wanted)


def test_output_keeps_the_input_dtype() -> None:
    cos, sin = YaRNRoPE(*PRODUCTION)(torch.arange(5))
    assert (
        apply_rope(torch.randn(1, 2, 5, 96, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
    )


def test_row_positions_broadcast_over_heads() -> None:
    rope = YaRNRoPE(8, original_max_seq_len=16, target_seq_len=512, mode="plain")
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    rows = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    both = apply_rope(x, *rope(rows, dtype=torch.float64))
    for row in range(2):
        alone = apply_rope(x[row : row + 1], *rope(rows[row], dtype=torch.float64))
        assert torch.equal(both[row : row + 1], alone)


def test_tables_of_other_positions_are_refused() -> None:
    cos, sin = YaRNRoPE(*PRODUCTION)(torch.arange(5))
    with pytest.raises(ValueError, match="rotary tables"):
        apply_rope(torch.randn(1, 2, 6, 96), cos, sin)


@pytest.mark.parametrize(
    ("cos", "sin"),
    [
        ((3, 5, 48), (3, 5, 48)),  # three rows of positions for a batch of two
        ((2, 5, 48), (1, 5, 48)),
        ((5, 48), (5, 1)),
        ((5, 48), (2, 5, 48)),
        ((1, 1, 5, 48), (1, 1, 5, 48)),
    ],
)
def test_tables_of_another_batch_or_of_two_shapes_are_refused(
    cos: tuple[int, ...], sin: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected cos and sin \(5, 48\) or \(2, 5, 48\), got"):
        apply_rope(torch.randn(2, 4, 5, 96), torch.ones(cos), torch.ones(sin))


def test_tables_of_one_row_serve_the_whole_batch() -> None:
    x, rope = torch.randn(2, 4, 5, 96), YaRNRoPE(*PRODUCTION)
    one, row = rope(torch.arange(5)), rope(torch.arange(5)[None])
    assert torch.equal(apply_rope(x, *row), apply_rope(x, *one))


@pytest.mark.parametrize("mode", ["YaRN", "none", ""])
def test_an_unknown_mode_is_refused_wherever_it_comes_in(mode: str) -> None:
    rope, positions = YaRNRoPE(*PRODUCTION), torch.arange(3)
    with pytest.raises(ValueError, match="expected one of plain, yarn"):
        YaRNRoPE(*PRODUCTION, mode=mode)
    with pytest.raises(ValueError, match="expected one of plain, yarn"):
        rope(positions, mode=mode)
    with pytest.raises(ValueError, match="expected one of plain, yarn"):
        rope.frequencies(mode=mode)
    rope.mode = mode
    with pytest.raises(ValueError, match="expected one of plain, yarn"):
        rope(positions)
