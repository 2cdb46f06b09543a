"""The fast path against the oracle's over a short training: does anything but rounding tell their losses apart?

`gptoss bench agreement`. Both train the same model on the same real text from the same weights: one with the fast
attention and expert kernels, compiled, in bf16; the other with the dense float32 attention and the loop over experts,
in fp32 and eager. Rounding sends the two on different ways, so single steps differ; their means must not.

The learning rate is a third of what the model bears. At 1e-3, seen on one NVIDIA H200 at commit 08b1416, the
oracle alone, its first weights changed by a thousandth or less, ends 200 steps about a tenth of a nat away from itself, and the
fast path differs from itself in two runs by more: no band of use could be kept there.
"""

import dataclasses
import gc
import statistics
from typing import Any

import torch
from torch import Tensor

from gptoss.bench.evidence import make_evidence
from gptoss.bench.passkey import HELD_OUT
from gptoss.config import ModelConfig, RunConfig, TrainingConfig, load_config
from gptoss.inference.filler import read_filler
from gptoss.pretrained import load_pretrained
from gptoss.training.assembly import assemble
from gptoss.training.distributed import World

COLUMNS = {
    "steps": "last step of a stretch of steps",
    "fast": "mean loss over the stretch on the fast path, in nats a token",
    "oracle": "mean loss over the stretch on the oracle's path, in nats a token",
    "difference": "fast minus oracle",
    "largest": "largest difference of a single step in the stretch, without its sign",
}
BAND = 0.03  # nats a token, on the mean of a stretch
STRETCH = 20


def measure(
    steps: int = 200,
    *,
    batch: int | None = None,
    length: int | None = None,
    command: str = "gptoss bench agreement",
    commit: str | None = None,
) -> dict[str, Any]:
    """Train twice and compare.

    Args:
        steps: of each training, a multiple of 20.
        batch, length: sequences of a step and their tokens; 8 of 512 on a GPU, 2 of 64 on a CPU.
        command, commit: for the evidence file.

    Returns:
        The evidence: a row for each 20 steps.

    Raises:
        ValueError: steps is not a multiple of 20.
    """
    if steps < STRETCH or steps % STRETCH:
        raise ValueError(f"steps = {steps}: expected a multiple of {STRETCH}")
    cuda = torch.cuda.is_available()
    batch, length = batch or (8 if cuda else 2), length or (512 if cuda else 64)
    base = load_config("nano").model
    if not cuda:
        base = dataclasses.replace(base, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, n_layers=2, ffn_dim=32)  # fmt: skip
    fast = dataclasses.replace(
        base, moe_dispatch="triton_grouped" if cuda else "grouped_mm", attention_backend="auto"
    )
    oracle = dataclasses.replace(
        base, moe_dispatch="stacked", attention_backend="reference", dtype="fp32"
    )
    data = _tokens(steps, batch, length)
    losses = [_train(fast, data, compiled=cuda), _train(oracle, data, compiled=False)]
    rows = []
    for start in range(0, steps, STRETCH):
        ours, theirs = (one[start : start + STRETCH] for one in losses)
        mean_ours, mean_theirs = statistics.fmean(ours), statistics.fmean(theirs)
        rows.append(
            {
                "steps": start + STRETCH,
                "fast": round(mean_ours, 5),
                "oracle": round(mean_theirs, 5),
                "difference": round(mean_ours - mean_theirs, 5),
                "largest": round(max(abs(a - b) for a, b in zip(ours, theirs, strict=True)), 5),
            }
        )
    worst = max(abs(row["difference"]) for row in rows)
    notes = [
        f"largest difference of a mean: {worst:.4f} nats; the stated band is {BAND}: {'inside' if worst < BAND else 'OUTSIDE'}",
        f"{batch} sequences of {length} tokens a step; fast: {fast.moe_dispatch}, {fast.dtype}; oracle: stacked, dense, fp32",
    ]
    return make_evidence(
        "agreement", "Losses of the fast path and of the oracle's", COLUMNS, rows,
        command=command, notes=notes, commit=commit,
    )  # fmt: skip


def _tokens(steps: int, batch: int, length: int) -> Tensor:
    """(steps, 1, batch, length + 1) windows of real text at places drawn from a seed."""
    _, tokenizer = load_pretrained("nano")
    text = torch.from_numpy(read_filler(tokenizer, HELD_OUT, 100_000))
    places = torch.randint(len(text) - length, (steps, 1, batch, 1), generator=torch.Generator().manual_seed(0))  # fmt: skip
    return text[places + torch.arange(length + 1)]


def _train(model: ModelConfig, data: Tensor, compiled: bool) -> list[float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = TrainingConfig(
        micro_batch_size=data.shape[2],
        gradient_accumulation_steps=1,
        total_steps=len(data),
        warmup_steps=20,
        lr=3e-4,
        grad_checkpoint=False,
        compile=compiled,
        compile_mode="default",
    )
    built = assemble(RunConfig(model, training), World(device))
    losses = []
    for step in data.to(device):
        losses.append(built.take_step(step[..., :-1], step[..., 1:]).wait().loss)
    del built
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return losses
