"""The vocabulary head with its cross-entropy, measured: chunked in place, chunked through autograd, and whole.

`gptoss bench head`. `python -m gptoss.bench.head --sweep --out FOLDER` tries the kernel's blocks.

Shapes: N tokens, C model width, V vocabulary.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.bench.evidence import format_table, make_evidence
from gptoss.bench.timing import median_seconds
from gptoss.model.head import linear_cross_entropy

COLUMNS = {
    "who": "how the loss and both gradients are computed",
    "tokens": "rows of hidden states",
    "chunk": "rows of logits alive at once",
    "ms": "median time of forward and backward in ms",
    "tflops": "TFLOP/s of the three matrix products",
    "peak_gib": "peak memory above what was there before, in GiB",
    "error": "largest relative error of loss and gradients against float64, small shapes",
    "problem": "why there is no number",
}
CONVENTION = "FLOPs: 6·N·C·V, three products; recomputation not counted"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure(
    tokens: int | None = None, *, command: str = "gptoss bench head", commit: str | None = None
) -> dict[str, Any]:
    """Check the head in bf16 against float64, then time it beside its alternatives at the production sizes.

    Args:
        tokens: rows; 65,536 on a GPU, a few on a CPU.
        command, commit: for the evidence file.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    N, C, V = (tokens or 65_536, 768, 128_000) if cuda else (tokens or 512, 64, 4000)
    chunks = (2048, 4096, 8192) if cuda else (128,)
    runs: list[tuple[str, int, int, Loss]] = [
        ("gptoss", N, chunk, partial(_ours, chunk)) for chunk in chunks
    ]
    autograd = "compiled chunks through autograd" if cuda else "chunks through autograd"
    runs.append((autograd, N, N // 8, _Chunked(N // 8, cuda)))
    whole = min(N, 16_384)
    runs.append(("whole logits", whole, whole, _whole))
    error = check(device)
    rows = []
    for who, n, chunk, loss in runs:
        row: dict[str, Any] = {"who": who, "tokens": n, "chunk": chunk}
        if who == "gptoss":
            row["error"] = error
        try:
            row |= _time(loss, n, C, V, device)
        except Exception as problem:  # the reason is the row; the others still run
            row["problem"] = " ".join(str(problem).split())[:200]
        rows.append(row)
    notes = [] if cuda else ["no GPU here: small sizes in float32, the PyTorch path"]
    return make_evidence(
        "head", "Head and cross-entropy, forward and backward", COLUMNS, rows,
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip


def check(device: torch.device) -> float:
    """Relative error of loss, dh and dW in the device's training dtype against float64; ragged chunks, ignored rows."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    worst = 0.0
    for n, v in ((1000, 5000), (777, 128_000 if cuda else 999)):
        hidden = torch.randn(n, 256, device=device).to(dtype).requires_grad_()
        weight = (0.1 * torch.randn(v, 256, device=device)).to(dtype).requires_grad_()
        targets = torch.randint(0, v, (n,), device=device)
        targets[::7] = -100
        loss = linear_cross_entropy(hidden, weight, targets, chunk_size=300)
        found = [loss, *torch.autograd.grad(3 * loss, (hidden, weight))]
        wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
        exact = F.cross_entropy(wide[0] @ wide[1].T, targets)
        truth = [exact, *torch.autograd.grad(3 * exact, wide)]
        for a, b in zip(found, truth, strict=True):
            error = (a.double() - b).norm() / b.norm()
            worst = max(worst, error.nan_to_num(torch.inf).item())
    return float(f"{worst:.2e}")


def _time(loss: Loss, n: int, C: int, V: int, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    hidden = torch.randn(n, C, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    hidden.requires_grad_()
    weight = (0.02 * torch.randn(V, C, device=device)).requires_grad_()
    targets = torch.randint(0, V, (n,), device=device)

    def run() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            loss(hidden, weight, targets).backward()

    run()
    row: dict[str, Any] = {}
    if cuda:
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    seconds = median_seconds(run, device, repeats=5)
    return row | {
        "ms": round(seconds * 1e3, 2),
        "tflops": round(6 * n * C * V / seconds / 1e12, 1),
    }


def _ours(chunk: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, chunk_size=chunk)


def _whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets)


class _Chunked:
    """Each chunk's loss backpropagated at once by autograd, compiled on a GPU: what one writes first."""

    def __init__(self, chunk: int, compiled: bool) -> None:
        def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            logits = (hidden @ weight.T.to(hidden.dtype)).float()
            return F.cross_entropy(logits, targets, reduction="sum")

        self.chunk = chunk
        self.sum: Loss = torch.compile(loss) if compiled else loss

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows = hidden.detach().requires_grad_()
        total = torch.zeros((), device=hidden.device)
        for h, t in zip(rows.split(self.chunk), targets.split(self.chunk), strict=True):
            part = self.sum(h, weight, t) / targets.numel()
            part.backward()
            total += part.detach()
        assert rows.grad is not None  # every chunk wrote its part
        return (hidden * rows.grad).sum() + total  # its backward hands rows.grad on


def sweep() -> list[dict[str, Any]]:
    """The cross-entropy kernel alone: block and warps, for a chunk of 4,096 rows of 128,000 logits in bf16."""
    from gptoss.bench.attention import graph_seconds
    from gptoss.kernels.cross_entropy_kernel import launch_cross_entropy

    logits = torch.randn(4096, 128_000, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 128_000, (4096,), device="cuda")
    scale = torch.ones((), device="cuda")
    rows = []
    for block, warps in ((4096, 4), (4096, 8), (8192, 8), (8192, 16), (16_384, 16), (16_384, 32), (32_768, 32), (8192, 4)):  # fmt: skip
        row: dict[str, Any] = {"block": block, "warps": warps}
        try:
            seconds = graph_seconds(
                lambda b=block, w=warps: launch_cross_entropy(logits, targets, scale, -100, True, b, w)  # type: ignore[misc]  # bound now
            )  # fmt: skip
            row |= {"ms": round(seconds * 1e3, 4), "tb_per_s": round(2 * logits.nbytes / seconds / 1e12, 2)}  # fmt: skip
        except Exception as problem:
            row["problem"] = " ".join(str(problem).split())[:100]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"table": measure()}
    print(format_table(result["table"]), flush=True)
    if arguments.sweep and torch.cuda.is_available():
        result["sweep"] = sweep()
        for row in result["sweep"]:
            print(*row.items(), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "head.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
