"""SwiGLU experts: one alone, and E of them as stacked matrices.

Shapes: N tokens, C model width, F ffn width, E experts.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLUExpert(nn.Module):
    """One gated feed-forward network: W2·(silu(W1 x) ⊙ W3 x), without biases.

    Source: Shazeer (2020), equation 6; chapter 9.
    """

    def __init__(self, d_model: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, ffn_dim, bias=False)
        self.w3 = nn.Linear(d_model, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, d_model, bias=False)

    def forward(self, x: Float[Tensor, "*batch C"]) -> Float[Tensor, "*batch C"]:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class StackedExperts(nn.Module):
    """The weights of E routed experts, one matrix of each kind a slice: what the grouped kernels read.

    Expert e computes what a `SwiGLUExpert` with w1[e], w3[e] and w2[e] would (chapter 9).
    """

    def __init__(self, n_experts: int, d_model: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, ffn_dim, d_model))
        self.w3 = nn.Parameter(torch.empty(n_experts, ffn_dim, d_model))
        self.w2 = nn.Parameter(torch.empty(n_experts, d_model, ffn_dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def extra_repr(self) -> str:
        n_experts, ffn_dim, d_model = self.w1.shape
        return f"{n_experts} x ({d_model} -> {ffn_dim} -> {d_model})"
