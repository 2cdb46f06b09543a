"""The chunked head: equal to F.cross_entropy on whole logits, gradients included."""

import pytest
import torch
import torch.nn.functional as F

from gptoss.model.head import linear_cross_entropy


def problem(n=10, c=6, v=13, dtype=torch.float64):
    hidden = torch.randn(n, c, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, c, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    return hidden, weight, targets


def oracle(hidden, weight, targets, reduction):
    return F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_size", [1, 4, 10, 64])
def test_equals_cross_entropy_with_gradients_whatever_the_chunk(reduction, chunk_size):
    hidden, weight, targets = problem()
    targets[[1, 8]] = -100
    expected = oracle(hidden, weight, targets, reduction)
    wanted = torch.autograd.grad(3.5 * expected, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size, reduction=reduction)
    got = torch.autograd.grad(3.5 * loss, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_two_equal_logits_by_hand():
    """z = (0, 0): loss ln 2, softmax - onehot = (-1/2, 1/2), dh = (w1 - w0)/2, dW = (-h/2, h/2)."""
    hidden = torch.tensor([[0.0, 2.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [3.0, 0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert hidden.grad.tolist() == [[1.0, 0.0]]
    assert weight.grad.tolist() == [[0.0, -1.0], [0.0, 1.0]]


def test_one_ignored_chunk_changes_nothing_else():
    hidden, weight, targets = problem()
    targets[4:8] = -100  # exactly the second chunk of four
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=4)
    loss.backward()
    torch.testing.assert_close(loss, oracle(hidden, weight, targets, "mean"))
    assert hidden.grad[4:8].abs().max() == 0
    assert hidden.grad[8:].abs().min() > 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_labels_ignored_is_zero_and_finite(reduction):
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(
        hidden, weight, torch.full_like(targets, -100), chunk_size=4, reduction=reduction
    )
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_another_ignore_index():
    hidden, weight, targets = problem()
    targets[3] = 5
    loss = linear_cross_entropy(hidden, weight, targets, ignore_index=5)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, targets, ignore_index=5))


def test_the_graph_can_be_walked_twice():
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_costs_none(frozen):
    hidden, weight, targets = problem()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=4)
    loss.backward()
    learned = weight if frozen == "hidden" else hidden
    (wanted,) = torch.autograd.grad(oracle(hidden, weight, targets, "mean"), learned)
    torch.testing.assert_close(learned.grad, wanted)


def test_without_grad_only_the_loss_is_computed():
    hidden, weight, targets = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, oracle(hidden, weight, targets, "mean").detach())


def test_autocast_multiplies_in_bf16_and_keeps_the_master_gradient_in_fp32():
    """bf16 rounds each factor to 2^-9 relative; a row's logits then err by a few times that, the gradient likewise."""
    hidden, weight, targets = problem(64, 32, 50, torch.float32)
    rounded = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(rounded, weight, targets, chunk_size=16)
    loss.backward()
    assert loss.dtype == weight.grad.dtype == torch.float32
    assert rounded.grad.dtype == torch.bfloat16
    expected = oracle(hidden, weight, targets, "mean")
    dhidden, dweight = torch.autograd.grad(expected, (hidden, weight))
    assert abs(loss.item() - expected.item()) < 2e-2 * expected.item()
    assert (rounded.grad.float() - dhidden).norm() < 2e-2 * dhidden.norm()
    assert (weight.grad - dweight).norm() < 2e-2 * dweight.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_is_summed_over_chunks_in_fp32(dtype):
    """4,096 equal rows: a bf16 running sum would stop growing at 2^8 addends; fp32 keeps them all."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(
            hidden, weight, torch.zeros(4096, dtype=torch.long), chunk_size=1, reduction="sum"
        )
    loss.backward()
    assert weight.grad.dtype == dtype
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0]


def test_compiles_without_a_graph_break():
    hidden, weight, targets = problem(dtype=torch.float32)

    def step(hidden, weight, targets):
        return linear_cross_entropy(hidden * 2, weight, targets, chunk_size=4) * 3

    expected = torch.autograd.grad(step(hidden, weight, targets), (hidden, weight))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(hidden, weight, targets), (hidden, weight))
    torch.testing.assert_close(got, expected)


def test_the_operator_keeps_its_promises_to_torch():
    """All of opcheck but the two that differentiate the gradient outputs, which is refused."""
    hidden, weight, targets = problem(dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.gptoss.linear_cross_entropy.default,
        (hidden, weight, targets, torch.ones(()), -100, 4, torch.float32, True, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_second_derivatives_are_refused():
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets)
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dhidden.sum().backward()


@pytest.mark.parametrize("label", [13, -1])
def test_a_label_outside_the_vocabulary_is_named(label):
    hidden, weight, targets = problem()
    targets[2] = label
    with pytest.raises(ValueError, match=rf"\[0, 13\).*got {label}"):
        linear_cross_entropy(hidden, weight, targets)


def test_shapes_and_options_are_checked():
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match="untransposed"):
        linear_cross_entropy(hidden, weight.T, targets)
    with pytest.raises(ValueError, match="one target per row"):
        linear_cross_entropy(hidden, weight, targets[:3])
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(hidden, weight, targets, reduction="none")
    with pytest.raises(ValueError, match="chunk_size"):
        linear_cross_entropy(hidden, weight, targets, chunk_size=0)
