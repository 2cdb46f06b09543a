"""One seed for every generator. (Their states travel with a checkpoint: `gptoss.training.checkpoint`.)"""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch on every device.

    Raises:
        ValueError: a seed that NumPy cannot take (outside 0 … 2³²−1).
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed = {seed}: expected 0 to 4294967295")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - code that draws from NumPy's global state is what this is for
    torch.manual_seed(seed)
