"""Block sizes of the expert kernels, timed one by one: where the table in `gptoss/kernels/tuning.py` comes from.

`python -m gptoss.bench.moe_sweep`. Compiling takes longer than timing, so worker processes fill Triton's cache first.

Shapes: N tokens, k experts a token, R = N·k routed rows, C model width, F ffn width, E experts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptoss.bench.moe_inputs import Inputs, Shape, make_inputs
from gptoss.bench.timing import median_seconds
from gptoss.kernels.expert_tiles import tile_table
from gptoss.kernels.grouped_rows import grouped_rows
from gptoss.kernels.grouped_weights import Product, grouped_weight_gradients
from gptoss.kernels.swiglu_persistent import swiglu_derivative_recomputed, swiglu_persistent
from gptoss.kernels.swiglu_tuned import swiglu_tuned
from gptoss.kernels.tuning import Tiles

WIDE = [
    Tiles(128, 128, 64, 8, 4, pieces=4),
    Tiles(128, 128, 64, 8, 3, pieces=2),
    Tiles(128, 128, 64, 8, 4, pieces=2),
    Tiles(128, 128, 64, 8, 4, pieces=4, flatten=False),
    Tiles(128, 128, 64, 8, 4, pieces=4, group=4),
    Tiles(128, 128, 64, 8, 4, pieces=4, group=16),
    Tiles(128, 128, 128, 8, 2, pieces=4),
    Tiles(128, 64, 64, 4, 3, pieces=2, per_sm=2),
    Tiles(128, 64, 64, 4, 3, pieces=2, per_sm=2, flatten=False),
    Tiles(256, 64, 64, 8, 3, pieces=2),
    Tiles(256, 64, 64, 8, 4, pieces=2),
]
ROWS = [
    Tiles(128, 256, 64, 8, 4, pieces=4),
    Tiles(128, 256, 64, 8, 3, pieces=2),
    Tiles(128, 256, 64, 8, 4, pieces=4, group=16),
    Tiles(128, 256, 64, 8, 4, pieces=4, flatten=False),
    Tiles(128, 256, 128, 8, 2, pieces=4),
    Tiles(256, 128, 64, 8, 3, pieces=2),
    Tiles(256, 128, 64, 8, 4, pieces=2),
    Tiles(128, 128, 64, 4, 3, pieces=2, per_sm=2),
]
WEIGHTS = [
    Tiles(128, 256, 64, 8, 4),
    Tiles(128, 256, 64, 8, 3),
    Tiles(256, 128, 64, 8, 4),
    Tiles(128, 128, 64, 4, 3),
    Tiles(128, 128, 64, 8, 4),
    Tiles(128, 256, 128, 8, 2),
]
CANDIDATES: dict[str, list[Tiles]] = {
    "tuned": [
        Tiles(128, 128, 64, 8, 3),
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 64, 64, 4, 3),
        Tiles(128, 64, 64, 8, 4),
    ],
    "swiglu": WIDE,
    "swiglu keep": [WIDE[i] for i in (0, 1, 3, 6, 7, 9)],
    "swiglu_backward": [
        Tiles(128, 128, 64, 8, 3, pieces=4),
        Tiles(128, 128, 64, 8, 4, pieces=4),
        Tiles(128, 64, 64, 4, 3, pieces=2, per_sm=2),
        Tiles(256, 64, 64, 8, 3, pieces=2),
    ],
    "down": ROWS,
    "down backward": ROWS,
    "input": ROWS,
    "weights": WEIGHTS,
    "weights all": WEIGHTS,
}
FLOPS_IN_RCF = dict.fromkeys(CANDIDATES, 4) | {"down": 2, "down backward": 2, "weights all": 6}
TRIAL_SECONDS = 110  # for a worker's whole share


def runner(
    kernel: str, tiles: Tiles, inputs: Inputs
) -> Callable[[], Tensor | tuple[Tensor | None, ...]]:
    """A call of one kernel with one set of block sizes, its table of tiles included."""
    rows, counts, w1, w3, w2 = inputs.rows, inputs.counts, inputs.w1, inputs.w3, inputs.w2
    n_rows, ffn = rows.shape[0], w1.shape[1]
    weights = torch.linspace(0.2, 0.8, n_rows, device=rows.device)
    wide = torch.linspace(-1, 1, n_rows * 2 * ffn, device=rows.device).view(n_rows, 2 * ffn)
    wide = wide.sin_().to(rows.dtype)

    def table() -> Any:
        return tile_table(counts, n_rows, tiles.m)

    def weight_gradients(every: bool) -> Tensor:
        dw1, dw3, dw2 = (torch.empty_like(w) for w in (w1, w3, w2))
        products = (Product(wide, rows, (dw1, dw3)), Product(rows, narrow, (dw2,)))
        grouped_weight_gradients(products if every else products[:1], table(), tiles)
        return dw2 if every else dw3

    if kernel == "tuned":
        return lambda: swiglu_tuned(rows, counts, w1, w3, tiles)
    if kernel == "swiglu":
        return lambda: swiglu_persistent(rows, table(), w1, w3, tiles)
    narrow = wide[:, :ffn].contiguous()
    runs: dict[str, Callable[[], Tensor | tuple[Tensor | None, ...]]] = {
        "swiglu keep": lambda: swiglu_persistent(
            rows, table(), w1, w3, tiles, row_weights=weights, keep=True
        ),
        "swiglu_backward": lambda: swiglu_derivative_recomputed(
            narrow, rows, table(), w1, w3, tiles, row_weights=weights
        ),
        "down": lambda: grouped_rows(narrow, table(), (w2,), tiles, transposed=True),
        "down backward": lambda: grouped_rows(rows, table(), (w2,), tiles, transposed=False),
        "input": lambda: grouped_rows(wide, table(), (w1, w3), tiles, transposed=False),
        "weights": lambda: weight_gradients(False),
        "weights all": lambda: weight_gradients(True),
    }
    return runs[kernel]


def every() -> list[tuple[str, Tiles]]:
    """All candidates."""
    return [(kernel, tiles) for kernel, candidates in CANDIDATES.items() for tiles in candidates]


def try_share(part: int, parts: int) -> None:
    """Run every parts-th candidate once on few rows: its binary is then in Triton's cache, and it is known to end."""
    inputs = make_inputs(Shape(tokens=512), torch.device("cuda"), torch.bfloat16)
    for number, (kernel, tiles) in enumerate(every()):
        if number % parts != part:
            continue
        try:
            runner(kernel, tiles, inputs)()
            torch.cuda.synchronize()
            print(json.dumps({"number": number}), flush=True)
        except Exception as problem:
            reason = " ".join(str(problem).split())[:160]
            print(json.dumps({"number": number, "error": reason}), flush=True)


