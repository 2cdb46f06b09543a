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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gptoss.bench.attention import Case, Shape, cases, check, graph_seconds, make_inputs
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


def check_one(case: Case) -> float | str:
    """A case's error, or why it has none."""
    try:
        return check(case)
    except Exception as problem:
        return " ".join(str(problem).split())[:160]


def time_one(candidate: Candidate, problem: str, shape: Shape) -> dict[str, Any]:
    """A row of the table: the candidate's time, or its problem."""
    kernel, window, tile = candidate
    row: dict[str, Any] = {"kernel": kernel, "window": window, **tile._asdict()}
    try:
        if problem:
            raise RuntimeError(problem)
        row["ms"] = round(graph_seconds(runner(candidate, shape)) * 1e3, 4)
    except Exception as error:
        row["problem"] = " ".join(str(error).split())[:160]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    problems = [case for D in (96, 64, 128, 32) for case in cases(torch.bfloat16, D)]
    problems += cases(torch.float32)
    todo = candidates()
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        compiled = pool.map(compile_one, todo)
        errors = list(pool.map(check_one, problems))
        reasons = list(compiled)
    found: dict[str, Any] = {
        "errors": [{**c._asdict(), "dtype": str(c.dtype), "error": e} for c, e in zip(problems, errors, strict=True)]
    }  # fmt: skip
    for case, error in zip(problems, errors, strict=True):
        limit = 1e-2 if case.dtype == torch.bfloat16 else 1e-5
        if isinstance(error, str) or not error < limit:
            print("WRONG", *case, error, flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        known = [e for c, e in zip(problems, errors, strict=True) if c.dtype == dtype and isinstance(e, float)]  # fmt: skip
        print(f"{dtype}: {len(known)} cases, worst {max(known, default=float('nan')):.1e}", flush=True)  # fmt: skip
    print(f"checked and compiled after {time.monotonic() - start:.0f} s", flush=True)
    shape = Shape(arguments.batch, arguments.tokens)
    rows = [time_one(c, reason, shape) for c, reason in zip(todo, reasons, strict=True)]
    found["rows"] = sorted(rows, key=lambda r: (r["kernel"], r["window"] or 0, r.get("ms", 1e9)))
    (arguments.out / "attention_sweep.json").write_text(json.dumps(found, indent=1))
    for row in found["rows"]:
        print(*row.values(), flush=True)
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
