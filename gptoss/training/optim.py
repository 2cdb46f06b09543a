"""AdamW: which parameters decay, and an update that the device itself may refuse (chapter 12)."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trained parameters into those that weight decay pulls on and those that it leaves alone.

    Matrices and stacks of matrices decay. Vectors (norms, biases, sinks) do not: they scale or shift, and a pull to 0
    would change what they mean. An embedding does not either, and since the tied head is the same tensor, neither does
    the head: a tensor belongs to the second group because an `nn.Embedding` holds it, whatever name it is found under.

    Returns:
        (decay, no decay), each in the model's own order and each tensor once. The production model: 403,513,344 and
        98,323,296 elements.

    Source: Loshchilov & Hutter 2019 (AdamW); chapter 12 of this book.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decay if is_matrix else plain).append(parameter)
    return decay, plain


def build_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-6,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """AdamW over the two decay groups, in PyTorch's fused kernel (CUDA and CPU alike).

    `fused=True` alone: together with `foreach=True`, which the source documents ask for, AdamW raises RuntimeError. The
    fused kernel reads the rate, a gradient scale and a verdict from device tensors, which `update` uses.

    Raises:
        ValueError: a model without trainable parameters.
    """
    decay, plain = decay_groups(model)
    groups = [
        {"params": parameters, "weight_decay": amount}
        for parameters, amount in ((decay, weight_decay), (plain, 0.0))
        if parameters
    ]
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient")
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
    """The 2-norm of all gradients together, on the device, over all shards where they are sharded."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def update(
    optimizer: torch.optim.Optimizer,
    rate: Float[Tensor, ""],
    norm: Float[Tensor, ""],
    clip: float,
    taken: Bool[Tensor, ""],
) -> None:
    """One clipped AdamW update that happens if and only if `taken` is true, decided on the device.

        g ← g / max(1, ‖g‖/c),   θ ← AdamW(θ, g, rate)   if taken; nothing at all otherwise

    Neither weights nor moments nor Adam's own step count move when `taken` is false, and the host never has to wait to
    learn which it was. The fused kernel's inputs are those that `torch.amp.GradScaler` gives it; the rate stands in the
    groups for this one call, so that the optimiser's saved state stays plain numbers.

    Args:
        optimizer: from `build_optimizer`.
        rate: the learning rate, a device scalar.
        norm: ‖g‖ over all parameters, a device scalar.
        clip: c, the largest norm left as it is.
        taken: a device boolean.
    """
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.grad_scale = (norm / clip).clamp(min=1.0).float()  # type: ignore[attr-defined]  # GradScaler's protocol
    optimizer.found_inf = (~taken).float()  # type: ignore[attr-defined]  # likewise
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]  # likewise
        for group, lr in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = lr
