"""The auxiliary loss that keeps the experts evenly loaded.

Shapes: N tokens, E experts, k experts a token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .router import router_probabilities, top_k


def aux_load_balancing_loss(
    logits: Float[Tensor, "N E"], n_experts: int, n_activated: int
) -> Float[Tensor, ""]:
    """E · Σ_e f_e·P_e, computed in fp32 or better.

    f_e is the share of the N·k slots that expert e received and P_e its mean router probability. The loss is 1 when
    both are uniform, and about E/k when the same k experts take every slot with all the probability. f is a count and has no
    gradient: ∂L/∂P_e = E·f_e, so probability is pushed away from the experts that are loaded.

    Args:
        logits: router logits of all experts.
        n_experts: E.
        n_activated: k.

    Returns:
        A scalar. It is not bounded below by 1: f and P may disagree (chapter 9 has an example at 0.885).

    Raises:
        ValueError: logits that do not have E columns.

    Source: Fedus et al. (2022), equations 4 to 6; chapter 9.
    """
    if logits.dim() != 2 or logits.shape[1] != n_experts:
        raise ValueError(f"logits {tuple(logits.shape)}: expected (N, {n_experts})")
    probabilities = router_probabilities(logits)
    _, indices = top_k(probabilities, n_activated)
    return balance(probabilities, count_experts(indices, n_experts))


def balance(probabilities: Float[Tensor, "N E"], counts: Int[Tensor, "E"]) -> Float[Tensor, ""]:
    """The loss from its two ingredients: probabilities with gradient, counts without."""
    share = counts.to(probabilities.dtype) / counts.sum()
    return probabilities.shape[1] * (share * probabilities.mean(dim=0)).sum()


def count_experts(indices: Int[Tensor, "N k"], n_experts: int) -> Int[Tensor, "E"]:
    """How many slots each expert received, without atomics or a host synchronisation."""
    expert = torch.arange(n_experts, device=indices.device)
    return (indices.reshape(-1, 1) == expert).sum(dim=0)