def try_all(workers: int) -> dict[int, str]:
    """Try all candidates in parallel processes; the numbers of those that fail or do not end, with the reason."""
    command = [sys.executable, "-m", "gptoss.bench.moe_sweep", "--try"]
    jobs = [
        # A compiler that fails prints its whole program on stderr; the reason comes back on stdout.
        subprocess.Popen(
            [*command, f"{i}/{workers}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(workers)
    ]
    failed = dict.fromkeys(range(len(every())), "no answer in the trial")
    deadline = time.monotonic() + TRIAL_SECONDS
    for job in jobs:
        try:
            told, _ = job.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            told, _ = job.communicate()
        for line in filter(lambda line: line.startswith("{"), told.splitlines()):
            result = json.loads(line)
            if "error" in result:
                failed[result["number"]] = result["error"]
            else:
                failed.pop(result["number"], None)
    return failed


def sweep(
    shape: Shape | None = None, workers: int | None = None, trial: bool = True
) -> list[dict[str, Any]]:
    """Try in parallel, then time each candidate and hold its result against the first of its kernel.

    Args:
        shape: the layer's sizes.
        workers: processes that try candidates.
        trial: False trusts that every candidate compiles and ends.

    Returns:
        One row a candidate: kernel, block sizes, ms, TFLOP/s, difference; or the error.
    """
    failed = try_all(workers or min(14, os.cpu_count() or 1)) if trial else {}
    shape = shape or Shape()
    inputs = make_inputs(shape, torch.device("cuda"), torch.bfloat16)
    n_rows = inputs.rows.shape[0]
    truth: dict[str, Tensor] = {}
    rows = []
    for number, (kernel, tiles) in enumerate(every()):
        row: dict[str, Any] = {"kernel": kernel, **asdict(tiles)}
        try:
            if number in failed:
                raise RuntimeError(failed[number])
            run = runner(kernel, tiles, inputs)
            out = run()
            first = out if isinstance(out, Tensor) else out[0]
            assert first is not None
            reference = truth.setdefault(kernel, first.float())
            row["difference"] = float(
                f"{(first.float() - reference).norm() / reference.norm():.1e}"
            )
            seconds = median_seconds(run, inputs.rows.device)
            flops = FLOPS_IN_RCF[kernel] * n_rows * shape.width * shape.ffn
            row |= {"ms": round(seconds * 1e3, 4), "tflops": round(flops / seconds / 1e12, 1)}
        except Exception as problem:  # the reason is the row; the other candidates still run
            row["error"] = " ".join(str(problem).split())[:160]
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    sizes = f"{row['m']}x{row['n']}x{row['k']} w{row['warps']} s{row['stages']} g{row['group']}"
    sizes += f" p{row['pieces']} x{row['per_sm']}{'' if row['flatten'] else ' unflattened'}"
    if "error" in row:
        return f"{row['kernel']:16}{sizes:42} {row['error']}"
    return f"{row['kernel']:16}{sizes:42} {row['ms']:7.3f} ms {row['tflops']:6.0f} TFLOP/s  {row['difference']:.0e}"


def main() -> None:
    """Command line: sweep, print, and write JSON where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--try", dest="share", help="internal: try one share, PART/PARTS")
    parser.add_argument("--no-trial", action="store_true", help="time at once")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    if arguments.share:
        try_share(*map(int, arguments.share.split("/")))
        return
    rows = sweep(trial=not arguments.no_trial)
    print("\nthe fastest of each:")
    for kernel in CANDIDATES:
        timed = [row for row in rows if row["kernel"] == kernel and "ms" in row]
        if timed:
            print(_line(min(timed, key=lambda row: row["ms"])))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
