"""The training step, measured: tokens a second, MFU and peak memory, beside transformers' GptOss of the same sizes.

`gptoss bench step`.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch

from gptoss.bench.evidence import make_evidence
from gptoss.bench.release import release_memory
from gptoss.bench.roofline import matmul_rate
from gptoss.bench.transformers_sizes import gpt_oss_config
from gptoss.config import ModelConfig, RunConfig, TrainingConfig, load_config
from gptoss.training.assembly import Assembly, assemble
from gptoss.training.distributed import join_world
from gptoss.training.flops import training_flops_per_token
from gptoss.training.preflight import check_recording
from gptoss.training.recorded_step import ORDINARY_STEPS, RecordedStep
from gptoss.training.step import TrainStep

COLUMNS = {
    "who": "what was run",
    "dispatch": "how the experts are run",
    "attention": "attention backend",
    "batch": "sequences at once",
    "seq_len": "tokens of a sequence",
    "every": "every which block is checkpointed; 0 none",
    "cuda_graph": "whether the step is recorded as a CUDA graph and replayed",
    "ms": "median time of a step in ms: forward, backward, clip and AdamW",
    "tokens_per_s": "trained tokens a second",
    "mfu": "model FLOPs utilisation of the matmul rate measured in the same run",
    "peak_gib": "peak memory of the step in GiB",
    "loss": "loss of the last step",
    "error": "why there is no number",
}
CONVENTION = (
    "FLOPs a token = 6 x active parameters + attention by visible pairs; recomputation not counted; "
    "MFU against the bf16 8192^3 matmul rate of the same run"
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table."""

    dispatch: str = "triton_grouped"
    attention: str = "auto"
    batch: int = 8
    every: int = 0
    cuda_graph: bool = False


PRODUCTION = (
    Variant(),
    Variant(cuda_graph=True),
    Variant(every=3),
    Variant(every=1),
    Variant(batch=2),
    Variant(batch=2, cuda_graph=True),
    Variant(batch=16),
    Variant(batch=32),
    Variant(batch=32, cuda_graph=True),
    Variant(dispatch="grouped_mm", batch=16),
    Variant(dispatch="stacked"),
)


SMALL = tuple(Variant(dispatch=dispatch, batch=2) for dispatch in ("stacked", "grouped_mm"))


def default_config() -> str:
    """The production run on a GPU; the tiny one elsewhere, where a production step takes minutes."""
    return "pretrain_a100_502m" if torch.cuda.is_available() else "tiny"


def measure(
    variants: tuple[Variant, ...] | None = None,
    *,
    config: str | None = None,
    seq_len: int | None = None,
    steps: int = 8,
    baselines: bool = True,
    command: str = "gptoss bench step",
    commit: str | None = None,
) -> dict[str, Any]:
    """Time training steps of a configuration, one row a variant.

    Args:
        variants: what to run; the production run's on a GPU, two dispatches on a CPU.
        config: a configuration by name or path; `default_config()` when left out.
        seq_len: tokens of a sequence; the configuration's own unless given.
        steps: timed steps, after four untimed ones.
        baselines: also time transformers' GptOss, if it is installed and a GPU is there.
        command, commit: for the evidence file.

    Returns:
        The evidence. A variant that fails is a row with the reason.

    Raises:
        ValueError: a number of steps or tokens that is not positive, or a configuration that is none.
    """
    cuda = torch.cuda.is_available()
    config = config or default_config()
    variants = (PRODUCTION if cuda else SMALL) if variants is None else variants
    run = load_config(config)
    length = run.model.max_seq_len if seq_len is None else seq_len
    if steps < 1 or length < 1 or any(variant.batch < 1 for variant in variants):
        raise ValueError(
            f"expected steps, seq_len and batch of at least 1, got {steps} and {length}"
        )
    peak = matmul_rate() if cuda else None
    rows = []
    for shape, group in groupby(variants, _shape):
        with join_world() as world:
            parts = None  # one model for the variants of a shape
            for variant in group:
                row: dict[str, Any] = {"who": "gptoss", "seq_len": length, **dataclasses.asdict(variant)}  # fmt: skip
                try:
                    check_recording(_configure(run, variant), world)
                    parts = parts or assemble(_configure(run, shape), world, draw_on=world.device)
                    row |= _time_variant(parts, variant, length, steps, peak)
                except Exception as error:  # the reason is the row; the other variants still run
                    row["error"] = " ".join(str(error).split())[:200]
                rows.append(row)
                print(_line(row), flush=True)
            del parts
        release_memory()
    if baselines and cuda:
        for batch in (8,):  # 16 would take more than the memory of one H200
            row = {
                "who": "transformers GptOss, flex + grouped_mm",
                "batch": batch,
                "seq_len": length,
            }
            try:
                row |= _time_transformers(run.model, batch, length, steps, peak)
            except Exception as error:  # as above
                row["error"] = " ".join(str(error).split())[:200]
            torch.set_float32_matmul_precision("highest")  # PyTorch's default again
            release_memory()
            rows.append(row)
            print(_line(row), flush=True)
    notes = [f"no GPU here: the {config} configuration on the CPU; no rate to hold it against"]
    if peak is not None:
        notes = [f"bf16 8192^3 matmul in this run: {peak / 1e12:.0f} TFLOP/s"]
    return make_evidence(
        "training_step",
        f"Training step, {config}, T = {length}",
        COLUMNS,
        rows,
        command=command,
        convention=CONVENTION,
        notes=notes,
        commit=commit,
    )


