"""What the routed experts' backward pass holds inside itself, moment by moment (chapter 11).

With `moe_dispatch="triton_grouped"` it is one operator, `_experts_backward` of `gptoss/kernels/expert_layer.py`. Neither
autograd nor the compiler sees into it, so that its tensors live as long as its lines say. They are listed here as they
stand there; a test runs that code and holds the largest moment against the allocations.

Shapes: N tokens, C model width, E experts, k experts a token, R = N·k routed rows, F ffn width; C and F rounded up to whole
multiples of 16 bytes.
"""

from gptoss.config import ModelConfig
from gptoss.training.kept_tensors import WIDE, Setting, whole_16_bytes


def experts_backward(cfg: ModelConfig, setting: Setting) -> dict[str, dict[str, int]]:
    """The tensors of each moment, in bytes, beside what the forward pass keeps and the gradient that comes in.

    Args:
        cfg, setting: as everywhere; the dispatch is taken to be "triton_grouped".

    Returns:
        By moment, in order, the bytes of each tensor by what it is.

    Source: chapter 11.
    """
    a, n = setting.width, setting.tokens
    rows = n * cfg.n_activated_experts
    c, f = whole_16_bytes(cfg.d_model, a), whole_16_bytes(cfg.ffn_dim, a)
    pads = (c, f) != (cfg.d_model, cfg.ffn_dim)
    weights = 3 * cfg.n_routed_experts * f * c * a

    copies, cut = {}, {}
    if pads:
        copies["padded weights"] = weights
        cut["gradients of W1, W3 and W2, cut"] = (
            3 * cfg.n_routed_experts * cfg.ffn_dim * cfg.d_model * a
        )
    if c != cfg.d_model:
        copies["padded x and gradient"] = 2 * n * c * a
    hidden_gradients = {
        "gradients of gate and up": 2 * rows * f * a,
        "gradient of the routing weights": rows * WIDE,
    }
    weight_operands = {
        "gradients of the answers": rows * c * a,
        "hidden rows": rows * f * a,  # in the place of their gradient
    }
    weight_gradients = {"gradients of W1, W3 and W2": weights}
    results = {
        "gradients of the rows": rows * c * a,
        "gradient of x": n * cfg.d_model * a,
    }
    return {
        "derivative of the SwiGLU": copies | weight_operands | hidden_gradients,
        "weight gradients": copies | weight_operands | hidden_gradients | weight_gradients,
        # Hidden rows and the gradients of the answers are gone. What was padded is cut to its size.
        "input gradient": copies | hidden_gradients | weight_gradients | results | cut,
    }


def experts_backward_peak(cfg: ModelConfig, setting: Setting) -> int:
    """Bytes of the largest moment."""
    return max(sum(tensors.values()) for tensors in experts_backward(cfg, setting).values())
