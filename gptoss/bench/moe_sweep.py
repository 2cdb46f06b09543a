"""Block sizes of the expert kernels, timed one by one: where the table in `gptoss/kernels/tuning.py` comes from.

`python -m gptoss.bench.moe_sweep`. Compiling takes longer than timing, so worker processes fill Triton's cache first.

Shapes: N tokens, k experts a token, R = N·k routed rows, C model width, F ffn width, E experts.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptoss.bench.moe_inputs import Inputs, Shape, make_inputs
from gptoss.bench.roofline import median_seconds
from gptoss.kernels.expert_tiles import tile_table
from gptoss.kernels.grouped_gemm import (
    grouped_rows,
    grouped_weight_gradient,
    swiglu_derivative_kept,
)
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
    Tiles(128, 128, 64, 8, 3, pieces=4, form="tall"),
    Tiles(128, 128, 64, 8, 3, pieces=4, form="tall", group=4),
    Tiles(128, 128, 64, 8, 3, pieces=4, form="tall", flatten=False),
    Tiles(128, 128, 64, 4, 3, form="specialized"),
    Tiles(128, 128, 64, 4, 4, form="specialized"),
    Tiles(128, 128, 64, 4, 4, form="specialized", group=16),
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
    Tiles(128, 256, 64, 8, 3, pieces=4, form="tall"),
    Tiles(128, 256, 64, 8, 3, pieces=4, form="tall", group=4),
    Tiles(128, 256, 64, 4, 3, form="specialized"),
    Tiles(128, 256, 64, 4, 4, form="specialized"),
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
    "swiglu keep": [WIDE[i] for i in (0, 1, 3, 6, 7, 9, 11, 14)],
    "swiglu_backward": [
        Tiles(128, 128, 64, 8, 3, pieces=4),
        Tiles(128, 128, 64, 8, 4, pieces=4),
        Tiles(128, 64, 64, 4, 3, pieces=2, per_sm=2),
        Tiles(256, 64, 64, 8, 3, pieces=2),
    ],
    "derivative": [
        Tiles(128, 128, 64, 8, 3, pieces=4),
        Tiles(128, 128, 64, 8, 3, pieces=4, flatten=False),
        Tiles(128, 128, 64, 8, 3, pieces=4, registers=128, per_sm=2),
        Tiles(128, 128, 64, 8, 3, pieces=4, registers=128, per_sm=2, flatten=False),
        Tiles(128, 128, 64, 4, 3, pieces=4, per_sm=2),
        Tiles(128, 256, 64, 8, 3, pieces=4),
        Tiles(64, 128, 64, 4, 3, pieces=2, per_sm=2),
        Tiles(64, 128, 64, 4, 3, pieces=4, per_sm=3, registers=168),
        Tiles(128, 64, 64, 4, 3, pieces=2, per_sm=2),
    ],
    "down": ROWS,
    "input": ROWS,
    "weights": WEIGHTS,
    "weights_down": WEIGHTS,
}
FLOPS_IN_RCF = dict.fromkeys(CANDIDATES, 4) | dict.fromkeys(
    ("derivative", "down", "weights_down"), 2
)


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
        return tile_table(counts, n_rows, tiles.height)

    def weight_gradients(a: Tensor, b: Tensor, *like: Tensor) -> Tensor:
        outs = tuple(torch.empty_like(w) for w in like)
        grouped_weight_gradient(a, b, table(), outs, tiles)
        return outs[-1]

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
        "derivative": lambda: swiglu_derivative_kept(rows, table(), w2, wide, weights, tiles),
        "down": lambda: grouped_rows(narrow, table(), (w2,), tiles, transposed=True),
        "input": lambda: grouped_rows(wide, table(), (w1, w3), tiles, transposed=False),
        "weights": lambda: weight_gradients(wide, rows, w1, w3),
        "weights_down": lambda: weight_gradients(rows, narrow, w2),
    }
    return runs[kernel]


def every() -> Iterator[tuple[str, Tiles]]:
    """All candidates in a fixed order."""
    for kernel, candidates in CANDIDATES.items():
        for tiles in candidates:
            yield kernel, tiles


def compile_share(part: int, parts: int) -> None:
    """Run every parts-th candidate once on few rows, so that its binary lies in Triton's cache."""
    inputs = make_inputs(Shape(tokens=512), torch.device("cuda"), torch.bfloat16)
    for kernel, tiles in list(every())[part::parts]:
        try:
            runner(kernel, tiles, inputs)()
            torch.cuda.synchronize()
        except Exception:  # the timing run reports it
            continue


def sweep(shape: Shape | None = None, workers: int | None = None) -> list[dict[str, Any]]:
    """Compile in parallel, then time each candidate and hold its result against the first of its kernel.

    Returns:
        One row a candidate: kernel, block sizes, ms, TFLOP/s, difference; or the error.
    """
    workers = workers or min(12, os.cpu_count() or 1)
    command = [sys.executable, "-m", "gptoss.bench.moe_sweep", "--compile"]
    jobs = [subprocess.Popen([*command, f"{i}/{workers}"]) for i in range(workers)]
    for job in jobs:
        job.wait()
    shape = shape or Shape()
    inputs = make_inputs(shape, torch.device("cuda"), torch.bfloat16)
    n_rows = inputs.rows.shape[0]
    truth: dict[str, Tensor] = {}
    rows = []
    for kernel, tiles in every():
        row: dict[str, Any] = {"kernel": kernel, **asdict(tiles)}
        try:
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
    sizes += "" if row["form"] == "plain" else f" {row['form']}"
    sizes += f" r{row['registers']}" if row["registers"] else ""
    if "error" in row:
        return f"{row['kernel']:16}{sizes:42} {row['error']}"
    return f"{row['kernel']:16}{sizes:42} {row['ms']:7.3f} ms {row['tflops']:6.0f} TFLOP/s  {row['difference']:.0e}"


def main() -> None:
    """Command line: sweep, print, and write JSON where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--compile", help="internal: compile one share, PART/PARTS")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_share(*map(int, arguments.compile.split("/")))
        return
    rows = sweep()
    print("\nthe fastest of each:")
    for kernel in CANDIDATES:
        timed = [row for row in rows if row["kernel"] == kernel and "ms" in row]
        if timed:
            print(_line(min(timed, key=lambda row: row["ms"])))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
