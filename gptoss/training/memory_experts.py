"""What the routed experts' backward pass holds inside itself, moment by moment (chapter 11).

With `moe_dispatch="triton_grouped"` it is one operator, `_experts_backward` of `gptoss/kernels/expert_layer.py`. Neither
autograd nor the compiler sees into it, so that its tensors live as long as its lines say. They are listed here as they
stand there; a test runs that code and holds the largest moment against the allocations.

Shapes: N tokens, C model width, E experts, k experts a token, R = N·k routed rows, F ffn width; C and F rounded up to whole
multiples of 16 bytes.
"""

from gptoss.config import ModelConfig
from gptoss.training.kept_tensors import WIDE, Setting, experts_kept, whole_16_bytes

# Columns of a hidden row whose share in the routing weight's gradient is one partial sum: n / pieces of the kernel
# "derivative" in `gptoss/kernels/tuning.py`, the same on every GPU.
PARTIAL_COLUMNS = 32
ROWS = "sorted rows"  # as `experts_kept` calls them


def experts_backward(
    cfg: ModelConfig, setting: Setting, partial_columns: int = PARTIAL_COLUMNS
) -> dict[str, dict[str, int]]:
    """The tensors of each moment, in bytes, beside what the forward pass keeps and the gradient that comes in.

    Rows that the forward pass keeps are not gathered again: where `experts_kept` lists them, they are missing here.

    Args:
        cfg, setting: as everywhere; the dispatch is taken to be "triton_grouped".
        partial_columns: columns a partial sum.

    Returns:
        By moment, in order, the bytes of each tensor by what it is.

    Source: chapter 11.
    """
    a, n = setting.width, setting.tokens
    rows = n * cfg.n_activated_experts
    c, f = whole_16_bytes(cfg.d_model, a), whole_16_bytes(cfg.ffn_dim, a)
    pads = (c, f) != (cfg.d_model, cfg.ffn_dim)
    weights = 3 * cfg.n_routed_experts * f * c * a
    kept = {tensor.what for tensor in experts_kept(cfg, setting)}

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
        "hidden rows": rows * f * a,
    }
    if ROWS not in kept:
        weight_operands[ROWS] = rows * c * a
    partial = {"partial sums": rows * -(-f // partial_columns) * WIDE}
    weight_gradients = {"gradients of W1, W3 and W2": weights}
    results = {
        "gradients of the rows": rows * c * a,
        "gradient of x": n * cfg.d_model * a,
    }
    return {
        "derivative of the SwiGLU": copies | weight_operands | hidden_gradients | partial,
        "weight gradients": copies | weight_operands | hidden_gradients | weight_gradients,
        # Rows, hidden rows and the gradients of the answers are gone. What was padded is cut to its size.
        "input gradient": copies | hidden_gradients | weight_gradients | results | cut,
    }


def experts_backward_peak(cfg: ModelConfig, setting: Setting) -> int:
    """Bytes of the largest moment."""
    return max(sum(tensors.values()) for tensors in experts_backward(cfg, setting).values())
