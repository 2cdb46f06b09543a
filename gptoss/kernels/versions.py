"""Which version runs: decided by the GPU and the dtype, said aloud once, and never exchanged for another silently.

    "persistent"  version 4 with version 5's backward     GPUs with the copy engine (compute capability 9.0 and newer)
    "tuned"       version 3 with version 5's backward     older GPUs from 7.5 on
    "documents"   version 2 with its mended backward      only when asked for by name

Shapes: none; plain values.
"""

import functools
import importlib.util
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from gptoss.kernels.tuning import COPY_ENGINE_FROM, KERNELS, Tiles, tiles_for

HAS_TRITON = importlib.util.find_spec("triton") is not None
VERSIONS = ("auto", "documents", "tuned", "persistent")

logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A version, the block sizes of its kernels, and why."""

    version: str
    tiles: dict[str, Tiles]
    reason: str


def chosen_version(
    capability: tuple[int, int] | None, dtype: torch.dtype, version: str = "auto"
) -> Choice:
    """Say which version the Triton path runs.

    Args:
        capability: the GPU's compute capability; None is Triton's interpreter on the CPU.
        dtype: of rows and weights: float16, bfloat16 or float32.
        version: "auto", or a version by name.

    Raises:
        ValueError: for a dtype or GPU that the kernels do not run on; the message says what does.

    Source: chapter 10.
    """
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {', '.join(VERSIONS)}, got {version!r}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"the Triton kernels take float16, bfloat16 or float32, got {dtype}; use moe_dispatch='stacked'"
        )
    if capability is None and dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 wrongly; use float32, or moe_dispatch='stacked'"
        )
    tiles = {kernel: tiles_for(kernel, capability, dtype) for kernel in KERNELS}
    if version != "auto":
        return Choice(version, tiles, "asked for by name")
    if capability is None:
        return Choice("persistent", tiles, "Triton's interpreter, which takes every version")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= COPY_ENGINE_FROM:
        return Choice("persistent", tiles, f"{name} has the copy engine")
    return Choice("tuned", tiles, f"{name} has no copy engine")


def choose(x: Tensor, version: str = "auto") -> Choice:
    """Choose for the device and dtype of ``x`` and log the choice the first time it is made.

    Raises:
        ImportError: without Triton.
        RuntimeError: for a CPU tensor without the interpreter.
        ValueError: as ``chosen_version``.
    """
    require_triton()
    if x.device.type == "cuda":
        capability = torch.cuda.get_device_capability(x.device)
    else:
        _require_interpreter()
        capability = None
    choice = chosen_version(capability, x.dtype, version)
    _announce(choice.version, choice.reason, str(x.dtype))
    return choice


def require_triton() -> None:
    """Raise ImportError, naming the remedies, where Triton is missing."""
    if not HAS_TRITON:
        raise ImportError(
            "the Triton expert kernels need Triton: pip install triton (Linux), "
            "or use moe_dispatch='stacked' or 'grouped_mm'"
        )


def _require_interpreter() -> None:
    import triton

    from gptoss.kernels.rows import _gather_kernel

    if isinstance(_gather_kernel, triton.JITFunction):
        raise RuntimeError(
            "the Triton expert kernels need a CUDA tensor, or TRITON_INTERPRET=1 in the environment before "
            "gptoss.kernels is imported; on a CPU use moe_dispatch='stacked'"
        )


@functools.cache
def _announce(version: str, reason: str, dtype: str) -> None:
    logger.info("expert kernels: version %r in %s (%s)", version, dtype, reason)
