"""The attention operator, measured: full and windowed, forward and backward, against flex_attention and SDPA.

`gptoss bench attention`. The sweep over tiles is in `attention_sweep.py`.

Shapes: B batch, T tokens, H query heads, K kv heads, D head_dim, W window.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from gptoss.bench.evidence import make_evidence
from gptoss.bench.timing import capture, median_seconds
from gptoss.kernels.attention import triton_attention
from gptoss.model.attention.blocked import blocked_attention
from gptoss.model.attention.flex import band_block_mask
from gptoss.model.attention.masks import count_visible_pairs
from gptoss.model.attention.reference import manual_causal_attention

COLUMNS = {
    "who": "by whom",
    "batch": "sequences",
    "tokens": "tokens T of each",
    "window": "visible keys a query, all earlier ones where empty",
    "forward_ms": "median time of the forward pass in ms",
    "both_ms": "median time of forward and backward in ms",
    "tflops": "TFLOP/s of forward and backward, counted by visible pairs",
    "against": "times faster than flex_attention on the same inputs, forward and backward",
    "windowed_against_full": "time of the windowed operator over the full one's, forward and backward",
    "error": "largest relative error of outputs and gradients against float64, small ragged shapes",
    "problem": "why there is no number",
}
CONVENTION = (
    "FLOPs: 4·D a visible pair and head forward, 10·D backward (five products, the recomputed scores among them); "
    "error: norm of the difference / norm of the float64 oracle's tensor, the largest over out, dq, dk, dv and the sink's "
    "gradient; GPU times are of CUDA graph replays, host time excluded"
)


class Shape(NamedTuple):
    """What is timed. The heads default to the production model's."""

    batch: int
    tokens: int
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 96


Attend = Callable[..., Tensor]


def measure(
    shapes: tuple[Shape, ...] | None = None,
    *,
    command: str = "gptoss bench attention",
    commit: str | None = None,
) -> dict[str, Any]:
    """Check the operator against float64, then time it beside what PyTorch has, full and through a window of 128.

    Args:
        shapes: what to time; 65,536 tokens at T = 4,096 and 32,768 on a GPU, small ones on a CPU.
        command, commit: for the evidence file.

    Returns:
        The evidence. On a CPU, the blocked path at small sizes in float32 instead of the kernels.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        shapes = shapes or (Shape(16, 4096), Shape(2, 32_768))
        runs: dict[str, Attend] = {
            "gptoss": triton_attention,
            "flex_attention": _flex(),
            "SDPA, no sink": _sdpa,
        }
        errors = {"gptoss": max(map(check, cases(torch.bfloat16)))}
    else:
        shapes = shapes or (Shape(1, 512, 4, 2, 32), Shape(1, 2048, 4, 2, 32))
        runs, errors = {"blocked": blocked_attention}, {}
    rows = []
    for shape in shapes:
        for who, attend in runs.items():
            full, windowed = (
                _row(who, attend, shape, window, device)
                for window in ((None, 128) if who != "SDPA, no sink" else (None, None))
            )
            if "both_ms" in full and "both_ms" in windowed:
                windowed["windowed_against_full"] = round(windowed["both_ms"] / full["both_ms"], 5)
            rows += [full, windowed] if windowed["window"] else [full]
    for row in rows:
        flex = next((r for r in rows if r["who"] == "flex_attention" and _same(r, row)), {})
        if "both_ms" in flex and "both_ms" in row:
            row["against"] = round(flex["both_ms"] / row["both_ms"], 3)
        if row["who"] in errors:
            row["error"] = errors[row["who"]]
    notes = [] if cuda else ["no GPU here: the blocked path in float32 at small sizes"]
    return make_evidence(
        "attention", "Attention, forward and backward", COLUMNS, rows,
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip


def make_inputs(
    shape: Shape, device: torch.device, dtype: torch.dtype, keys: int | None = None
) -> list[Tensor]:
    """q, k, v as the projections leave them (transposed views, k and v of one tensor), and a sink logit a head."""
    B, T, H, K, D = shape
    S = T if keys is None else keys
    q = torch.randn(B, T, H, D, device=device, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(B, S, 2, K, D, device=device, dtype=dtype).permute(2, 0, 3, 1, 4).unbind(0)
    sink = torch.randn(H, device=device)
    return [t.detach().requires_grad_() for t in (q, k, v, sink)]


class Case(NamedTuple):
    """A small ragged problem for the check: T queries, S keys, maybe padding on the left of the second row."""

    head_dim: int
    tokens: int
    keys: int
    window: int | None
    padded: bool
    dtype: torch.dtype


def cases(dtype: torch.dtype, head_dim: int = 96) -> list[Case]:
    """Causal, T < S with padding, W = 1 with a stride-0 gradient, and windows that are no multiple of a tile."""
    sizes = ((300, 300, None), (257, 400, None), (300, 300, 1), (333, 333, 100), (700, 700, 128), (600, 640, 300))  # fmt: skip
    return [
        Case(head_dim, T, S, window, S in (400, 640), dtype)
        for T, S, window in sizes
        if dtype != torch.float32 or window in (None, 100)
    ]


def check(case: Case) -> float:
    """The largest relative error of the kernels on CUDA against float64 over out, dq, dk, dv and the sink's gradient.

    NaN counts as infinite.
    """
    D, T, S, window, padded, dtype = case
    device = torch.device("cuda")
    torch.manual_seed(0)
    inputs = make_inputs(Shape(2, T, 6, 2, D), device, dtype, S)
    key_start = torch.tensor([0, 150], device=device) if padded else None
    do = torch.randn(2, 6, T, 2 * D, device=device, dtype=dtype)[..., D:]
    if window == 1:
        do = torch.ones(1, device=device, dtype=dtype).expand(2, 6, T, D)
    pairs = []
    attends: tuple[Attend, Attend] = (triton_attention, manual_causal_attention)
    for attend in attends:
        exact = attend is manual_causal_attention
        leaves = [(t.double() if exact else t).detach().requires_grad_() for t in inputs]
        q, k, v, sink = leaves
        out = attend(q, k, v, window, sink, key_start=key_start)
        pairs.append([out, *torch.autograd.grad(out, leaves, do.to(out.dtype))])
    # a window of 1 has a small dq: rounding is held against the largest tensor there
    floor = 1e-3 * max(t.norm() for t in pairs[1]).item()
    errors = [
        ((a.double() - b).norm() / max(b.norm().item(), floor)).nan_to_num(torch.inf).item()
        for a, b in zip(*pairs, strict=True)
    ]
    return float(f"{max(errors):.2e}")


def graph_seconds(run: Callable[[], object]) -> float:
    """Median time of a call's GPU work, replayed as a CUDA graph: what it takes when the host is ahead."""
    graph = capture(run)
    return statistics.median(
        median_seconds(graph.replay, torch.device("cuda"), repeats=10) for _ in range(2)
    )


