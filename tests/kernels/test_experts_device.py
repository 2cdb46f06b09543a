"""The expert kernels run on the device that holds their tensors, whichever device is the current one."""

import contextlib

import pytest
import torch
from expert_cases import RAGGED, layer_oracle, relative_error, stacks, with_gradients

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime.jit import KernelInterface

from gptoss.kernels.expert_layer import grouped_experts
from gptoss.kernels.expert_order import order_by_expert
from gptoss.kernels.reference import grouped_swiglu_reference
from gptoss.kernels.swiglu import grouped_swiglu

COUNTS, ROWS = torch.tensor(RAGGED), sum(RAGGED)
ANOTHER_GPU = (
    1e-5  # float32; the GPU's exp and division are a few roundings less exact than the CPU's
)
INDICES = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3], [1, 3]])


def layer_inputs(device: str = "cpu") -> list[torch.Tensor]:
    tensors = (torch.randn(5, 32), torch.rand(5, 2), *stacks(4, 32, 40))
    return [t.to(device).requires_grad_() for t in tensors]


def half_inputs(device: str = "cpu") -> list[torch.Tensor]:
    tensors = (torch.randn(ROWS, 32), *stacks(4, 32, 64)[:2])
    return [t.to(device).requires_grad_() for t in tensors]


class Guards:
    """Stands for torch.cuda.device_of: which tensors' devices were entered, and the launches outside of all of them."""

    def __init__(self) -> None:
        self.entered: list[torch.Tensor] = []
        self.depth = self.launches = 0
        self.unguarded: list[str] = []

    @contextlib.contextmanager
    def device_of(self, tensor: torch.Tensor):
        self.entered.append(tensor)
        self.depth += 1
        yield
        self.depth -= 1

    def launch(self, kernel, grid):
        self.launches += 1
        if not self.depth:
            self.unguarded.append(kernel.fn.__name__)
        return lambda *args, **options: kernel.run(*args, grid=grid, warmup=False, **options)


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Guards:
    guards = Guards()
    monkeypatch.setattr(torch.cuda, "device_of", guards.device_of)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: guards.launch(kernel, grid))  # fmt: skip
    return guards


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
def test_ordering_launches_on_its_indices_device(guards: Guards) -> None:
    order_by_expert(INDICES, 4)
    assert guards.launches == 2
    assert guards.unguarded == []
    assert guards.entered[0].data_ptr() == INDICES.data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("recompute", [False, True])
def test_layer_launches_on_its_rows_device_both_ways(guards: Guards, recompute: bool) -> None:
    x, *others = layer_inputs()
    plan = order_by_expert(INDICES, 4)
    guards.entered.clear()
    grouped_experts(x, *others[:1], *plan, *others[1:], recompute=recompute).sum().backward()
    assert guards.unguarded == []
    assert [t.data_ptr() for t in guards.entered] == [x.data_ptr()] * 2  # forward and backward


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")
@pytest.mark.parametrize("version", ["documents", "tuned", "persistent"])
def test_gated_half_launches_on_its_rows_device_both_ways(guards: Guards, version: str) -> None:
    x, w1, w3 = half_inputs()
    grouped_swiglu(x, COUNTS, w1, w3, version).sum().backward()
    assert guards.unguarded == []
    ways = (
        1 if version == "documents" else 2
    )  # its backward pass is PyTorch's own, without a launch
    assert [t.data_ptr() for t in guards.entered] == [x.data_ptr()] * ways


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layer_on_the_second_gpu_while_the_first_is_current() -> None:
    leaves, indices, grad = layer_inputs("cuda:1"), INDICES.to("cuda:1"), torch.randn(5, 32)
    with torch.cuda.device(0):
        plan = order_by_expert(indices, 4)
        found = with_gradients(
            lambda x, weights, *stack: grouped_experts(x, weights, *plan, *stack),
            leaves, grad.to("cuda:1"),
        )  # fmt: skip
        assert torch.cuda.current_device() == 0
    truth = with_gradients(
        lambda *a: layer_oracle(*a, indices=INDICES),
        [t.detach().cpu().double().requires_grad_() for t in leaves], grad.double(),
    )  # fmt: skip
    for a, b in zip(found, truth, strict=True):
        assert relative_error(a.cpu(), b) <= ANOTHER_GPU


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("version", ["documents", "tuned", "persistent"])
def test_gated_half_on_the_second_gpu_while_the_first_is_current(version: str) -> None:
    leaves, counts, grad = half_inputs("cuda:1"), COUNTS.to("cuda:1"), torch.randn(ROWS, 64)
    with torch.cuda.device(0):
        found = with_gradients(
            lambda x, w1, w3: grouped_swiglu(x, counts, w1, w3, version), leaves, grad.to("cuda:1")
        )
    truth = with_gradients(
        lambda x, w1, w3: grouped_swiglu_reference(x, COUNTS, w1, w3),
        [t.detach().cpu().double().requires_grad_() for t in leaves], grad.double(),
    )  # fmt: skip
    for a, b in zip(found, truth, strict=True):
        assert relative_error(a.cpu(), b) <= ANOTHER_GPU
