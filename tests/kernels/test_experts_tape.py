"""What autograd does around the experts' operator."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="needs Triton")


class Fills(TorchDispatchMode):
    """Counts the values that are filled with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] in (
            "zeros",
            "zeros_like",
            "new_zeros",
            "fill_",
            "zero_",
        ):
            self.values = max(self.values, out.numel())
        return out


def test_no_gradient_is_made_up_for_what_only_the_backward_pass_reads() -> None:
    """gate and up leave the operator for the tape alone; zeros in their shape were an eighth of a millisecond on an H200."""
    from gptoss.kernels.expert_layer import grouped_experts
    from gptoss.model.moe.dispatch import plan_dispatch

    N, C, F, E, k = 24, 16, 32, 4, 2
    indices = torch.stack([torch.randperm(E)[:k] for _ in range(N)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = plan_dispatch(indices.to(device), E, "triton_grouped")
    leaves = [
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((N, C), (N, k), (E, F, C), (E, F, C), (E, C, F))
    ]
    x, weights, w1, w3, w2 = leaves
    out = grouped_experts(x, weights, *plan, w1, w3, w2)
    grad = torch.ones_like(out)
    with Fills() as fills:
        torch.autograd.grad(out, leaves, grad)
    assert fills.values < N * k * 2 * F
