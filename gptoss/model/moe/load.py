"""How a model's tokens spread over its experts.

Shapes: B batch, T tokens, L layers, E experts, k experts a token.
"""

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .router import MoERouter


@torch.no_grad()
def routed_experts(model: nn.Module, idx: Int[Tensor, "B T"]) -> Int[Tensor, "L B T k"]:
    """The experts that each layer chose for each token, largest weight first.

    Runs one forward pass, eager even where blocks are compiled (flex_attention is then dense, B·H·T·T scores), and leaves
    the model as it was: the layers themselves keep no counters, so checkpointed recomputation counts nothing twice.

    Args:
        model: a `GPTOSS`.
        idx: token ids.

    Source: chapter 9.
    """
    seen: list[Tensor] = []
    routers = [module for module in model.modules() if isinstance(module, MoERouter)]
    handles = [
        router.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
        for router in routers
    ]
    try:
        # A graph that was compiled before the hooks does not call them.
        with torch.compiler.set_stance("force_eager"):
            model(idx, last_only=True)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen).unflatten(1, idx.shape)  # (L, N, k) -> (L, B, T, k)


def expert_load(model: nn.Module, idx: Int[Tensor, "B T"]) -> Int[Tensor, "L E"]:
    """Slots that each expert of each layer receives on these tokens; each row sums to B·T·k (chapter 9)."""
    chosen = routed_experts(model, idx).flatten(1)  # (L, B·T·k)
    n_experts = next(m for m in model.modules() if isinstance(m, MoERouter)).weight.shape[0]
    return (chosen.unsqueeze(-1) == torch.arange(n_experts, device=chosen.device)).sum(1)
