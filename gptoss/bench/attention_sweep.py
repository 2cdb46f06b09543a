"""Which tile suits each attention kernel on this GPU: every candidate compiled in parallel, then timed alone.

`python -m gptoss.bench.attention_sweep --out FOLDER` prints a table and writes `attention_sweep.json`; the winners are
what `gptoss/kernels/attention_launch.py` chooses.

Shapes: B batch, T tokens, H query heads, K kv heads, D head_dim.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gptoss.bench.attention import Shape, check, graph_seconds, make_inputs
from gptoss.kernels.attention_launch import (
    Tile,
    choose_plan,
    launch_forward,
    launch_key_gradient,
    launch_query_gradient,
)

Candidate = tuple[str, int | None, Tile]
WINDOW = 128


def candidates() -> list[Candidate]:
    """(kernel, window, tile) that are worth compiling: no spills on sm_90, by the compiler's report."""
    full = {
        "forward": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3)],
        "query_gradient": [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 32, 4, 2), (128, 32, 4, 3), (128, 32, 8, 3), (64, 128, 4, 1), (64, 32, 4, 3)],
        "key_gradient": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 1)],
    }  # fmt: skip
    windowed = {
        "forward": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 2), (128, 128, 8, 2), (128, 128, 8, 1)],
        "query_gradient": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 128, 8, 2), (128, 32, 4, 2)],
        "key_gradient": [(64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 1)],
    }  # fmt: skip
    found: list[Candidate] = [(kernel, None, Tile(*t)) for kernel in full for t in full[kernel]]
    for kernel, one_run in itertools.product(windowed, (True, False)):
        found += [(kernel, WINDOW, Tile(*t, one_run)) for t in windowed[kernel]]
    return found


def runner(candidate: Candidate, shape: Shape) -> Callable[[], object]:
    """One launch of one kernel on random inputs."""
    kernel, window, tile = candidate
    device, scale = torch.device("cuda"), shape.head_dim**-0.5
    q, k, v, sink = (t.detach() for t in make_inputs(shape, device, torch.bfloat16))
    if kernel == "forward":
        return lambda: launch_forward(q, k, v, sink, None, window, scale, tile)
    plan = choose_plan(shape.head_dim, window, q.dtype, device)
    out, lse = launch_forward(q, k, v, sink, None, window, scale, plan.forward)
    do = torch.randn_like(out)
    if kernel == "query_gradient":
        return lambda: launch_query_gradient(do, q, k, v, out, lse, sink, None, window, scale, tile)
    delta = (do.float() * out.float()).sum(-1)
    return lambda: launch_key_gradient(do, q, k, v, lse, delta, None, window, scale, tile)


def compile_one(candidate: Candidate) -> str:
    """Compile a candidate into Triton's cache on disk; the reason if that fails."""
    try:
        runner(candidate, Shape(1, 256))()
        torch.cuda.synchronize()
        return ""
    except Exception as problem:
        return " ".join(str(problem).split())[:160]


def sweep(shape: Shape, only: Iterable[Candidate], workers: int) -> list[dict[str, Any]]:
    """Compile in `workers` processes, then time one candidate after another."""
    todo = list(only)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        problems = list(pool.map(compile_one, todo))
    rows = []
    for candidate, problem in zip(todo, problems, strict=True):
        kernel, window, tile = candidate
        row: dict[str, Any] = {"kernel": kernel, "window": window, **tile._asdict()}
        try:
            if problem:
                raise RuntimeError(problem)
            row["ms"] = round(graph_seconds(runner(candidate, shape)) * 1e3, 4)
        except Exception as error:
            row["problem"] = str(error)[:160]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--skip-check", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    result: dict[str, Any] = {}
    if not arguments.skip_check:
        for dtype in (torch.bfloat16, torch.float32):
            errors = check(dtype)
            result[f"errors {dtype}"] = errors
            worst = max(errors, key=lambda case: errors[case])
            print(f"{dtype}: worst of {len(errors)} cases {errors[worst]:.1e} at {worst}", flush=True)  # fmt: skip
    print(f"checked after {time.monotonic() - start:.0f} s", flush=True)
    shape = Shape(arguments.batch, arguments.tokens)
    rows = sweep(shape, candidates(), workers=max(1, (os.cpu_count() or 2) - 2))
    result["rows"] = sorted(rows, key=lambda r: (r["kernel"], r["window"] or 0, r.get("ms", 1e9)))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attention_sweep.json").write_text(json.dumps(result, indent=1))
    for row in result["rows"]:
        print(*(f"{value}" for value in row.values()), flush=True)
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
