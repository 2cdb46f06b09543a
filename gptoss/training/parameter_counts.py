"""How many parameters a configuration has, part by part, without building the model (chapters 1 and 11).

Shapes: C model width, V vocabulary, H query heads, K kv heads, D head_dim, E experts, F ffn width.
"""

from gptoss.config import ModelConfig


def block_parameters(cfg: ModelConfig) -> int:
    """Parameters of one block: norms 2C, attention, router, E routed and the shared experts."""
    queries, keys = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    attention = cfg.d_model * (2 * queries + 2 * keys) + (cfg.n_heads if cfg.sink_bias else 0)
    experts = cfg.n_routed_experts + cfg.n_shared_experts
    moe = cfg.n_routed_experts * cfg.d_model + experts * 3 * cfg.d_model * cfg.ffn_dim
    return 2 * cfg.d_model + attention + moe


def embedding_parameters(cfg: ModelConfig) -> int:
    """Parameters of one V × C matrix."""
    return cfg.vocab_size * cfg.d_model


def count_parameters(cfg: ModelConfig) -> int:
    """All stored parameters, a tied matrix once: 501,836,640 for the production model, 600,140,640 untied."""
    matrices = 1 if cfg.weight_tying else 2
    blocks = cfg.n_layers * block_parameters(cfg)
    return matrices * embedding_parameters(cfg) + blocks + cfg.d_model
