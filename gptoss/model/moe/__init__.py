"""Mixture of experts: router, balance loss, experts, dispatch, and the layer (chapters 9 and 10)."""

from .balance import aux_load_balancing_loss
from .experts import StackedExperts, SwiGLUExpert
from .layer import MoELayer
from .load import expert_load, routed_experts
from .router import MoERouter

__all__ = [
    "MoELayer",
    "MoERouter",
    "StackedExperts",
    "SwiGLUExpert",
    "aux_load_balancing_loss",
    "expert_load",
    "routed_experts",
]
