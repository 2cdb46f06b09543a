"""Between two measurements: what the one left must not count in the other."""

import gc

import torch


def release_memory(*, keep_code: bool = False) -> None:
    """Give unused memory back to the GPU and forget compiled code, unless the next measurement runs the same shapes."""
    gc.collect()
    if not keep_code:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
