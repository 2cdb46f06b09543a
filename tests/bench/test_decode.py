"""The decoding table: bytes counted by hand, rows compared with the right baseline, a CPU said to be one."""

import dataclasses

import pytest
import torch

from gptoss.bench import decode
from gptoss.config import ModelConfig


@pytest.mark.parametrize(
    ("n_keys", "cached"),
    [
        (100, 12 * 100 * 1536),  # 1,536 = 2 · 4 heads · 96 · 2 bytes a token and layer
        (128, 12 * 128 * 1536),
        (4096.5, 6 * 128 * 1536 + 6 * 4096.5 * 1536),
        (131_072, 6 * 128 * 1536 + 6 * 131_072 * 1536),
    ],
)
def test_a_step_reads_the_active_weights_and_the_cache(n_keys, cached):
    assert decode.step_bytes(ModelConfig(), n_keys) == 2 * 247_032_672 + cached


def test_an_untied_embedding_is_one_row():
    untied = dataclasses.replace(ModelConfig(), weight_tying=False)
    assert decode.step_bytes(untied, 1) - decode.step_bytes(ModelConfig(), 1) == 2 * 768
    assert decode.step_bytes(untied, 1, 4) == 2 * decode.step_bytes(untied, 1)


def test_each_row_is_held_against_transformers_at_its_own_context():
    rows = [
        {"who": "gptoss decoder", "context": 100, "tokens_per_s": 3000.0, "prefill_ms": 5.0},
        {"who": "gptoss eager", "context": 100, "tokens_per_s": 60.0},
        {"who": "gptoss decoder", "context": 4096, "tokens_per_s": 2000.0},
        {"who": "gptoss prefill", "context": 9000, "prefill_ms": 400.0},
        {"who": "transformers GptOss, static", "context": 100, "tokens_per_s": 300.0},
        {"who": "transformers GptOss, flex", "context": 9000, "tokens_per_s": 30.0, "prefill_ms": 1000.0},
    ]  # fmt: skip
    decode._compare(rows)
    assert [row.get("against") for row in rows] == [10.0, 0.2, None, None, None, None]
    assert [row.get("prefill_against") for row in rows] == [None, None, None, 2.5, None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_small_sizes_run_and_the_table_says_so():
    evidence = decode.measure((3, 9), command="test", commit="abc1234")
    assert [(row["who"], row["context"]) for row in evidence["rows"]] == [
        ("gptoss eager", 3),
        ("gptoss eager", 9),
    ]
    assert all(row["tokens_per_s"] > 0 and row["prefill_ms"] > 0 for row in evidence["rows"])
    assert "no GPU here" in evidence["notes"][0]


def test_what_fails_is_a_row_with_its_reason(capsys):
    def fails(argument):
        raise RuntimeError(f"no\n room for {argument}")

    row = decode._attempt("us", 5, fails, "keys")
    assert row == {"who": "us", "context": 5, "error": "no room for keys"}
    assert "no room for keys" in capsys.readouterr().out