def _row(
    who: str, attend: Attend, shape: Shape, window: int | None, device: torch.device
) -> dict[str, Any]:
    B, T, H, _, D = shape
    row: dict[str, Any] = {"who": who, "batch": B, "tokens": T, "window": window}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = make_inputs(shape, device, dtype)
    do = torch.randn(B, T, H, D, device=device, dtype=dtype).transpose(1, 2)
    seconds = graph_seconds if device.type == "cuda" else partial(_few_seconds, device)

    def forward() -> Tensor:
        return attend(*inputs[:3], window, inputs[3])

    def both() -> object:
        return torch.autograd.grad(forward(), inputs, do, allow_unused=True)

    try:
        with torch.no_grad():
            row["forward_ms"] = round(seconds(forward) * 1e3, 4)
        row["both_ms"] = round(seconds(both) * 1e3, 4)
        flops = 14 * D * H * B * count_visible_pairs(T, window)
        row["tflops"] = round(flops / row["both_ms"] / 1e9, 1)
    except Exception as problem:  # the reason is the row; the others still run
        row["problem"] = " ".join(str(problem).split())[:200]
    return row


def _few_seconds(device: torch.device, run: Callable[[], object]) -> float:
    return median_seconds(run, device, repeats=3)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("batch", "tokens", "window"))


def _flex() -> Attend:
    """flex_attention compiled, its block masks made beforehand, and the sink through its log-sum-exp."""
    compiled: dict[tuple[int, int | None], Attend] = {}

    def compile_for(T: int, window: int | None, device: torch.device) -> Attend:
        mask = band_block_mask(T, T, window, None, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            out, aux = flex_attention(
                q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
            assert aux.lse is not None  # it was asked for
            return (out * torch.sigmoid(aux.lse - sink[:, None]).unsqueeze(-1)).to(q.dtype)

        return torch.compile(attend, fullgraph=True, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor, window: int | None, sink: Tensor) -> Tensor:
        key = (q.shape[2], window)
        if key not in compiled:
            compiled[key] = compile_for(*key, q.device)
        return compiled[key](q, k, v, sink)

    return run


def _sdpa(q: Tensor, k: Tensor, v: Tensor, window: int | None, sink: Tensor) -> Tensor:
    """FlashAttention as PyTorch ships it: causal and grouped, but it knows neither windows nor sinks."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
