"""How much memory a run needs, predicted from its configuration before anything is allocated (chapter 11).

`kept_tensors` lists what waits for the backward pass, `memory_moments` adds it up over a step; here are the questions
that a user asks. The source documents' estimate stands beside them under its own name.

Shapes: B batch, T tokens, C model width, E experts, F ffn width, V vocabulary.
"""

import torch

from gptoss.config import ModelConfig, TrainingConfig
from gptoss.model.attention.functional import resolve_backend
from gptoss.training.kept_tensors import Setting, check_counts
from gptoss.training.memory_documents import assert_fits_in_available_gpu, estimate_model_memory_gb
from gptoss.training.memory_inference import InferenceMemory, predict_inference_memory
from gptoss.training.memory_measured import PeakMeter, measure_training_peak
from gptoss.training.memory_moments import (
    LOGIT_BYTES,
    Moment,
    Step,
    TrainingMemory,
    step_moments,
)
from gptoss.training.parameter_counts import count_parameters

__all__ = [
    "InferenceMemory",
    "Moment",
    "PeakMeter",
    "TrainingMemory",
    "assert_fits_in_available_gpu",
    "count_parameters",
    "estimate_model_memory_gb",
    "largest_micro_batch",
    "measure_training_peak",
    "predict_inference_memory",
    "predict_run_memory",
    "predict_training_memory",
]

OPTIMIZER_BYTES = {"adamw": 8, "sgd": 0}  # of one parameter: Adam's two moments in fp32
CUBLAS_WORKSPACE = 32 * 2**20  # what cuBLAS takes from PyTorch's allocator on Hopper


def predict_training_memory(
    config: ModelConfig,
    *,
    batch: int,
    seq_len: int | None = None,
    every: int = 0,
    dtype: str | None = None,
    loss_chunk: int = 4096,
    dispatch: str | None = None,
    backend: str | None = None,
    optimizer: str = "adamw",
    compiled: bool = False,
    accumulation: int = 1,
    parallel: str = "ddp",
    world_size: int = 1,
    recorded: bool = False,
    device: str = "cuda",
) -> TrainingMemory:
    """Predict the bytes alive at each moment of a training step, in one process.

    Weights, gradients and Adam's moments take 4 + 4 + 8 bytes a parameter. A block keeps what its operations' gradients
    read; a checkpointed block keeps its input alone and is made again in its backward pass.

    Args:
        config: the architecture.
        batch: B, sequences of one micro-batch.
        seq_len: T, tokens; `config.max_seq_len` when left out.
        every: blocks 0, every, 2·every, … are checkpointed; 0 is off.
        dtype: "bf16" (autocast over fp32 weights) or "fp32"; the configuration's when left out.
        loss_chunk: tokens whose logits exist at once.
        dispatch, backend: the configuration's when left out.
        optimizer: "adamw" (fused) or "sgd" (no state).
        compiled: whether blocks run through torch.compile.
        accumulation: micro-batches of a step; with several, gradients exist all along.
        parallel, world_size: "ddp" holds everything in every process, "fsdp2" a share.
        recorded: whether the step is a CUDA graph, beside whose memory a validation finds its own (an upper bound).
        device: "cuda" or "cpu": what the backend "auto" stands for.

    Returns:
        Every moment in order; `.gib` is the peak in GiB, `.peak` its parts in bytes, `.table()` a page of it.

    Raises:
        ValueError: a number below 1 (every: below 0), or an unknown name.

    Source: chapter 11.
    """
    seq_len = config.max_seq_len if seq_len is None else seq_len
    dtype = dtype or config.dtype
    dispatch = dispatch or config.moe_dispatch
    check_counts(
        batch=batch,
        seq_len=seq_len,
        loss_chunk=loss_chunk,
        accumulation=accumulation,
        world_size=world_size,
    )
    if every < 0:
        raise ValueError(f"every = {every}: expected 0 (off) or a positive number of blocks")
    for name, value, known in (
        ("dtype", dtype, ("bf16", "fp32")),
        ("dispatch", dispatch, ("stacked", "triton_grouped", "grouped_mm")),
        ("optimizer", optimizer, tuple(OPTIMIZER_BYTES)),
        ("parallel", parallel, ("ddp", "fsdp2")),
        ("device", device, ("cuda", "cpu")),
    ):
        if value not in known:
            raise ValueError(f"{name} = {value!r}: expected one of {', '.join(known)}")
    setting = Setting(
        batch,
        seq_len,
        dtype,
        dispatch,
        _attention_backend(backend or config.attention_backend, device, dtype),
        compiled,
    )
    step = Step(
        every,
        loss_chunk,
        OPTIMIZER_BYTES[optimizer],
        gradients_stay=accumulation > 1 or (parallel == "ddp" and world_size > 1),
        shares=world_size if parallel == "fsdp2" else 1,
        logit_bytes=LOGIT_BYTES[device, dtype],
        workspace=CUBLAS_WORKSPACE if device == "cuda" else 0,
        recorded=recorded,
    )
    return step_moments(config, setting, step)


def predict_run_memory(
    config: ModelConfig,
    training: TrainingConfig,
    micro_batch: int,
    *,
    accumulation: int = 2,
    world_size: int = 1,
    device: str = "cuda",
) -> TrainingMemory:
    """Predict a step's memory as a training configuration takes it.

    Args:
        config, training: the run.
        micro_batch: sequences of one micro-batch, in place of `training.micro_batch_size`.
        accumulation: micro-batches of a step on one process; two stands for any larger number.
        world_size: processes.
        device: "cuda" or "cpu".

    Raises:
        ValueError: as `predict_training_memory`.
    """
    return predict_training_memory(
        config,
        batch=micro_batch,
        every=training.grad_checkpoint_every if training.grad_checkpoint else 0,
        loss_chunk=training.loss_chunk_size,
        compiled=training.compile,
        accumulation=accumulation,
        parallel=training.parallel,
        world_size=world_size,
        recorded=training.cuda_graph,
        device=device,
    )


def largest_micro_batch(
    config: ModelConfig,
    training: TrainingConfig,
    budget_gib: float,
    *,
    world_size: int = 1,
    device: str = "cuda",
) -> int:
    """The most sequences that one micro-batch may hold within a budget; 0 where not even one fits.

    Args:
        config, training: the run; `training.micro_batch_size` is not read.
        budget_gib: what one process may use, GiB.
        world_size, device: as in `predict_run_memory`.
    """

    def fits(micro_batch: int) -> bool:
        predicted = predict_run_memory(
            config, training, micro_batch, world_size=world_size, device=device
        )
        return predicted.gib <= budget_gib

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _attention_backend(name: str, device: str, dtype: str) -> str:
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    return resolve_backend(name, torch.device(device), torch_dtype)