def _shape(variant: Variant) -> Variant:
    """The variant without what can be switched on a built model."""
    return dataclasses.replace(variant, every=0, cuda_graph=False)


def _configure(run: RunConfig, variant: Variant) -> RunConfig:
    model = dataclasses.replace(
        run.model, moe_dispatch=variant.dispatch, attention_backend=variant.attention
    )
    training = dataclasses.replace(
        run.training,
        micro_batch_size=variant.batch,
        gradient_accumulation_steps=1,
        grad_checkpoint=False,
        compile_mode="default",
        cuda_graph=variant.cuda_graph,
    )
    return RunConfig(model, training, run.data)


def _time_variant(
    parts: Assembly, variant: Variant, length: int, steps: int, peak: float | None
) -> dict[str, Any]:
    model = parts.model
    model.enable_gradient_checkpointing(variant.every)
    assert isinstance(parts.take_step, TrainStep)
    take_step = RecordedStep(parts.take_step) if variant.cuda_graph else parts.take_step
    device = model.embed.weight.device
    tokens = torch.randint(model.cfg.vocab_size, (1, variant.batch, length + 1), device=device)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    loss = 0.0

    def step() -> None:
        nonlocal loss
        loss = take_step(inputs, targets).wait().loss

    flops = training_flops_per_token(model.cfg, model.num_active_parameters(), length)
    return _time(step, steps, variant.batch * length, flops, peak) | {"loss": round(loss, 3)}


def _time_transformers(
    cfg: ModelConfig, batch: int, length: int, steps: int, peak: float | None
) -> dict[str, Any]:
    """What a user would pick instead: top 3 of 8 experts, since GptOss has no shared one.

    TF32 is allowed, as its users do: autocast leaves grouped_mm's experts in fp32.
    """
    from transformers import GptOssForCausalLM

    torch.set_float32_matmul_precision("high")

    theirs = gpt_oss_config(cfg, cfg.eval_max_seq_len)
    model = GptOssForCausalLM._from_config(
        theirs, attn_implementation="flex_attention", experts_implementation="grouped_mm"
    ).cuda()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=TrainingConfig().lr, fused=True)
    tokens = torch.randint(0, cfg.vocab_size, (batch, length), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    with torch.device("meta"):
        from gptoss.model.transformer import GPTOSS

        active = GPTOSS(cfg).num_active_parameters()
    return _time(step, steps, batch * length, training_flops_per_token(cfg, active, length), peak)


def _time(
    step: Callable[[], None], steps: int, tokens: int, flops: float, peak: float | None
) -> dict[str, Any]:
    for _ in range(ORDINARY_STEPS):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step()  # here a recorded step is recorded, and its memory counted: a replay allocates nothing
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()  # waits for its result
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    row = {"ms": round(seconds * 1e3, 2), "tokens_per_s": round(tokens / seconds)}
    if peak is not None:
        row["mfu"] = round(tokens / seconds * flops / peak, 4)
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return row


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{key}={value}" for key, value in row.items())
