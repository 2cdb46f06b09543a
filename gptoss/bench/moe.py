"""The expert kernels, measured: five versions of the gated half, and the whole routed layer, forward and backward.

`gptoss bench moe`. The sweep over block sizes is in `moe_sweep.py`.

Shapes: N tokens, k experts a token, R = N·k routed rows, C model width, F ffn width, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.bench.evidence import make_evidence
from gptoss.bench.moe_inputs import Inputs, Shape, check, make_inputs
from gptoss.bench.timing import seconds_in_turns
from gptoss.kernels.expert_layer import grouped_experts
from gptoss.kernels.loop import grouped_linear_loop, grouped_swiglu_loop
from gptoss.kernels.swiglu import grouped_swiglu
from gptoss.kernels.versions import choose
from gptoss.model.moe.dispatch import combine_rows, gather_rows, plan_dispatch

COLUMNS = {
    "stage": "what is computed",
    "who": "by whom",
    "rows": "routed rows R",
    "flops": "floating-point operations of the products, recomputation not counted",
    "bytes": "fewest bytes to move: inputs read once, results written once",
    "ms": "GPU's time of a call in ms, median of five turns",
    "host_ms": "host's time to queue a call in ms, median of five turns",
    "tflops": "TFLOP/s reached",
    "against": "times faster than the stage's baseline, the row of grouped_mm with compiled SiLU·mul",
    "against_dense": "speed as a share of the dense product's",
    "error": "relative error of the outputs against float32, or why there is no number",
    "gradient_error": "largest relative error of the gradients against float32",
}
DENSE = "dense cuBLAS product of equal FLOPs"
CONVENTION = (
    "gated half forward 4RCF FLOPs, layer forward 6RCF, backward twice the forward; "
    "ten calls in a row, queued before the first begins, the contenders of a stage in turns; "
    "error = norm of the difference / norm of the float32 oracle's result"
)


def measure(
    shape: Shape | None = None, *, command: str = "gptoss bench moe", commit: str | None = None
) -> dict[str, Any]:
    """Check every version against the oracle, then time it, on the GPU in bfloat16 or on this CPU what runs there.

    Args:
        shape: the sizes to time; the production model's (65,536 rows) on a GPU, small ones on a CPU.
        command, commit: for the evidence file.

    Returns:
        The evidence. A version that fails is a row with the reason.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    if shape is None:
        shape = Shape() if cuda else Shape(tokens=256, experts=4, width=64, ffn=128)
    errors = check(device, dtype)
    inputs = make_inputs(shape, device, dtype)
    n_rows = shape.tokens * shape.k
    stages = (
        ("gated half, forward", 4, _forward(inputs, cuda), "grouped_mm + compiled SiLU·mul"),
        ("gated half, forward + backward", 12, _half(inputs, cuda), "grouped_mm, compiled"),
        (
            "routed layer, forward + backward",
            18,
            _layer(inputs, shape, cuda),
            "grouped_mm, compiled",
        ),
    )
    rows: list[dict[str, Any]] = []
    for stage, factor, runs, baseline in stages:
        flops = factor * n_rows * shape.width * shape.ffn
        timed: list[dict[str, Any]] = []
        for who, took in seconds_in_turns(runs, device).items():
            row: dict[str, Any] = {"stage": stage, "who": who, "rows": n_rows, "flops": flops}
            row |= errors["layer" if "layer" in stage else "half"].get(who, {})
            if not stage.endswith("backward"):
                row.pop("gradient_error", None)
                moved = n_rows * (shape.width + shape.ffn) + 2 * inputs.w1.numel()
                row["bytes"] = dtype.itemsize * moved
            if isinstance(took, Exception):  # the reason is the row; the other versions still run
                row["error"] = " ".join(str(took).split())[:200]
            else:
                row |= {
                    "ms": round(took.seconds * 1e3, 4),
                    "host_ms": round(took.host_seconds * 1e3, 3),
                    "tflops": round(flops / took.seconds / 1e12, 1),
                }
            timed.append(row)
        for column, other in (("against", baseline), ("against_dense", DENSE)):
            base = next((row.get("ms") for row in timed if row["who"] == other), None)
            for row in timed:
                if base and "ms" in row:
                    row[column] = round(base / row["ms"], 3)
        rows += timed
    notes = (
        [] if cuda else ["no GPU here: small sizes in float32, without Triton's compiled kernels"]
    )
    return make_evidence(
        "moe", "Expert kernels", COLUMNS, rows,
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip


def _forward(inputs: Inputs, cuda: bool) -> dict[str, Callable[[], object]]:
    rows, counts, w1, w3 = inputs.rows, inputs.counts, inputs.w1, inputs.w3
    runs: dict[str, Callable[[], object]] = {
        "loop": lambda: grouped_swiglu_loop(rows, counts, w1, w3)
    }
    if not cuda:
        return runs
    dense = torch.randn(2 * w1.shape[1], w1.shape[2], device=rows.device, dtype=rows.dtype)
    packed, ends = torch.cat((w1, w3), 1).transpose(1, 2), counts.cumsum(0).int()

    def grouped() -> Tensor:
        gate, up = F.grouped_mm(rows, packed, offs=ends).chunk(2, -1)
        return F.silu(gate) * up

    runs |= {
        DENSE: lambda: rows @ dense.t(),
        "grouped_mm alone": lambda: F.grouped_mm(rows, packed, offs=ends),
        "grouped_mm + eager SiLU·mul": grouped,
        "grouped_mm + compiled SiLU·mul": torch.compile(grouped),
    }
    for version in ("documents", "tuned", "persistent"):
        runs[version] = partial(grouped_swiglu, rows, counts, w1, w3, version)
    return runs


def _half(inputs: Inputs, cuda: bool) -> dict[str, Callable[[], object]]:
    counts = inputs.counts
    rows, w1, w3 = (t.detach().requires_grad_() for t in (inputs.rows, inputs.w1, inputs.w3))
    grad = torch.randn(rows.shape[0], w1.shape[1], device=rows.device, dtype=rows.dtype)

    def both_ways(
        forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]
    ) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, grad)

    leaves = (rows, w1, w3)
    runs = {"loop": both_ways(lambda: grouped_swiglu_loop(rows, counts, w1, w3), leaves)}
    if not cuda:
        return runs
    packed = torch.cat((inputs.w1, inputs.w3), 1).transpose(1, 2).requires_grad_()
    ends = counts.cumsum(0).int()

    @torch.compile
    def grouped(rows: Tensor, packed: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, packed, offs=ends).chunk(2, -1)
        return F.silu(gate) * up

    runs["grouped_mm, compiled"] = both_ways(lambda: grouped(rows, packed), (rows, packed))
    for version in ("documents", "tuned", "persistent"):
        runs[version] = both_ways(partial(grouped_swiglu, rows, counts, w1, w3, version), leaves)
    return runs


