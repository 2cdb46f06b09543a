"""The routed layer as one operator in the interpreter: outputs and every gradient against the oracle in float64."""

from functools import partial

import pytest
import torch
from expert_cases import FLOAT32, assert_like_oracle, layer_oracle, stacks
from torch.utils.checkpoint import checkpoint

from gptoss.kernels.expert_layer import grouped_experts
from gptoss.kernels.expert_order import order_by_expert


@pytest.fixture(autouse=True)
def nan_where_nothing_was_written():
    """torch.empty comes filled with NaN, so an element that a kernel left out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def route(tokens: int, k: int, experts: int) -> torch.Tensor:
    """(N, k) distinct experts a token; the last expert idles."""
    return torch.rand(tokens, experts - 1).topk(k).indices


def layer(indices: torch.Tensor, n_experts: int, recompute: bool = False):
    plan = order_by_expert(indices, n_experts)
    return lambda x, weights, w1, w3, w2: grouped_experts(
        x, weights, *plan, w1, w3, w2, recompute=recompute
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "width", "ffn"),
    [(37, 2, 5, 96, 72), (9, 3, 4, 30, 53), (1, 1, 2, 32, 32)],
)
def test_layer_equals_the_oracle(tokens, k, experts, width, ffn, recompute: bool) -> None:
    indices = route(tokens, k, experts)
    tensors = (torch.randn(tokens, width), torch.rand(tokens, k), *stacks(experts, width, ffn))
    assert_like_oracle(
        layer(indices, experts, recompute),
        partial(layer_oracle, indices=indices),
        tensors,
        torch.randn(tokens, width),
        FLOAT32,
    )


def test_rows_that_end_one_before_on_and_one_after_a_tile() -> None:
    # Runs of 0, 1, 15, 17 and 31 rows: one choice a token, so the counts are these.
    indices = torch.tensor([1] + [2] * 15 + [3] * 17 + [4] * 31)[torch.randperm(64), None]
    tensors = (torch.randn(64, 32), torch.rand(64, 1), *stacks(5, 32, 64))
    assert_like_oracle(
        layer(indices, 5), partial(layer_oracle, indices=indices), tensors, torch.randn(64, 32), FLOAT32
    )  # fmt: skip


def test_views_and_broadcast_gradients() -> None:
    indices = route(12, 2, 4)
    w1, w3, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in stacks(4, 32, 40))
    x, weights = torch.randn(12, 64)[:, ::2], torch.rand(2, 12).t()
    run, oracle = layer(indices, 4), partial(layer_oracle, indices=indices)
    for grad in (torch.ones(()).expand(12, 32), torch.randn(32, 12).t()):
        assert_like_oracle(run, oracle, (x, weights, w1, w3, w2), grad, FLOAT32)


def test_a_token_of_nan_spoils_its_own_output_and_its_experts_gradients_alone() -> None:
    indices = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3]])
    x = torch.randn(4, 32)
    x[0] = float("nan")
    leaves = [t.requires_grad_() for t in (x, torch.rand(4, 2), *stacks(5, 32, 40))]
    out = layer(indices, 5)(*leaves)
    assert out.isnan().any(1).tolist() == [True, False, False, False]
    dx, dweights, *dws = torch.autograd.grad(out, leaves, torch.randn(4, 32))
    assert dx.isnan().any(1).tolist() == [True, False, False, False]
    assert dweights.isnan().any(1).tolist() == [True, False, False, False]
    for dw in dws:
        assert dw.isnan().flatten(1).any(1).tolist() == [True, True, False, False, False]
        assert (dw[4] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_routing_weights_keep_their_dtype(dtype: torch.dtype) -> None:
    indices = route(6, 2, 3)
    weights = torch.rand(6, 2, dtype=dtype, requires_grad=True)
    layer(indices, 3)(torch.randn(6, 16), weights, *stacks(3, 16, 32)).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == dtype


def test_same_inputs_give_the_same_bits() -> None:
    indices = route(20, 2, 4)
    leaves = [t.requires_grad_() for t in (torch.randn(20, 32), torch.rand(20, 2), *stacks(4, 32, 40))]  # fmt: skip
    calls = []
    for _ in range(2):
        out = layer(indices, 4)(*leaves)
        calls.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for first, second in zip(*calls, strict=True):
        assert torch.equal(first, second)


def test_recomputing_keeps_no_gate_and_up() -> None:
    indices = route(20, 2, 4)
    kept = {}
    for recompute in (False, True):
        tensors = (torch.randn(20, 32), torch.rand(20, 2), *stacks(4, 32, 40))
        out = layer(indices, 4, recompute)(*(t.requires_grad_() for t in tensors))
        kept[recompute] = sum(t.numel() for t in out.grad_fn.saved_tensors if t.shape == (40, 80))
    assert kept == {False: 40 * 80, True: 0}


def test_under_activation_checkpointing() -> None:
    indices = route(20, 2, 4)
    leaves = [t.requires_grad_() for t in (torch.randn(20, 32), torch.rand(20, 2), *stacks(4, 32, 40))]  # fmt: skip
    grad = torch.randn(20, 32)
    plain = torch.autograd.grad(layer(indices, 4)(*leaves), leaves, grad)
    again = torch.autograd.grad(
        checkpoint(layer(indices, 4), *leaves, use_reentrant=False), leaves, grad
    )
    for first, second in zip(plain, again, strict=True):
        assert torch.equal(first, second)


def test_compiles_whole_with_its_plan_and_recompiles_rarely() -> None:
    graphs = 0

    def counting(graph, _inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    stack = stacks(4, 16, 32)

    @torch.compile(fullgraph=True, backend=counting)
    def run(x, weights, indices):
        return grouped_experts(x, weights, *order_by_expert(indices, 4), *stack)

    for tokens in (20, 21, 22, 23, 24):
        indices = route(tokens, 2, 4) if tokens % 2 else torch.zeros(tokens, 2, dtype=torch.int64)
        x, weights = torch.randn(tokens, 16), torch.rand(tokens, 2)
        want = layer_oracle(x, weights, *stack, indices=indices)
        torch.testing.assert_close(run(x, weights, indices), want)
    assert graphs <= 2  # one for the first length, one for every length


def test_compiled_gradients_equal_eager() -> None:
    indices = route(20, 2, 4)
    run = layer(indices, 4)
    leaves = [t.requires_grad_() for t in (torch.randn(20, 32), torch.rand(20, 2), *stacks(4, 32, 40))]  # fmt: skip
    grad = torch.randn(20, 32)
    eager = torch.autograd.grad(run(*leaves), leaves, grad)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves, grad), eager)


@pytest.mark.parametrize(
    ("position", "wrong", "word"),
    [
        (1, torch.rand(7, 2), "routing weights"),
        (2, torch.zeros(7), "integer order"),
        (7, torch.randn(4, 40, 32), "transpose it"),
    ],
)
def test_arguments_that_do_not_fit_are_named(position: int, wrong, word: str) -> None:
    indices = route(6, 2, 4)
    args = [torch.randn(6, 32), torch.rand(6, 2), *order_by_expert(indices, 4), *stacks(4, 32, 40)]
    args[position] = wrong
    with pytest.raises(ValueError, match=word):
        grouped_experts(*args)
