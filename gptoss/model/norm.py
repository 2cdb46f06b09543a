"""RMSNorm, with the exact gradient and with the documents' detached one.

Shapes: C model width.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def rms_norm(
    x: Float[Tensor, "*batch C"],
    weight: Float[Tensor, "C"],
    eps: float = 1e-5,
    detach_statistic: bool = False,
) -> Float[Tensor, "*batch C"]:
    """Scale each vector to unit root mean square, then by a learned weight.

    y = x · r · γ with r = 1/√(mean(x²) + ε), computed in fp32 or better and returned in x's dtype.

    The gradient for g = γ ∘ ∂L/∂y is r·g − r³·x·mean(g ∘ x). With `detach_statistic` r counts as a constant and the
    second term is missing: what comes back is then not the gradient of this function.

    Args:
        x: activations.
        weight: γ, one factor a channel.
        eps: ε, keeps a zero vector finite.
        detach_statistic: leave r out of the gradient, as the source documents do.

    Source: Zhang and Sennrich (2019), equation 4; chapter 1.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    seen = wide.detach() if detach_statistic else wide
    scale = (seen.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight, which starts at one (chapter 1)."""

    def __init__(self, dim: int, eps: float = 1e-5, detach_statistic: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.detach_statistic = detach_statistic
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        return rms_norm(x, self.weight, self.eps, self.detach_statistic)

    def extra_repr(self) -> str:
        detached = ", statistic detached" if self.detach_statistic else ""
        return f"{self.weight.numel()}, eps={self.eps}{detached}"
