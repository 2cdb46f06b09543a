"""Between two measurements: what the one left must not count in the other."""

import gc

import torch


def release_memory() -> None:
    """Give unused memory back to the GPU and forget compiled code."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
