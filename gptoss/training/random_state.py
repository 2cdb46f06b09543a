"""The random generators of this process, as tensors and plain values (chapter 17)."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This process's random states: torch, CUDA, NumPy, Python; big parts as tensors, the rest as plain values."""
    # The legacy global generator is the one that third-party code draws from, so it is the one to keep.
    name, keys, *numpy_rest = np.random.get_state()  # noqa: NPY002
    version, words, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {"numpy": [name, *numpy_rest], "python": [version, gauss_next]}


def set_random_state(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Put this process's random generators back where `random_state` found them."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    name, *numpy_rest = rest["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), *numpy_rest))  # noqa: NPY002 (see above)
    version, gauss_next = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss_next))
