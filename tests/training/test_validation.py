"""Validation windows, bits per byte and the unigram baseline, by hand."""

import math

import numpy as np
import pytest
import torch
from small_run import SMALL_MODEL

from gptoss.config import ModelConfig
from gptoss.data.loader import PretrainDataset
from gptoss.data.shards import ShardWriter
from gptoss.model.transformer import GPTOSS
from gptoss.training.distributed import World
from gptoss.training.run_data import FirstWindows
from gptoss.training.validation import (
    Validator,
    bits_per_byte,
    unigram_baseline,
    validate,
    validation_windows,
)

CPU = World(torch.device("cpu"))


@pytest.fixture
def dataset(tmp_path):
    with ShardWriter(tmp_path, vocab_size=4, eos_token_id=0) as writer:
        writer.write([1, 1, 1, 2] * 25)  # 75 ones, 25 twos
    return PretrainDataset(tmp_path, 8)


def test_windows_are_spread_and_always_the_same(dataset):
    windows = validation_windows(dataset, 3)  # of 12
    assert windows.shape == (3, 9)
    for row, index in zip(windows, (0, 6, 11), strict=True):
        assert row.tolist() == dataset.window(index).tolist()
    assert torch.equal(windows, validation_windows(dataset, 3))
    assert len(validation_windows(dataset, 99)) == 12


def test_unigram_loss_by_hand(dataset):
    windows = torch.tensor([[0, 1, 1, 2, 3]])
    # Counts with one added each: 1, 76, 26, 1 of 104. Targets: 1, 1, 2, 3.
    expected = -(2 * math.log(76 / 104) + math.log(26 / 104) + math.log(1 / 104)) / 4
    assert unigram_baseline(dataset, 100, windows, 4) == pytest.approx(expected)


def test_the_unigram_baseline_does_not_count_held_out_tokens(tmp_path):
    with ShardWriter(tmp_path, vocab_size=3, eos_token_id=0) as writer:
        writer.write([1] * 80 + [2] * 21)
    train = FirstWindows(tmp_path, 8, 2)  # 10 of 12 windows
    # Counts with one added each: 1, 81, 1 of 83.
    loss = unigram_baseline(train, 80, torch.tensor([[1, 1, 2]]), 3)
    assert loss == pytest.approx(-(math.log(81 / 83) + math.log(1 / 83)) / 2)
    sampled = unigram_baseline(train, 80, torch.tensor([[1, 1, 2]]), 3, max_tokens=40)
    assert sampled == pytest.approx(-(math.log(41 / 43) + math.log(1 / 43)) / 2)


def test_bits_per_byte_by_hand():
    lengths = np.array([0, 1, 4])
    # Three tokens of ln 2 nats are three bits; they stand for 1 + 4 + 4 bytes.
    assert bits_per_byte(math.log(2), torch.tensor([1, 2, 2]), lengths) == pytest.approx(3 / 9)


def test_a_model_is_validated_by_the_mean_over_all_targets():
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    windows = torch.randint(0, 64, (5, 17))
    with torch.no_grad():
        expected, _ = model(windows[:, :-1], targets=windows[:, 1:])
    for batch_size in (1, 2, 5):  # 2 leaves a smaller last batch
        assert validate(model, windows, batch_size, CPU) == pytest.approx(expected.item(), rel=1e-6)
    assert model.training


def test_without_a_tokenizer_there_are_no_bytes():
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    entry = Validator(model, torch.randint(0, 64, (2, 9)), 2, CPU, None, 4.0)(7)
    assert entry.step == 7
    assert entry.bits_per_byte is None
