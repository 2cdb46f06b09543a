"""Timers: one call after another, calls queued ahead, contenders in turns, a call as a CUDA graph.

Shapes: none; plain callables.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

HEAD_START_BYTES = 2**29  # of one copy, a quarter of a millisecond on an H200
MOST_QUEUED = 500  # copies; CUDA's queue holds about a thousand launches


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


class Timing(NamedTuple):
    """Seconds of one call, and those that the host takes to queue it; on a CPU the two are one."""

    seconds: float
    host_seconds: float


def queued_seconds(run: Callable[[], object], device: torch.device, calls: int = 10) -> Timing:
    """Mean time of one of several calls in a row; on a CPU `median_seconds`.

    The calls are queued while the GPU copies memory: when the first begins the host has queued the last, and the GPU waits for
    nobody. (A call that asks the GPU for something waits all the same, and the wait counts as the host's time too.)
    """
    if device.type != "cuda":
        seconds = median_seconds(run, device)
        return Timing(seconds, seconds)
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    host = time.perf_counter() - start
    source = torch.empty(HEAD_START_BYTES, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copy = median_seconds(lambda: sink.copy_(source), device, repeats=5)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # A call that waits for the GPU itself takes the host as long as the GPU: no head start helps it.
    for _ in range(min(math.ceil(1.25 * host / copy), MOST_QUEUED)):
        sink.copy_(source)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return Timing(begin.elapsed_time(end) / 1e3 / calls, host / calls)


def seconds_in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 5
) -> dict[str, Timing | Exception]:
    """Median times of each contender, or what it failed with.

    They take turns, so that a clock that drifts meets all of them. A turn is `queued_seconds`.
    """
    times: dict[str, list[Timing]] = {name: [] for name in runs}
    failed: dict[str, Timing | Exception] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            if name in failed:
                continue
            try:
                times[name].append(queued_seconds(run, device))
            except Exception as problem:
                failed[name] = problem
    return {name: failed.get(name) or median_timing(times[name]) for name in runs}


def median_timing(times: list[Timing]) -> Timing:
    """The median of each of the two."""
    return Timing(*(statistics.median(column) for column in zip(*times, strict=True)))


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
