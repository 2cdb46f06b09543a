"""Version 1 and the oracles: the loop over experts, its hand-written gradients, its behaviour under compile."""

import math

import pytest
import torch
from expert_cases import RAGGED, assert_like_oracle, stacks
from torch.nn import functional as F

from gptoss.kernels.loop import grouped_linear_loop, grouped_swiglu_loop
from gptoss.kernels.reference import grouped_linear_reference, grouped_swiglu_reference

COUNTS = torch.tensor(RAGGED)
ROWS = int(COUNTS.sum())


def half(run, counts=COUNTS):
    return lambda x, w1, w3: run(x, counts, w1, w3)


def test_one_number_by_hand() -> None:
    # gate 1, up 3: silu(1)·3 = 3/(1 + e⁻¹)
    x = torch.tensor([[1.0]])
    w1, w3 = torch.tensor([[[1.0]]]), torch.tensor([[[3.0]]])
    for run in (grouped_swiglu_reference, grouped_swiglu_loop):
        assert run(x, torch.tensor([1]), w1, w3).item() == pytest.approx(3 / (1 + math.exp(-1)))


def test_each_row_meets_its_own_expert() -> None:
    x = torch.ones(3, 1)
    w2 = torch.tensor([10.0, 20.0, 30.0]).view(3, 1, 1)
    counts = torch.tensor([1, 0, 2])
    for run in (grouped_linear_reference, grouped_linear_loop):
        assert run(x, counts, w2).flatten().tolist() == [10, 30, 30]


def test_loop_equals_the_oracle_in_float64_with_gradients() -> None:
    w1, w3, w2 = stacks(4, 24, 40, torch.float64)
    x, h = torch.randn(ROWS, 24).double(), torch.randn(ROWS, 40).double()
    grad = torch.randn(ROWS, 40).double()
    tolerance = 1e-14  # both in float64, sums in another order
    assert_like_oracle(half(grouped_swiglu_loop), half(grouped_swiglu_reference), (x, w1, w3), grad, tolerance)  # fmt: skip
    assert_like_oracle(
        lambda h, w2: grouped_linear_loop(h, COUNTS, w2),
        lambda h, w2: grouped_linear_reference(h, COUNTS, w2),
        (h, w2),
        torch.randn(ROWS, 24).double(),
        tolerance,
    )


def test_gradcheck_of_the_hand_written_backward() -> None:
    counts = torch.tensor([2, 0, 1])
    w1, w3, w2 = (t.requires_grad_() for t in stacks(3, 4, 6, torch.float64))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    run = lambda x, w1, w3, w2: grouped_linear_loop(  # noqa: E731  # gradcheck wants one function
        grouped_swiglu_loop(x, counts, w1, w3), counts, w2
    )
    assert torch.autograd.gradcheck(run, (x, w1, w3, w2))


def test_an_idle_expert_gets_zeros_and_not_none() -> None:
    w1, w3, w2 = (t.requires_grad_() for t in stacks(4, 8, 8))
    x = torch.randn(ROWS, 8)
    grouped_linear_loop(grouped_swiglu_loop(x, COUNTS, w1, w3), COUNTS, w2).sum().backward()
    for w in (w1, w3, w2):
        assert w.grad is not None
        assert (w.grad[0] == 0).all()
        assert (w.grad[1:] != 0).any()


def test_a_row_of_nan_stays_a_row_of_nan() -> None:
    w1, w3, _ = stacks(4, 8, 8)
    x = torch.randn(ROWS, 8)
    x[5] = float("nan")
    x.requires_grad_()
    hidden = grouped_swiglu_loop(x, COUNTS, w1, w3)
    assert hidden.isnan().any(1).nonzero().flatten().tolist() == [5]
    (dx,) = torch.autograd.grad(hidden.sum(), x)
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [5]


def test_views_and_broadcast_gradients() -> None:
    w1, w3, _ = stacks(4, 16, 24, torch.float64)
    x = torch.randn(ROWS, 32).double()[:, ::2]
    w1, w3 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w3))
    assert not w1.is_contiguous()
    for grad in (torch.ones(1, 1).double().expand(ROWS, 24), torch.randn(24, ROWS).double().t()):
        assert_like_oracle(
            half(grouped_swiglu_loop), half(grouped_swiglu_reference), (x, w1, w3), grad, 1e-14
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_rows_and_weights_together(dtype: torch.dtype) -> None:
    w1, w3, w2 = (t.requires_grad_() for t in stacks(4, 16, 24))
    x = torch.randn(ROWS, 16)
    with torch.autocast("cpu", dtype=dtype):
        y = grouped_linear_loop(grouped_swiglu_loop(x, COUNTS, w1, w3), COUNTS, w2)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert w1.grad is not None
    assert w1.grad.dtype == torch.float32


def test_compiles_whole_and_recompiles_rarely() -> None:
    graphs = 0

    def counting(graph, _inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    w1, w3, w2 = stacks(4, 8, 8)

    @torch.compile(fullgraph=True, backend=counting)
    def run(x, counts):
        return grouped_linear_loop(grouped_swiglu_loop(x, counts, w1, w3), counts, w2)

    for rows in range(100, 131):
        counts = torch.tensor([0, rows - 40, 40, 0] if rows % 2 else [10, rows - 40, 20, 10])
        x = torch.randn(rows, 8)
        hidden = grouped_swiglu_reference(x, counts, w1, w3)
        torch.testing.assert_close(run(x, counts), grouped_linear_reference(hidden, counts, w2))
    assert graphs <= 2  # one for the first length, one for every length


def test_compiled_gradients_equal_eager() -> None:
    tensors = (torch.randn(ROWS, 8), *stacks(4, 8, 8))
    run = lambda x, w1, w3, w2: grouped_linear_loop(  # noqa: E731  # compiled below, called plainly too
        grouped_swiglu_loop(x, COUNTS, w1, w3), COUNTS, w2
    )
    leaves = [t.requires_grad_() for t in tensors]
    grad = torch.randn(ROWS, 8)
    eager = torch.autograd.grad(run(*leaves), leaves, grad)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves, grad), eager)


@pytest.mark.parametrize(
    ("counts", "shape", "word"),
    [
        (torch.tensor([1, 1, 1, 1]), (33, 8), "sum to the number of rows"),
        (torch.tensor([0.0, 1, 15, 17]), (33, 8), "integer counts"),
        (torch.tensor([33]), (33, 8), "integer counts"),
        (COUNTS, (33, 9), "expected x"),
        (COUNTS, (33, 1, 8), "expected x"),
    ],
)
def test_arguments_that_do_not_fit_are_named(counts, shape, word) -> None:
    w1, w3, _ = stacks(4, 8, 8)
    with pytest.raises(ValueError, match=word):
        grouped_swiglu_loop(torch.randn(shape), counts, w1, w3)


def test_mixed_dtypes_are_refused() -> None:
    w1, w3, _ = stacks(4, 8, 8)
    with pytest.raises(ValueError, match="one floating dtype"):
        grouped_swiglu_loop(torch.randn(ROWS, 8).double(), COUNTS, w1, w3)


def test_silu_is_pytorch_s() -> None:
    x = torch.linspace(-20, 20, 41).view(-1, 1)
    one = torch.ones(1, 1, 1)
    counts = torch.tensor([41])
    torch.testing.assert_close(grouped_swiglu_loop(x, counts, one, one), F.silu(x) * x)
