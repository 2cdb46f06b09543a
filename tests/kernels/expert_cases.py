"""Inputs and comparisons that the expert kernel tests share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gptoss.kernels.reference import grouped_linear_reference, grouped_swiglu_reference

RAGGED = (0, 1, 15, 17)  # rows per expert around a tile of 16, one expert idle
FLOAT32 = 2e-6  # products of up to 1560 terms in float32: about 10 rounding errors of 1.2e-7


def stacks(
    n_experts: int, width: int, ffn: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Random w1, w3 (E, F, C) and w2 (E, C, F) whose products have about unit size."""
    w1, w3 = (torch.randn(n_experts, ffn, width).to(dtype) * width**-0.5 for _ in range(2))
    return [w1, w3, torch.randn(n_experts, width, ffn).to(dtype) * ffn**-0.5]


def relative_error(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖, or ‖found‖ where the truth is zero."""
    norm = truth.detach().double().norm()
    return float(
        (found.detach().double() - truth.detach().double()).norm() / (norm if norm > 0 else 1.0)
    )


def with_gradients(
    run: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """The output of ``run(*leaves)`` and its gradients with respect to each leaf."""
    out = run(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def assert_like_oracle(
    run: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    grad: Tensor,
    tolerance: float,
) -> None:
    """Hold outputs and gradients of ``run`` against those of ``oracle`` in float64."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    found = with_gradients(run, leaves, grad)
    truth = with_gradients(oracle, exact, grad.double())
    names = ("output", *(f"gradient {i}" for i in range(len(leaves))))
    for name, a, b in zip(names, found, truth, strict=True):
        assert a.shape == b.shape, name
        assert relative_error(a, b) <= tolerance, name  # NaN fails too


def layer_oracle(
    x: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *, indices: Tensor
) -> Tensor:
    """The routed layer by definition: sort, run the oracles, unsort, weight, add."""
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=w1.shape[0])
    hidden = grouped_swiglu_reference(x[order // indices.shape[1]], counts, w1, w3)
    answers = grouped_linear_reference(hidden, counts, w2)[order.argsort()]
    return (answers.unflatten(0, indices.shape) * weights.unsqueeze(-1)).sum(1)
