"""transformers' GptOss at this model's sizes: the baseline of the step and of decoding."""

from typing import Any

from gptoss.config import ModelConfig


def gpt_oss_config(cfg: ModelConfig, max_positions: int) -> Any:
    """A GptOssConfig of the same widths, layers, heads, experts and window.

    It takes the top k + shared of the routed experts, since GptOss has no shared one.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.d_model,
        intermediate_size=cfg.ffn_dim,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
        num_local_experts=cfg.n_routed_experts,
        num_experts_per_tok=cfg.n_activated_experts + cfg.n_shared_experts,
        sliding_window=cfg.window_size,
        tie_word_embeddings=cfg.weight_tying,
        max_position_embeddings=max_positions,
    )
