"""What each operation of the model keeps for its backward pass, in bytes.

Autograd keeps what an operation's derivative reads: inputs of products, outputs of softmax, indices of gathers. A
compiled block keeps less: the compiler recomputes what is cheap (casts, SiLU, the product inside a norm) and keeps what
is expensive. Both lists stand here side by side, one line a tensor, so that a measurement can correct a single line;
tests hold the first against autograd to the byte, the second against compiled blocks.

Shapes: B batch, T tokens, N = B·T, C model width, H query heads, K kv heads, D head_dim, E experts, k experts a token,
R = N·k routed rows, F ffn width, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gptoss.config import ModelConfig

WIDE = 4  # bytes of fp32: statistics, softmax, log-sum-exp
INDEX = 8  # bytes of int64
WIDTH = {"bf16": 2, "fp32": 4}  # bytes of an activation
GIB = 2**30


@dataclass(frozen=True)
class Kept:
    """One tensor that waits for the backward pass: which operation keeps it, what it is, and its bytes.

    `weight_copy` marks the bf16 copies of fp32 weights, which do not grow with the batch.
    """

    operation: str
    what: str
    bytes: int
    weight_copy: bool = False


@dataclass(frozen=True)
class Setting:
    """How a block is computed, as far as memory cares.

    Args:
        batch, seq_len: B and T.
        dtype: "bf16" (fp32 weights under bf16 autocast) or "fp32".
        dispatch: `ModelConfig.moe_dispatch`.
        backend: the attention backend, resolved: "reference", "blocked", "flex" or "triton".
        compiled: whether blocks run through torch.compile.
    """

    batch: int
    seq_len: int
    dtype: str
    dispatch: str
    backend: str
    compiled: bool

    @property
    def tokens(self) -> int:
        """N."""
        return self.batch * self.seq_len

    @property
    def width(self) -> int:
        """Bytes of one activation value."""
        return WIDTH[self.dtype]


def block_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """Everything that one block keeps, its input included, the rotary tables (shared by all blocks) not.

    Source: chapter 11.
    """
    return [
        *norm_kept(cfg, setting, "norm1"),
        *attention_kept(cfg, setting),
        *norm_kept(cfg, setting, "norm2"),
        *router_kept(cfg, setting),
        *experts_kept(cfg, setting),
        *shared_kept(cfg, setting),
    ]


def norm_kept(cfg: ModelConfig, setting: Setting, name: str) -> list[Kept]:
    """RMSNorm: y = x·r·γ. Its output is kept as the input of the products that follow."""
    n, values = setting.tokens, setting.tokens * cfg.d_model
    kept = [Kept(name, "r", n * WIDE), Kept(name, "output", values * setting.width)]
    if setting.compiled:  # x·r and the fp32 cast of x are recomputed from x
        return [*kept, Kept(name, "x", values * setting.width)]
    kept.append(Kept(name, "x·r in fp32", values * WIDE))
    if (
        not cfg.rms_norm_detach
    ):  # the statistic's own gradient reads x in fp32, a copy unless x is fp32
        kept.append(Kept(name, "x in fp32", values * WIDE))
    return kept


def attention_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """Projections, rotation, causal attention with a sink, output projection."""
    n, a, heads, kv_heads = setting.tokens, setting.width, cfg.n_heads, cfg.n_kv_heads
    queries, keys = n * heads * cfg.head_dim * a, n * kv_heads * cfg.head_dim * a
    kept = [
        *_weight_copies(setting, "q_proj", queries // (n * a) * cfg.d_model),
        *_weight_copies(setting, "kv_proj", 2 * keys // (n * a) * cfg.d_model),
        *_weight_copies(setting, "o_proj", queries // (n * a) * cfg.d_model),
        Kept("o_proj", "input", queries),
    ]
    if setting.backend == "reference":
        return [*kept, *_dense_scores_kept(cfg, setting)]
    kept += [
        Kept("attention", "rotated queries", queries),
        Kept("attention", "rotated keys", keys),
        Kept("attention", "values, inside the kv projection's output", 2 * keys),
        Kept("attention", "log-sum-exp", n * heads * WIDE),
    ]
    if (
        setting.backend != "triton"
    ):  # Triton's output lies as o_proj reads it; the others' is copied
        kept.append(Kept("attention", "output", queries))
    if cfg.sink_bias:
        kept.append(Kept("attention", "clamped sinks", heads * WIDE))
    if cfg.sink_bias and setting.backend == "flex":
        kept.append(Kept("attention", "sink gate σ(lse − b)", n * heads * WIDE))
    return kept


def _dense_scores_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """The oracle's (T, T) matrices: a softmax and its product with the values, in fp32 whatever the autocast state."""
    n, t, heads = setting.tokens, setting.seq_len, cfg.n_heads
    repeated = n * heads * cfg.head_dim * WIDE
    kept = [
        Kept("attention", "queries", repeated),
        Kept("attention", "repeated keys", repeated),
        Kept("attention", "repeated values", repeated),
        Kept("attention", "mask", t * t),
    ]
    if not cfg.sink_bias:  # masked a second time, for queries that see no key
        weights = n * heads * t * WIDE
        again = Kept("attention", "second mask", t * t + t)
        return [*kept, again, *(Kept("attention", w, weights) for w in ("softmax", "weights"))]
    return [*kept, Kept("attention", "softmax with the sink", n * heads * (t + 1) * WIDE)]


