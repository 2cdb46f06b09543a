"""The expert kernels compiled, on a GPU: bfloat16 against the float32 oracle, and the special cases that timing never meets."""

import pytest
import torch
from expert_cases import RAGGED, layer_oracle, relative_error, stacks, with_gradients

from gptoss.kernels.expert_layer import grouped_experts
from gptoss.kernels.expert_order import order_by_expert
from gptoss.kernels.reference import grouped_swiglu_reference
from gptoss.kernels.swiglu import grouped_swiglu

pytestmark = pytest.mark.gpu
# A bfloat16 operand is off by up to 2^-9 = 2e-3; gradients pass through two or three rounded results.
BF16 = 1e-2


def on_gpu(tensors, dtype=torch.bfloat16):
    return [t.to("cuda", dtype) for t in tensors]


@pytest.mark.parametrize("version", ["documents", "tuned", "persistent"])
@pytest.mark.parametrize("counts", [RAGGED, (0, 300, 1, 1000, 129), (700, 0, 0)])
@pytest.mark.parametrize(("width", "ffn"), [(96, 1560), (768, 1536), (30, 53)])
def test_versions_against_the_oracle(version: str, counts, width: int, ffn: int) -> None:
    rows = torch.tensor(counts, device="cuda")
    n = sum(counts)
    x, w1, w3, grad = on_gpu(
        (torch.randn(n, width), *stacks(len(counts), width, ffn)[:2], torch.randn(n, ffn))
    )
    found = with_gradients(
        lambda x, w1, w3: grouped_swiglu(x, rows, w1, w3, version),
        [t.requires_grad_() for t in (x, w1, w3)], grad,
    )  # fmt: skip
    exact = [t.detach().float().requires_grad_() for t in (x, w1, w3)]
    truth = with_gradients(
        lambda x, w1, w3: grouped_swiglu_reference(x, rows, w1, w3), exact, grad.float()
    )
    for a, b in zip(found, truth, strict=True):
        assert relative_error(a, b) < BF16
    assert (found[2][rows == 0] == 0).all()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "width", "ffn"),
    [(1000, 2, 8, 768, 1536), (37, 3, 5, 96, 1560), (1, 1, 2, 64, 64)],
)
def test_layer_against_the_oracle(tokens, k, experts, width, ffn, recompute: bool) -> None:
    indices = torch.rand(tokens, experts - 1, device="cuda").topk(k).indices
    x, grad, *stack = on_gpu(
        (torch.randn(tokens, width), torch.randn(tokens, width), *stacks(experts, width, ffn))
    )
    weights = torch.rand(tokens, k, device="cuda")
    plan = order_by_expert(indices, experts)
    leaves = [t.requires_grad_() for t in (x, weights, *stack)]
    found = with_gradients(
        lambda x, w, *s: grouped_experts(x, w, *plan, *s, recompute=recompute), leaves, grad
    )
    exact = [t.detach().float().requires_grad_() for t in leaves]
    truth = with_gradients(
        lambda x, w, *s: layer_oracle(x, w, *s, indices=indices), exact, grad.float()
    )
    for a, b in zip(found, truth, strict=True):
        assert relative_error(a, b) < BF16


def test_float32_rows_are_multiplied_in_float32() -> None:
    rows = torch.tensor(RAGGED, device="cuda")
    x, w1, w3 = on_gpu((torch.randn(33, 96), *stacks(4, 96, 128)[:2]), torch.float32)
    want = grouped_swiglu_reference(x.double(), rows, w1.double(), w3.double())
    for version in ("documents", "tuned", "persistent"):
        assert relative_error(grouped_swiglu(x, rows, w1, w3, version), want) < 2e-6  # tf32: 3e-4


def test_the_sigmoid_over_its_whole_range() -> None:
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    gate = gate.cuda().view(-1, 1).expand(-1, 8).contiguous()
    one = torch.eye(8, device="cuda")[None]
    counts = torch.tensor([gate.shape[0]], device="cuda")
    found = grouped_swiglu(gate, counts, one, one, "persistent")
    want = torch.nn.functional.silu(gate.double()) * gate.double()
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=1e-12)


def test_a_row_of_nan_stays_in_its_row_and_its_expert() -> None:
    counts = torch.tensor(RAGGED, device="cuda")
    x, w1, w3 = on_gpu((torch.randn(33, 96), *stacks(4, 96, 128)[:2]))
    x[16] = float("nan")
    leaves = [t.requires_grad_() for t in (x, w1, w3)]
    hidden = grouped_swiglu(x, counts, w1, w3)
    assert hidden.isnan().any(1).nonzero().flatten().tolist() == [16]
    dx, dw1, _ = torch.autograd.grad(hidden, leaves, torch.randn_like(hidden))
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [16]
    assert dw1.isnan().flatten(1).any(1).tolist() == [False, False, False, True]


def test_addresses_past_two_billion_elements() -> None:
    # 319 experts of 2560×3072 have 2.5e9 elements; gate and up share them.
    experts, width, ffn = 319, 2560, 3072
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    w = torch.empty(experts, ffn, width, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    counts = torch.zeros(experts, dtype=torch.int64, device="cuda")
    counts[0], counts[-1] = 3, 5
    x = torch.randn(8, width, device="cuda", dtype=torch.bfloat16)
    ends = [w[i].float() for i in (0, -1)]
    for version in ("documents", "tuned", "persistent"):
        found = grouped_swiglu(x, counts, w, w, version)
        for rows, end in ((slice(0, 3), ends[0]), (slice(3, 8), ends[1])):
            gate = x[rows].float() @ end.t()
            assert relative_error(found[rows], torch.nn.functional.silu(gate) * gate) < BF16


def test_first_call_equals_the_second_and_a_graph_s_replay() -> None:
    indices = torch.rand(500, 8, device="cuda").topk(2).indices
    x, *stack = on_gpu((torch.randn(500, 768), *stacks(8, 768, 1536)))
    weights = torch.rand(500, 2, device="cuda")
    run = lambda: grouped_experts(x, weights, *order_by_expert(indices, 8), *stack)  # noqa: E731  # called three times
    first, second = run(), run()
    assert torch.equal(first, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert torch.equal(captured, first)
