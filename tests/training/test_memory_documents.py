"""The documents' estimate, digit for digit."""

import pytest
import torch
from torch import nn

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.memory import assert_fits_in_available_gpu, estimate_model_memory_gb


@pytest.fixture(scope="module")
def production() -> GPTOSS:
    with torch.device("meta"):
        return GPTOSS(ModelConfig())


def test_documents_figures(production: GPTOSS) -> None:
    """16P = 7.478, KV = 0.5625, activations = 10.6875 GiB, and 2 of overhead; with every = 3 two thirds of them."""
    without = estimate_model_memory_gb(production, 4096, 8, grad_checkpoint=False, overhead_gb=2.0)
    with_three = estimate_model_memory_gb(production, 4096, 8, overhead_gb=2.0)
    assert without == pytest.approx(16 * 501_836_640 / 2**30 + 0.5625 + 10.6875 + 2.0, abs=1e-12)
    assert f"{without:.2f}" == "20.73"
    assert f"{with_three:.2f}" == "17.17"


def test_overhead_on_an_80_gib_gpu(production: GPTOSS, monkeypatch) -> None:
    """0.17 · 80 = 13.6: the documents' 32.33 and 28.77."""
    gpu(monkeypatch, gib=80)
    assert f"{estimate_model_memory_gb(production, 4096, 8, grad_checkpoint=False):.2f}" == "32.33"
    assert f"{estimate_model_memory_gb(production, 4096, 8):.2f}" == "28.77"


@pytest.mark.parametrize(("gib", "overhead"), [(8, 2.0), (24, 4.08), (141, 13.7)])
def test_overhead_is_between_2_and_13_7(production, monkeypatch, gib, overhead: float) -> None:
    base = estimate_model_memory_gb(production, 4096, 8, overhead_gb=0.0)
    gpu(monkeypatch, gib)
    assert estimate_model_memory_gb(production, 4096, 8) - base == pytest.approx(overhead)


def test_steady_state_windows_hold_128_keys(production: GPTOSS) -> None:
    """(6·(131,072 − 128))·1536 bytes less than full windows."""
    full = estimate_model_memory_gb(production, 131_072, 1, overhead_gb=0)
    steady = estimate_model_memory_gb(production, 131_072, 1, overhead_gb=0, steady_state=True)
    assert full - steady == pytest.approx(6 * (131_072 - 128) * 1536 / 2**30)


def test_its_factor_says_that_checkpointing_everything_saves_nothing(production: GPTOSS) -> None:
    """s(1) = 1, as without: the fault that the book teaches; s(2) = 3/4 and s(3) = 2/3."""
    none = estimate_model_memory_gb(production, 4096, 8, grad_checkpoint=False)
    every = {g: estimate_model_memory_gb(production, 4096, 8, grad_ckpt_every=g) for g in (1, 2, 3)}
    assert every[1] == none
    assert every[2] - every[3] == pytest.approx((3 / 4 - 2 / 3) * 10.6875)


def test_model_without_a_configuration_is_0() -> None:
    assert estimate_model_memory_gb(nn.Linear(2, 2), 8, 8) == 0.0


def test_fit_is_refused_with_numbers(monkeypatch, capsys) -> None:
    gpu(monkeypatch, gib=80)
    assert_fits_in_available_gpu(78.0)
    assert capsys.readouterr().out == "[memory] Estimated peak VRAM: 78.0 GB / 80.0 GB — OK.\n"
    with pytest.raises(RuntimeError, match=r"78\.1 GiB does not fit: the GPU has 80\.0 GiB"):
        assert_fits_in_available_gpu(78.1)


def test_without_a_gpu_everything_fits(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_fits_in_available_gpu(1e9)
    assert capsys.readouterr().out == ""


def gpu(monkeypatch, gib: float) -> None:
    """Let torch report a GPU of this size."""
    properties = type("Properties", (), {"total_memory": gib * 2**30})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