def router_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """Logits, softmax, the sort that finds the top k, renormalisation, and the balance loss."""
    n, experts, k = setting.tokens, cfg.n_routed_experts, cfg.n_activated_experts
    kept = [
        *_weight_copies(setting, "router", experts * cfg.d_model),
        Kept("router", "probabilities", n * experts * WIDE),
        Kept("router", "sorted indices", n * experts * INDEX),
        Kept("router", "sorted probabilities", n * experts * WIDE),
        Kept("balance", "share of each expert", experts * WIDE),
    ]
    if setting.compiled:  # one softmax for routing and balance; sums and quotients are recomputed
        return kept
    return [
        *kept,
        Kept("router", "sum of the top k", n * WIDE),
        Kept("router", "the sum, clamped", n * WIDE),
        Kept("combine", "routing weights", n * k * WIDE),
        Kept("balance", "probabilities", n * experts * WIDE),
    ]


def experts_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """Gather, the routed experts, and the weighted sum."""
    rows, a, ffn = setting.tokens * cfg.n_activated_experts, setting.width, cfg.ffn_dim
    experts = cfg.n_routed_experts
    matrix = experts * ffn * cfg.d_model
    if (
        setting.dispatch == "triton_grouped"
    ):  # one operator: hidden rows are made again, answers are not needed
        width = whole_16_bytes(cfg.d_model, a)
        kept = [
            Kept("experts", "sorted rows", rows * width * a),
            Kept("experts", "gate and up", 2 * rows * whole_16_bytes(ffn, a) * a),
            Kept("experts", "order and its inverse", 2 * rows * 4),
            Kept("experts", "routing weights, sorted", rows * WIDE),
            Kept("experts", "row counts", experts * 4),
            *_weight_copies(setting, "experts w1 w3 w2", 3 * matrix),
        ]
        if setting.compiled:  # an operator's input; in an eager block the router lists it
            kept.append(Kept("combine", "routing weights", rows * WIDE))
        return kept
    kept = [
        Kept("gather", "where each row went", rows * INDEX),
        Kept("experts", "sorted rows", rows * cfg.d_model * a),
        Kept("experts", "gate and up", 2 * rows * ffn * a),
        Kept("experts", "hidden", rows * ffn * a),
        Kept("combine", "answers", rows * cfg.d_model * a),
        Kept("combine", "where each row came from", rows * INDEX),
        *_weight_copies(setting, "experts w2", matrix),
    ]
    if setting.dispatch == "grouped_mm":
        if not setting.compiled:
            kept.append(Kept("experts", "silu(gate)", rows * ffn * a))
        # w1 and w3 are joined into one matrix: a copy in any dtype
        kept.append(Kept("experts w1 w3", "joined", 2 * matrix * a, weight_copy=True))
        kept.append(Kept("experts", "row ends", experts * 4))
    else:
        kept += _weight_copies(setting, "experts w1 w3", 2 * matrix)
        kept.append(Kept("experts", "row counts", experts * INDEX))
    return kept


def shared_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """The shared experts, each on every token."""
    hidden = setting.tokens * cfg.ffn_dim * setting.width
    kept = []
    for name in (f"shared {i}" for i in range(cfg.n_shared_experts)):
        kept += [
            *_weight_copies(setting, name, 3 * cfg.ffn_dim * cfg.d_model),
            Kept(name, "gate", hidden),
            Kept(name, "up", hidden),
            Kept(name, "silu(gate) · up", hidden),
        ]
        if not setting.compiled:
            kept.append(Kept(name, "silu(gate)", hidden))
    return kept


def rotary_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """cos and sin for the windowed layers and for the global ones."""
    kinds = min(2, cfg.n_layers)
    bytes_ = kinds * 2 * setting.seq_len * (cfg.head_dim // 2) * setting.width
    return [Kept("rotary", "tables", bytes_)]


def head_kept(cfg: ModelConfig, setting: Setting) -> list[Kept]:
    """Final norm and chunked head: the head's gradients are made on the way forward and wait to be scaled."""
    eager = Setting(
        **{**vars(setting), "compiled": False}
    )  # the head runs outside the compiled blocks
    norm = [kept for kept in norm_kept(cfg, eager, "final norm") if kept.what != "output"]
    return [
        *norm,
        Kept("head", "gradient of the hidden states", setting.tokens * cfg.d_model * setting.width),
        Kept("head", "gradient of the weight", cfg.vocab_size * cfg.d_model * WIDE),
    ]


def total_bytes(kept: Iterable[Kept]) -> int:
    """The sum of their bytes."""
    return sum(tensor.bytes for tensor in kept)


def check_counts(**counts: int) -> None:
    """Raise where a named number is not a positive one."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: expected at least 1")


def block_input_kept(cfg: ModelConfig, setting: Setting) -> bool:
    """Whether a block's own list holds its input itself: a checkpointed block, made again, then needs it but once.

    A compiled norm keeps x; an eager one keeps x in fp32, which is x itself only where activations are fp32.
    """
    return setting.compiled or (setting.dtype == "fp32" and not cfg.rms_norm_detach)


def _weight_copies(setting: Setting, operation: str, values: int) -> list[Kept]:
    """Under autocast every product keeps the bf16 copy of its weight; in fp32 the weight itself is read."""
    if setting.dtype == "fp32":
        return []
    return [Kept(operation, "weight in bf16", values * setting.width, weight_copy=True)]


def whole_16_bytes(values: int, width: int) -> int:
    """A row's length in values, rounded up as the Triton kernels pad it."""
    multiple = 16 // width
    return -(-values // multiple) * multiple
