"""The mixture-of-experts layer: route, dispatch, combine, and add the shared expert.

Shapes: B batch, T tokens, N = B·T, C model width, E experts.
"""

from jaxtyping import Float
from torch import Tensor, nn

from gptoss.config import ModelConfig

from .balance import balance
from .dispatch import plan_dispatch, run_experts
from .experts import StackedExperts, SwiGLUExpert
from .router import MoERouter, router_probabilities


class MoELayer(nn.Module):
    """y = Σ_{e in top k} weight_e·expert_e(x) + shared(x), with the load-balancing loss beside it.

    The shared experts run on every token and are added unweighted.

    Source: Dai et al. (2024) for the shared expert; chapter 9.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_experts = cfg.n_routed_experts
        self.n_activated = cfg.n_activated_experts
        self.dispatch = cfg.moe_dispatch
        self.router = MoERouter(cfg.d_model, cfg.n_routed_experts, cfg.n_activated_experts)
        self.experts = StackedExperts(cfg.n_routed_experts, cfg.d_model, cfg.ffn_dim)
        self.shared = nn.ModuleList(
            SwiGLUExpert(cfg.d_model, cfg.ffn_dim) for _ in range(cfg.n_shared_experts)
        )

    def forward(
        self, x: Float[Tensor, "B T C"]
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, ""]]:
        """Returns the layer's output and its load-balancing loss over these B·T tokens."""
        flat = x.flatten(0, 1)  # (N, C)
        indices, weights, logits = self.router(flat)
        plan = plan_dispatch(indices, self.n_experts, self.dispatch)
        experts = self.experts
        out = run_experts(flat, weights, plan, experts.w1, experts.w3, experts.w2, self.dispatch)
        for expert in self.shared:
            out = out + expert(flat)
        aux = balance(router_probabilities(logits), plan.counts)
        return out.view_as(x), aux

    def extra_repr(self) -> str:
        return f"dispatch={self.dispatch}"
