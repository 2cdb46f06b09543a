"""The attention and head tables on a CPU: they run at small sizes, say so, and keep the evidence's form."""

import torch

from gptoss.bench import attention, head
from gptoss.bench.evidence import check_evidence


def test_attention_table_compares_windowed_with_full():
    table = attention.measure((attention.Shape(1, 256, 2, 1, 16),), commit="test")
    check_evidence(table, "attention")
    rows = [row for row in table["rows"] if row["who"] in ("blocked", "gptoss")]
    assert [row["window"] for row in rows] == [None, 128]
    assert rows[1]["windowed_against_full"] == round(rows[1]["both_ms"] / rows[0]["both_ms"], 5)
    assert torch.cuda.is_available() or "no GPU here" in table["notes"][0]


def test_attention_flops_follow_the_visible_pairs():
    """T = 4 has 4·5/2 = 10 pairs; 14·D·H·B FLOPs each, forward and backward."""
    row = attention.measure((attention.Shape(1, 4, 2, 1, 16),), commit="test")["rows"][0]
    flops = 14 * 16 * 2 * 10
    assert row["tflops"] == round(flops / row["both_ms"] / 1e9, 1)


def test_head_table_checks_itself_first():
    table = head.measure(96, commit="test")
    check_evidence(table, "head")
    ours = table["rows"][0]
    assert ours["who"] == "gptoss"
    assert ours["error"] < 1e-5  # fp32 on a CPU
    assert all("problem" not in row for row in table["rows"])
