"""The cross-entropy kernel, interpreted in fp32, against the reference beside it and F.cross_entropy in float64.

Tolerance: fp32 sums of some hundred positive terms: 1e-6 relative on losses of a few nats and on probabilities.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from gptoss.kernels.cross_entropy import (
    cross_entropy_forward_backward_,
    cross_entropy_forward_backward_reference_,
)
from gptoss.kernels.cross_entropy_kernel import launch_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize(
    "compute", [cross_entropy_forward_backward_, cross_entropy_forward_backward_reference_]
)


def oracle(logits, targets):
    z = logits.double().requires_grad_()
    losses = F.cross_entropy(z, targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    return losses.detach(), gradient


@BOTH
@pytest.mark.parametrize("V", [1, 2, 17, 300])
def test_losses_and_gradients_equal_the_oracle(compute, V):
    logits = 3 * torch.randn(5, V, device=DEVICE)
    targets = torch.randint(0, V, (5,), device=DEVICE)
    targets[1] = -100
    losses, gradient = oracle(logits, targets)
    got = compute(logits, targets, 0.25)
    torch.testing.assert_close(got.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), 0.25 * gradient, rtol=1e-6, atol=1e-7)


@BOTH
def test_two_equal_logits_by_hand(compute):
    """z = (4, 4), label 1: loss ln 2; softmax - onehot = (1/2, -1/2), doubled by the scale."""
    logits = torch.full((1, 2), 4.0, device=DEVICE)
    losses = compute(logits, torch.tensor([1], device=DEVICE), torch.tensor(2.0, device=DEVICE))
    assert losses.item() == pytest.approx(0.693147, abs=1e-6)
    assert logits[0].tolist() == pytest.approx([1.0, -1.0], abs=1e-6)


@pytest.mark.parametrize("V", [64, 65, 100])
def test_rows_longer_than_one_block(V):
    """Maximum in the first, a middle and the last block of 16: the running sum is rescaled rightly each time."""
    logits = torch.randn(3, V, device=DEVICE)
    logits[0, 1], logits[1, V // 2], logits[2, V - 1] = 30.0, 30.0, 30.0
    targets = torch.tensor([0, V - 1, V - 1], device=DEVICE)
    losses, gradient = oracle(logits, targets)
    scale = torch.ones((), device=DEVICE)
    got = launch_cross_entropy(logits, targets, scale, -100, True, block=16, warps=1)
    # a log-sum-exp of 30 is known to one unit in its last place, 2e-6, and the gradient relatively as well
    torch.testing.assert_close(got.double(), losses, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(logits.double(), gradient, rtol=4e-6, atol=1e-7)


@BOTH
def test_without_gradient_the_logits_stay(compute):
    logits = torch.randn(3, 20, device=DEVICE)
    before = logits.clone()
    losses = compute(logits, torch.tensor([0, 5, 19], device=DEVICE), write_gradient=False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(
        losses, F.cross_entropy(before, torch.tensor([0, 5, 19], device=DEVICE), reduction="none")
    )


@BOTH
def test_an_ignored_row_is_zero_even_when_its_logits_are_not_numbers(compute):
    logits = torch.randn(2, 20, device=DEVICE)
    logits[1] = torch.nan
    losses = compute(logits, torch.tensor([3, -100], device=DEVICE))
    assert losses[1] == 0
    assert logits[1].abs().max() == 0
    assert losses[0] > 0


@BOTH
def test_impossible_tokens_have_no_gradient(compute):
    """Logits of -inf (a masked vocabulary) are probability 0."""
    logits = torch.randn(1, 40, device=DEVICE)
    logits[0, 20:] = -torch.inf
    losses = compute(logits, torch.tensor([3], device=DEVICE))
    assert losses.isfinite().all()
    assert logits[0, 20:].abs().max() == 0


def test_rows_of_a_wider_buffer_leave_the_rest_alone():
    buffer = torch.full((4, 50), torch.nan, device=DEVICE)
    logits = buffer[1:3, :33]
    logits.copy_(torch.randn(2, 33))
    cross_entropy_forward_backward_(logits, torch.tensor([0, 32], device=DEVICE))
    assert logits.isfinite().all()
    assert buffer[:, 33:].isnan().all()
    assert buffer[[0, 3]].isnan().all()


@pytest.mark.parametrize("label", [20, -1])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(label):
    logits = torch.randn(2, 20, device=DEVICE)
    losses = cross_entropy_forward_backward_(logits, torch.tensor([label, 1], device=DEVICE))
    assert losses[0].isnan()
    assert losses[1].isfinite()


def test_bad_arguments_are_named():
    logits, targets = (
        torch.randn(4, 8, device=DEVICE),
        torch.zeros(4, dtype=torch.long, device=DEVICE),
    )
    with pytest.raises(ValueError, match="flatten"):
        cross_entropy_forward_backward_(logits, targets[:3])
    with pytest.raises(ValueError, match="float64"):
        cross_entropy_forward_backward_(logits.double(), targets)
    with pytest.raises(ValueError, match="contiguous rows"):
        cross_entropy_forward_backward_(torch.randn(8, 4, device=DEVICE).T, targets)