def _layer(inputs: Inputs, shape: Shape, cuda: bool) -> dict[str, Callable[[], object]]:
    """The dispatch included: from token rows and expert indices to token rows, and back."""
    e, k, indices = shape.experts, shape.k, inputs.indices
    x, weights, w1, w3, w2 = (
        t.detach().requires_grad_()
        for t in (inputs.x, inputs.weights, inputs.w1, inputs.w3, inputs.w2)
    )
    grad = torch.randn_like(inputs.x)
    leaves = (x, weights, w1, w3, w2)

    def loop() -> Tensor:
        plan = plan_dispatch(indices, e, "stacked")
        hidden = grouped_swiglu_loop(gather_rows(x, plan, k), plan.counts, w1, w3)
        return combine_rows(grouped_linear_loop(hidden, plan.counts, w2), weights, plan)

    runs: dict[str, Callable[[], object]] = {
        "loop": lambda: torch.autograd.grad(loop(), leaves, grad)
    }
    if not cuda:
        return runs
    packed = torch.cat((inputs.w1, inputs.w3), 1).transpose(1, 2).requires_grad_()

    @torch.compile
    def grouped(x: Tensor, weights: Tensor, packed: Tensor, w2: Tensor) -> Tensor:
        plan = plan_dispatch(indices, e, "grouped_mm")
        ends = plan.counts.cumsum(0).int()
        gate, up = F.grouped_mm(gather_rows(x, plan, k), packed, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends)
        return combine_rows(y, weights.to(y.dtype), plan)

    theirs = (x, weights, packed, w2)
    runs["grouped_mm, compiled"] = lambda: torch.autograd.grad(grouped(*theirs), theirs, grad)

    def ours(recompute: bool) -> Callable[[], object]:
        def run() -> object:
            plan = plan_dispatch(indices, e, "triton_grouped")
            out = grouped_experts(x, weights, *plan, w1, w3, w2, recompute=recompute)
            return torch.autograd.grad(out, leaves, grad)

        return run

    runs["grouped_experts"] = ours(False)
    runs["grouped_experts recomputing"] = ours(True)
    choose(inputs.x)  # says once which version runs
    return runs
