"""The two ceilings of a machine: how fast it multiplies matrices and how fast it moves bytes.

`gptoss bench roofline`. Chapter 2 draws the roofline from its table.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gptoss.bench.evidence import make_evidence

COLUMNS = {
    "what": "what was run",
    "dtype": "of its operands",
    "flops": "floating-point operations of one run",
    "bytes": "bytes that one run reads and writes, each operand once",
    "intensity": "FLOP a byte",
    "ms": "median time of a run in ms",
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
    row = _product(side, side, side, torch.bfloat16, torch.device("cuda"))
    return row["flops"] / row["ms"] * 1e3


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    a = torch.randn(m, k, dtype=dtype, device=device)
    b = torch.randn(k, n, dtype=dtype, device=device)
    seconds = median_seconds(lambda: a @ b, device)
    flops, size = 2 * m * n * k, (m * k + k * n + m * n) * a.element_size()
    return _row(f"({m}, {k}) x ({k}, {n})", dtype, flops, size, seconds)


def _copy(device: torch.device, elements: int) -> dict[str, Any]:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device)
    return _row("copy", source.dtype, 0, 2 * source.nbytes, seconds)


def _row(what: str, dtype: torch.dtype, flops: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "what": what,
        "dtype": str(dtype).removeprefix("torch."),
        "flops": flops,
        "bytes": size,
        "intensity": round(flops / size, 2),
        "ms": round(seconds * 1e3, 4),
        "tflops": round(flops / seconds / 1e12, 3),
        "tb_per_s": round(size / seconds / 1e12, 4),
    }


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of one call in seconds, after a warm-up, by events on a GPU and by the clock on a CPU."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start_event, end_event in events:
        start_event.record()
        run()
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def seconds_in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 3
) -> dict[str, float | Exception]:
    """Median time of each contender in seconds, or what it failed with.

    They take turns, so that a clock that drifts meets all of them. On a GPU a turn is Triton's `do_bench`: 25 ms of warm-up,
    100 ms of calls, the L2 cache emptied before each.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, float | Exception] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in failed:
                continue
            try:
                times[name].append(_turn(run, device))
            except Exception as problem:
                failed[name] = problem
    return {name: failed.get(name) or statistics.median(times[name]) for name in runs}


def _turn(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return median_seconds(run, device)
    from triton.testing import do_bench

    return float(do_bench(run, warmup=25, rep=100, return_mode="median")) / 1e3


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record a call's GPU work as a CUDA graph, after two runs that compile what there is to compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
