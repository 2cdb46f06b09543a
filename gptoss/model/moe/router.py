"""The router: which experts a token goes to, and how their answers are weighed.

Shapes: N tokens, C model width, E experts, k experts a token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHT_SUM_MIN = 1e-6


def top_k(scores: Float[Tensor, "N E"], k: int) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """The k largest scores of each row and where they are, largest first.

    Equal scores go to the lower index, on every device and every time: a recomputed forward routes as the first did.
    `torch.topk` does not promise that. A row with NaN keeps valid indices.

    Args:
        scores: one score an expert.
        k: how many to keep, at most E.
    """
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k]


def router_probabilities(logits: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """Softmax over all experts, in fp32 or better whatever the logits' dtype (chapter 9)."""
    return torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def renormalised_weights(top_probabilities: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
    """Divide the kept probabilities by their sum, which is taken as at least 1e-6.

    This equals a softmax over the k selected logits alone.

    Source: Shazeer et al. (2017), section 2.1; chapter 9.
    """
    return top_probabilities / top_probabilities.sum(-1, keepdim=True).clamp_min(WEIGHT_SUM_MIN)


class MoERouter(nn.Module):
    """A linear layer that scores the experts, a softmax over all of them, and the top k renormalised.

    Source: Fedus et al. (2022), section 2.1; Jiang et al. (2024), section 2.1; chapter 9.
    """

    def __init__(self, d_model: int, n_experts: int, n_activated: int) -> None:
        super().__init__()
        if not 0 < n_activated <= n_experts:
            raise ValueError(
                f"n_activated = {n_activated}: expected 1 to n_experts = {n_experts} experts a token"
            )
        self.n_activated = n_activated
        self.weight = nn.Parameter(torch.empty(n_experts, d_model))
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self, x: Float[Tensor, "N C"]
    ) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"], Float[Tensor, "N E"]]:
        """Choose experts for each token.

        Args:
            x: normalised activations, one row a token.

        Returns:
            Expert indices (largest weight first), their weights in fp32 or better, summing to 1, and the logits of all
            experts in the activation dtype.
        """
        logits = F.linear(x, self.weight)
        top, indices = top_k(router_probabilities(logits), self.n_activated)
        return indices, renormalised_weights(top), logits

    def extra_repr(self) -> str:
        n_experts, d_model = self.weight.shape
        return f"{d_model} -> top {self.n_activated} of {n_experts}"
