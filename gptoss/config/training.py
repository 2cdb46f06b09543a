"""How a model is trained."""

import os
from dataclasses import dataclass

from .model import ROPE_MODES


@dataclass
class TrainingConfig:
    """How a model is trained. Lengths are optimiser steps unless said otherwise (chapters 11-13, 17).

    `micro_batch_size` counts sequences on one device at once; "auto" picks the largest that fits. Tokens a step are
    micro_batch_size · gradient_accumulation_steps · max_seq_len as written here, on any number of devices.
    `rope` is the rotary mode in training: "yarn" is the source documents' recipe (chapter 8). `cuda_graph` records a step and
    replays it: for one GPU whose host cannot keep up (chapter 14).
    """

    micro_batch_size: int | str = 8
    gradient_accumulation_steps: int = 4
    total_steps: int = 61_000
    warmup_steps: int = 3000
    lr: float = 4e-4
    min_lr_ratio: float = 0.05
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-6
    grad_clip: float = 1.0
    grad_checkpoint: bool = True
    grad_checkpoint_every: int = 3
    compile: bool = True
    compile_mode: str = "max-autotune"
    cuda_graph: bool = False
    save_interval: int = 2000
    log_interval: int = 50
    nan_guard: bool = True
    nan_guard_max_consecutive: int = 5
    aux_loss_alpha: float = 0.01
    save_dir: str = "checkpoints/pretrain_a100"
    seed: int = 1337
    rope: str = "plain"
    keep_last: int = 3
    loss_chunk_size: int = 4096
    validation_interval: int = 500
    validation_batches: int = 16
    sample_interval: int = 0
    sample_prompt: str = "def "
    parallel: str = "ddp"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"TrainingConfig.{name} = {getattr(self, name)!r}: {rule}")

        for name in (
            *("gradient_accumulation_steps", "total_steps", "lr", "save_interval", "log_interval"),
            *(
                "nan_guard_max_consecutive",
                "adam_eps",
                "grad_clip",
                "loss_chunk_size",
                "validation_batches",
            ),
        ):
            require(getattr(self, name) > 0, name, "must be positive")
        for name in (
            *("warmup_steps", "weight_decay", "grad_checkpoint_every", "aux_loss_alpha"),
            *("keep_last", "validation_interval", "sample_interval"),
        ):
            require(getattr(self, name) >= 0, name, "must not be negative")
        require(0 <= self.seed < 2**32, "seed", "must lie in 0 to 4294967295")
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "must lie in [0, 1]")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, "must lie in [0, 1)")
        require(
            self.micro_batch_size == "auto"
            or (isinstance(self.micro_batch_size, int) and self.micro_batch_size > 0),
            "micro_batch_size",
            'must be a positive int or "auto"',
        )
        require(self.save_dir.strip() != "", "save_dir", "must name a directory")
        self.save_dir = os.path.expanduser(self.save_dir)  # "~" in a file, where no shell reads it
        require(self.rope in ROPE_MODES, "rope", f"must be one of {', '.join(ROPE_MODES)}")
        require(self.parallel in ("ddp", "fsdp2"), "parallel", "must be one of ddp, fsdp2")
