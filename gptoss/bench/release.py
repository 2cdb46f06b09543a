"""Between two measurements: what the one left must not count in the other."""

import gc

import torch


def release_memory() -> None:
    """Forget compiled code and give unused memory back to the GPU."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
