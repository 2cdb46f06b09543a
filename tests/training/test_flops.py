"""The one FLOP convention, against numbers worked out by hand."""

import torch

from gptoss.config import ModelConfig
from gptoss.training.flops import bf16_peak, training_flops_per_token, visible_pairs


def test_visible_pairs_of_a_short_sequence():
    cfg = ModelConfig(n_layers=2, window_size=3)
    # T = 5, W = 3: rows see 1, 2, 3, 3, 3 keys; without a window 1 + 2 + 3 + 4 + 5.
    assert visible_pairs(cfg, 5) == [12, 15]
    assert visible_pairs(cfg, 2) == [3, 3]


def test_production_model_is_1_602_gflop_a_token():
    flops = training_flops_per_token(ModelConfig(), 247_032_672, 4096)
    full = 12 * 768 * 6 * (4096 * 4097 / 2) / 4096
    window = 12 * 768 * 6 * (128 * 129 / 2 + 3968 * 128) / 4096
    assert flops == 6 * 247_032_672 + full + window
    assert round(flops / 1e9, 3) == 1.602


def test_a_cpu_has_no_peak_to_compare_with():
    assert bf16_peak(torch.device("cpu")) is None
