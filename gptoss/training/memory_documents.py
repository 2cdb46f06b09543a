"""The memory estimate of the source documents, to the digit (chapter 11 says where it is wrong).

It counts a KV cache that training does not have, no logits, no gradients, and activations by a rule of thumb whose
checkpointing factor is upside down. `gptoss.training.memory.predict_training_memory` is the one that is right.
"""

import torch
from torch import nn

from gptoss.training.kept_tensors import GIB

BYTES_BF16 = 2


def estimate_model_memory_gb(
    model: nn.Module,
    seq_len: int,
    batch_size: int,
    grad_checkpoint: bool = True,
    overhead_gb: float | None = None,
    steady_state: bool = False,
    grad_ckpt_every: int = 3,
) -> float:
    """Estimate a training step's memory as the source documents do.

        total = 16·P + KV + A·s + overhead
        KV = (n_win·w + n_glob·T)·B·2·K·D·2        w = W in steady state, else max(W, T)
        A = (L·T·B·C + 9·L·T·B·F)·2                s = 1, or 1/g + (1 − 1/g)/2 with checkpointing every g blocks

    The production model at T = 4096, B = 8 with 2 GiB of overhead: 20.73 GiB without checkpointing, 17.17 with g = 3.

    Args:
        model: any module with a `cfg`; without one the estimate is 0.
        seq_len: T, tokens.
        batch_size: B, sequences.
        grad_checkpoint: whether blocks are checkpointed.
        overhead_gb: GiB to add; None takes 2 on a CPU, else 0.17 of the GPU's memory, at least 2 and at most 13.7.
        steady_state: windowed layers hold W keys, as in long decoding.
        grad_ckpt_every: g; 0 is off.

    Returns:
        GiB, which the documents call GB.

    Source: the documents' section on memory; chapter 11 of this book.
    """
    cfg = getattr(model, "cfg", None)
    if cfg is None:
        return 0.0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    n_windowed = sum(cfg.is_windowed(layer) for layer in range(cfg.n_layers))
    windowed_len = cfg.window_size if steady_state else max(cfg.window_size, seq_len)
    positions = n_windowed * windowed_len + (cfg.n_layers - n_windowed) * seq_len
    kv = positions * batch_size * 2 * cfg.n_kv_heads * cfg.head_dim * BYTES_BF16
    tokens = cfg.n_layers * seq_len * batch_size
    activations = (tokens * cfg.d_model + 9 * tokens * cfg.ffn_dim) * BYTES_BF16
    if grad_checkpoint and grad_ckpt_every:
        activations *= 1 / grad_ckpt_every + (1 - 1 / grad_ckpt_every) / 2
    if overhead_gb is None:
        overhead_gb = _overhead_gib()
    return (16 * parameters + kv + activations) / GIB + overhead_gb


def assert_fits_in_available_gpu(estimate_gb: float, safety_margin_gb: float = 2.0) -> None:
    """Refuse an estimate that the GPU cannot hold; without a GPU there is nothing to check.

    Args:
        estimate_gb: GiB.
        safety_margin_gb: GiB to leave free.

    Raises:
        RuntimeError: the estimate exceeds the GPU's memory less the margin.

    Source: the documents' section on memory.
    """
    if not torch.cuda.is_available():
        return
    total = _device_gib()
    if estimate_gb > total - safety_margin_gb:
        raise RuntimeError(
            f"estimated peak of {estimate_gb:.1f} GiB does not fit: the GPU has {total:.1f} GiB and {safety_margin_gb:.1f} "
            "are to stay free; use a smaller micro-batch, shorter sequences or more checkpointing"
        )
    print(f"[memory] Estimated peak VRAM: {estimate_gb:.1f} GB / {total:.1f} GB — OK.")


def _overhead_gib() -> float:
    return min(13.7, max(2.0, 0.17 * _device_gib())) if torch.cuda.is_available() else 2.0


def _device_gib() -> float:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
