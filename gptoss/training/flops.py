"""FLOPs of a trained token and model FLOPs utilisation, in the one convention that this book uses (chapter 14).

C model width, T tokens of a sequence, W window.
"""

import torch

from gptoss.config import ModelConfig
from gptoss.model.attention import count_visible_pairs

MFU_CONVENTION = (
    "MFU = tokens/s · (6 · active parameters + attention by visible pairs) / bf16 matmul peak; "
    "recomputation not counted"
)

# FLOP/s of dense bf16 matrix products. H200: the rate that PyTorch's 8192³ product reached there (781-806 TFLOP/s in several
# runs from rest, 720 kept up: chapter 2); the others: NVIDIA's data sheets, without sparsity. The first name that a device's
# name contains counts.
BF16_PEAK = {
    "H200": 790e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def visible_pairs(cfg: ModelConfig, seq_len: int) -> list[int]:
    """How many (query, key) pairs each layer computes over one sequence (chapter 6)."""
    return [
        count_visible_pairs(seq_len, cfg.window_size if cfg.is_windowed(layer) else None)
        for layer in range(cfg.n_layers)
    ]


def training_flops_per_token(cfg: ModelConfig, active_parameters: int, seq_len: int) -> float:
    """FLOPs of one trained token, forward and backward.

        6·N_active + Σ_layers 12·C·(visible pairs / T)

    A matrix product costs 2 FLOPs a weight forward and twice that backward; a visible pair costs 2·2·C forward (scores
    and values) and twice that backward. The production model at T = 4096: 1.482 + 0.113 + 0.007 = 1.602 GFLOP.

    Args:
        cfg: the architecture.
        active_parameters: `model.num_active_parameters()`.
        seq_len: T, tokens.

    Source: Kaplan et al. 2020, section 2.1 (the factor 6); chapter 14 of this book.
    """
    width = cfg.n_heads * cfg.head_dim
    pairs = sum(visible_pairs(cfg, seq_len))
    return 6.0 * active_parameters + 12.0 * width * pairs / seq_len


def bf16_peak(device: torch.device) -> float | None:
    """The device's dense bf16 matrix rate in FLOP/s, or None where no figure is known (CPUs among them)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in BF16_PEAK.items() if key in name), None)
