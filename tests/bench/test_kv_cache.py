"""The KV-cache table: the documents' headline, by formula and by allocation."""

import pytest
import torch

from gptoss.bench.kv_cache import LENGTHS, reaches_target, run
from gptoss.config import ModelConfig


def test_the_headline_of_the_production_model():
    rows = {row["length"]: row for row in run()}
    assert tuple(rows) == LENGTHS
    # 1536 bytes a token and layer, 12 layers; the mixed cache has 6 of them and 6 · 128 more positions
    assert rows[4096]["full_bytes"] == 4096 * 12 * 1536
    assert rows[4096]["mixed_bytes"] == (4096 * 6 + 128 * 6) * 1536
    assert f"{rows[4096]['ratio']:.2f}" == "1.94"
    assert f"{rows[131_072]['ratio']:.2f}" == "2.00"
    assert rows[131_072]["full_bytes"] / 2**30 == 2.25
    assert f"{rows[131_072]['mixed_bytes'] / 2**30:.2f}" == "1.13"


def test_allocated_bytes_are_the_computed_ones():
    for row in run([100, 4096], batch_size=3, dtype=torch.float32):
        assert row["full_allocated_bytes"] == row["full_bytes"]
        assert row["mixed_allocated_bytes"] == row["mixed_bytes"]
        assert row["allocated_ratio"] == row["ratio"]


def test_short_sequences_save_nothing_and_miss_the_target():
    (row,) = run([128], allocate=False)
    assert row["ratio"] == 1.0
    assert "allocated_ratio" not in row
    assert not reaches_target([row])
    assert reaches_target(run(allocate=False))


def test_an_odd_number_of_layers_counts_its_windowed_ones():
    cfg = ModelConfig(n_layers=3, yarn_prune_rope_global=False)
    (row,) = run([1000], cfg, allocate=False)
    assert row["mixed_bytes"] == (1000 + 2 * 128) * 1536
    with pytest.raises(ValueError, match="length must be positive"):
        run([0])


@pytest.mark.gpu
def test_the_device_reports_the_same_bytes():
    for row in run([4096, 131_072], device="cuda"):
        for kind in ("full", "mixed"):
            # one buffer a layer for keys and one for values, each rounded up to 512 bytes
            assert 0 <= row[f"{kind}_device_bytes"] - row[f"{kind}_bytes"] <= 24 * 512
