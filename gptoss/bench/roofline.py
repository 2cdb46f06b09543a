"""The two ceilings of a machine: how fast it multiplies matrices and how fast it moves bytes.

`gptoss bench roofline`. Chapter 2 draws the roofline from its table.
"""

from collections.abc import Callable
from typing import Any

import torch

from gptoss.bench.evidence import make_evidence
from gptoss.bench.timing import Timing, median_seconds, median_timing, queued_seconds

COLUMNS = {
    "what": "what was run",
    "dtype": "of its operands",
    "flops": "floating-point operations of one run",
    "bytes": "bytes that one run reads and writes, each operand once",
    "intensity": "FLOP a byte",
    "ms": "median time of a run in ms; on a GPU with the runs queued ahead",
    "host_ms": "median time in ms that the host takes to queue a run; on a CPU the run itself",
    "tflops": "TFLOP/s reached",
    "tb_per_s": "TB/s reached",
}


def measure(*, command: str = "gptoss bench roofline", commit: str | None = None) -> dict[str, Any]:
    """Matrix products of growing intensity and one large copy, on the GPU or on this CPU.

    Returns:
        The evidence: square products (n, n)·(n, n) at several n, and thin products that memory bounds.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    rows = [_copy(device, 2**30 if cuda else 2**25)]
    sides = (256, 512, 1024, 2048, 4096, 8192) if cuda else (64, 128, 256, 512, 1024)
    rows += [_product(side, side, side, dtype, device) for side in sides]
    depth = 8192 if cuda else 1024
    rows += [_product(depth, thin, depth, dtype, device) for thin in (1, 4, 16, 64, 256)]
    return make_evidence(
        "roofline", "Matrix products and a copy", COLUMNS, rows, command=command, commit=commit
    )


def matmul_rate(side: int = 8192) -> float:
    """FLOP/s of a bf16 product of two (side, side) matrices of random numbers: the peak that MFU is held against."""
    device = torch.device("cuda")
    product, flops, _ = _prepare(side, side, side, torch.bfloat16, device)
    return flops / median_seconds(product, device)


def _prepare(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], torch.Tensor], int, int]:
    """A product (m, k)·(k, n) to run, its FLOPs and its bytes."""
    a = torch.randn(m, k, dtype=dtype, device=device)
    b = torch.randn(k, n, dtype=dtype, device=device)
    return lambda: a @ b, 2 * m * n * k, (m * k + k * n + m * n) * a.element_size()


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    run, flops, size = _prepare(m, n, k, dtype, device)
    return _row(f"({m}, {k}) x ({k}, {n})", dtype, flops, size, _time(run, device))


def _copy(device: torch.device, elements: int) -> dict[str, Any]:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    took = _time(lambda: target.copy_(source), device)
    return _row("copy", source.dtype, 0, 2 * source.nbytes, took)


def _time(run: Callable[[], object], device: torch.device) -> Timing:
    return median_timing([queued_seconds(run, device) for _ in range(5)])


def _row(what: str, dtype: torch.dtype, flops: int, size: int, took: Timing) -> dict[str, Any]:
    return {
        "what": what,
        "dtype": str(dtype).removeprefix("torch."),
        "flops": flops,
        "bytes": size,
        "intensity": round(flops / size, 2),
        "ms": round(took.seconds * 1e3, 4),
        "host_ms": round(took.host_seconds * 1e3, 4),
        "tflops": round(flops / took.seconds / 1e12, 3),
        "tb_per_s": round(size / took.seconds / 1e12, 4),
    }
