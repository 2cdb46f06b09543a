"""chunked_cross_entropy: equal to F.cross_entropy, finite where that is not."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss.training.losses import chunked_cross_entropy


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 13), st.integers(2, 9), st.integers(1, 40), st.data())
def test_equals_cross_entropy_with_gradients(batch, tokens, vocab, chunk, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(batch, tokens, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (batch, tokens), generator=generator)
    targets[torch.rand(batch, tokens, generator=generator) < 0.3] = -100
    targets[0, 0] = 0  # at least one counts
    mine, reference = (logits.clone().requires_grad_() for _ in range(2))
    loss = chunked_cross_entropy(mine, targets, chunk)
    expected = F.cross_entropy(reference.flatten(0, 1), targets.flatten())
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-12, atol=1e-12)


def test_ten_positions_in_chunks_of_four_by_hand():
    # Two logits 0 and ln 3: the second has probability 3/4. Five targets of each kind.
    logits = torch.tensor([0.0, 1.0986122886681098]).repeat(10, 1)
    targets = torch.tensor([0, 1] * 5)
    expected = 0.5 * (1.3862943611198906 + 0.28768207245178096)  # (−ln ¼ − ln ¾) / 2
    assert chunked_cross_entropy(logits, targets, 4).item() == pytest.approx(expected, abs=1e-6)


def test_a_chunk_without_targets_does_not_dilute_the_mean():
    logits = torch.randn(8, 5, dtype=torch.float64)
    targets = torch.tensor([1, 2, 3, 4, -100, -100, -100, -100])
    torch.testing.assert_close(
        chunked_cross_entropy(logits, targets, 4), F.cross_entropy(logits[:4], targets[:4])
    )


def test_nothing_to_predict_gives_zero_and_zero_gradients():
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = chunked_cross_entropy(logits, torch.full((2, 5), -100), 4)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.randn(300, 11).bfloat16()
    targets = torch.randint(0, 11, (300,))
    loss = chunked_cross_entropy(logits, targets, 64)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets))


@pytest.mark.parametrize(
    ("shape", "chunk", "message"),
    [((3, 4), 0, "chunk_size"), ((3, 4), 4, "logits")],
)
def test_bad_arguments_are_named(shape, chunk, message):
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(torch.zeros(*shape, 6), torch.zeros(12, dtype=torch.long), chunk)
