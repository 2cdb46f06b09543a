"""A run that takes a second: 24,000 parameters on 40,000 tokens whose next token is one of three."""

from pathlib import Path

import numpy as np

from gptoss.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from gptoss.data.shards import ShardWriter

SMALL_MODEL = {
    **{"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
    **{"head_dim": 8, "ffn_dim": 16, "n_routed_experts": 4, "window_size": 8},
    **{"yarn_scale_factor": 2, "yarn_original_max_seq_len": 32, "yarn_target_seq_len": 64},
    **{"max_seq_len": 32, "eval_max_seq_len": 64, "dtype": "fp32"},
}
SMALL_TRAINING = {
    **{"micro_batch_size": 2, "gradient_accumulation_steps": 2, "total_steps": 10},
    **{"warmup_steps": 3, "lr": 1e-2, "grad_checkpoint": False, "compile": False},
    **{"save_interval": 5, "log_interval": 5, "rope": "plain", "keep_last": 0},
    **{"validation_interval": 5, "validation_batches": 2},
}


def write_shards(directory: Path, tokens: int, seed: int) -> None:
    steps = np.random.default_rng(seed).integers(0, 3, tokens)
    with ShardWriter(directory, vocab_size=64, eos_token_id=0, shard_tokens=900) as writer:
        writer.write(np.cumsum(steps) % 64)


def small_config(
    shards: Path,
    save_dir: Path,
    model: dict | None = None,
    data: dict | None = None,
    **training: object,
) -> RunConfig:
    """A configuration; keywords replace training settings, `model` and `data` those of their sections."""
    paths = {
        "train_data_path": str(shards / "train"),
        "validation_data_path": str(shards / "validation"),
    }
    return RunConfig(
        ModelConfig(**{**SMALL_MODEL, **(model or {})}),
        TrainingConfig(**{"save_dir": str(save_dir), **SMALL_TRAINING, **training}),
        DataConfig(**{**paths, **(data or {})}),
    )
