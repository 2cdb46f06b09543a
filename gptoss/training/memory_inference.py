"""The memory of generation: weights, the KV cache, and one pass of a prompt (chapters 6 and 15).

B batch, S context in tokens, W window, K kv heads, D head_dim.
"""

from dataclasses import dataclass

import torch

from gptoss.config import ModelConfig
from gptoss.model.cache import kv_cache_bytes
from gptoss.model.prefill_chunk import choose_chunk_size
from gptoss.training.kept_tensors import GIB, WIDTH, check_counts
from gptoss.training.parameter_counts import count_parameters


@dataclass(frozen=True)
class InferenceMemory:
    """Memory of generation, bytes: weights, the KV cache at its fullest, and what one pass of a prompt's chunk needs."""

    weights: int
    cache: int
    scratch: int

    @property
    def gib(self) -> float:
        """All of it, GiB."""
        return (self.weights + self.cache + self.scratch) / GIB


def predict_inference_memory(
    config: ModelConfig,
    *,
    batch: int = 1,
    context: int | None = None,
    prefill_chunk: int | None = None,
    dtype: str | None = None,
    device: str = "cuda",
) -> InferenceMemory:
    """Predict the memory of generating up to a context length.

    cache = B · (n_windowed · min(S, W) + n_global · S) · 2 · K · D · bytes

    The scratch is what the experts of one block hold at once for a chunk of the prompt (x, sorted rows, gate, up, hidden
    and the answers), or the last position's logits where those are more.

    Args:
        config: the architecture.
        batch: B, sequences.
        context: S, prompt and generated tokens; `config.eval_max_seq_len` when left out.
        prefill_chunk: tokens of each prompt that pass at once; as many as generation reads on such a device
            (`choose_chunk_size`) when left out.
        dtype: of weights, activations and cache; the configuration's when left out.
        device: "cuda" or "cpu".

    Raises:
        ValueError: a number below 1, or an unknown dtype or device.

    Source: chapters 6 and 15.
    """
    context = config.eval_max_seq_len if context is None else context
    dtype = dtype or config.dtype
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device = {device!r}: expected one of cuda, cpu")
    check_counts(batch=batch, context=context)
    if prefill_chunk is None:
        prefill_chunk = choose_chunk_size(torch.device(device), batch)
    check_counts(prefill_chunk=prefill_chunk)
    if dtype not in WIDTH:
        raise ValueError(f"dtype = {dtype!r}: expected one of {', '.join(WIDTH)}")
    width = WIDTH[dtype]
    n_windowed = sum(config.is_windowed(layer) for layer in range(config.n_layers))
    cache = kv_cache_bytes(
        context,
        n_windowed,
        config.n_layers - n_windowed,
        config.n_kv_heads,
        config.head_dim,
        config.window_size,
        width,
        batch,
    )
    tokens = batch * min(prefill_chunk, context)
    rows = tokens * config.n_activated_experts
    experts = (3 * tokens + 2 * rows) * config.d_model + 3 * rows * config.ffn_dim
    logits = batch * config.vocab_size * (width + 4)  # and their fp32 copy for sampling
    return InferenceMemory(
        weights=count_parameters(config) * width, cache=cache, scratch=max(experts * width, logits)
    )
