"""How many tokens of a prompt pass the model at once (chapter 15): one rule for whoever reads and whoever plans memory."""

import torch

CPU_CHUNK = 4096
CUDA_CHUNK = 32_768


def choose_chunk_size(device: torch.device, batch_size: int = 1) -> int:
    """Tokens of each row to read at once: enough to fill the device, few enough that activations stay small.

    A GPU reads 32,768 tokens of all rows together: with fewer, the first chunks of a long prompt, whose attention is
    short, end before the host has launched the next one. On a CPU there is nothing to fill and 4,096 cost less memory.

    Args:
        device: of the model.
        batch_size: B.

    Returns:
        At least 1,024 (tokens).
    """
    return max(1024, (CUDA_CHUNK if device.type == "cuda" else CPU_CHUNK) // batch_size)
