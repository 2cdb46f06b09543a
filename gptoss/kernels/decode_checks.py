"""What every decoding operator asks of its rows, said once.

Shapes: N tokens, C inputs.
"""

import torch
from torch import Tensor

from gptoss.kernels.versions import HAS_TRITON

MAX_TOKENS = 8


def check_rows(x: Tensor, *weights: Tensor) -> None:
    if x.ndim != 2 or not 0 < x.shape[0] <= MAX_TOKENS:
        raise ValueError(
            f"expected x (N, C) of 1 to {MAX_TOKENS} rows, got {tuple(x.shape)}: use the model's own layers for more"
        )
    if any(w.shape[-1] != x.shape[1] for w in weights):
        raise ValueError(
            f"expected weights over {x.shape[1]} inputs, got {[tuple(w.shape) for w in weights]}"
        )
    if x.dtype == torch.float64:
        raise ValueError("expected float32 or narrower, got float64: use the model's own layers")


def require_decode_kernels() -> None:
    if not HAS_TRITON:
        raise ImportError(
            "the decoding kernels need Triton: pip install triton (Linux), or use the model's own layers"
        )
