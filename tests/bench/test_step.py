"""The training-step table on a CPU: the tiny configuration, said so, and no production step by accident."""

import pytest
import torch

from gptoss.bench import step
from gptoss.bench.evidence import check_evidence

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")


def test_without_a_gpu_the_tiny_run_is_timed_and_the_table_says_so(monkeypatch):
    asked = []
    monkeypatch.setattr(step, "_time_variant", lambda parts, v, length, steps, peak: asked.append((parts.model.cfg.d_model, length, v.batch)) or {"ms": 1.0})  # fmt: skip
    table = step.measure(commit="test")
    check_evidence(table, "training_step")
    assert asked == [(128, 256, 2)] * 2
    assert [row["dispatch"] for row in table["rows"]] == ["stacked", "grouped_mm"]
    assert "no GPU here: the tiny configuration" in table["notes"][0]


def test_a_step_is_timed():
    variant = step.Variant(dispatch="stacked", batch=1)
    (row,) = step.measure((variant,), seq_len=16, steps=1, commit="test")["rows"]
    assert row["tokens_per_s"] == pytest.approx(16 / row["ms"] * 1e3, rel=0.01)
    assert "error" not in row
    assert "mfu" not in row


def test_a_step_that_cannot_be_recorded_is_a_row_with_the_reason():
    variant = step.Variant(dispatch="stacked", batch=1, cuda_graph=True)
    (row,) = step.measure((variant,), seq_len=16, steps=1, commit="test")["rows"]
    assert "one process on one GPU, got 1 on cpu" in row["error"]
    assert "ms" not in row


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"seq_len": 0}, {"variants": (step.Variant(batch=0),)}]
)
def test_nothing_to_time_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        step.measure(**wrong)
