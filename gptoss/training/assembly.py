"""From a configuration to something that can take a step: model, engine, optimiser and schedule (chapter 17)."""

from dataclasses import dataclass

import torch
from torch import nn

from gptoss.config import RunConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.compiling import compile_blocks
from gptoss.training.distributed import World, spread
from gptoss.training.optim import build_optimizer
from gptoss.training.recorded_step import RecordedStep
from gptoss.training.schedule import Schedule
from gptoss.training.seeding import seed_everything
from gptoss.training.step import TrainStep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Assembly:
    """Everything that a step touches.

    `model` is the plain model; `module` is what is called in training (the same, or what DDP wraps around it).
    """

    model: GPTOSS
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    take_step: TrainStep | RecordedStep
    autocast: torch.dtype | None

    def forget_recording(self) -> None:
        """Have a recorded step recorded anew: weights or optimiser state were replaced, or the model computes otherwise."""
        if isinstance(self.take_step, RecordedStep):
            self.take_step.forget()


def autocast_dtype(run: RunConfig, device: torch.device) -> torch.dtype | None:
    """The dtype of activations: bf16 under autocast for `model.dtype` "bf16", else None. Weights are fp32 always.

    Raises:
        ValueError: bf16 on a GPU that has no bf16 arithmetic.
    """
    if run.model.dtype != "bf16":
        return None
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"model.dtype = bf16: {torch.cuda.get_device_name(device)} has no bf16 arithmetic; "
            "use --set model.dtype=fp32"
        )
    return torch.bfloat16


def assemble(run: RunConfig, world: World, draw_on: torch.device = CPU) -> Assembly:
    """Build the model and all that trains it, on this process's device, from `training.seed`.

    Args:
        run: the configuration.
        world: the processes.
        draw_on: where the weights are drawn. On the CPU one seed gives the same model on every machine and in every
            process; on a GPU half a billion are drawn at once, which is enough for a measurement of time or memory.

    Raises:
        ValueError: a compile mode or a dtype that cannot be used here.
    """
    training = run.training
    autocast = autocast_dtype(run, world.device)
    seed_everything(training.seed)
    with draw_on:
        model = GPTOSS(run.model)
    model.to(world.device)
    model.set_rope_mode(training.rope)
    model.enable_gradient_checkpointing(
        training.grad_checkpoint_every if training.grad_checkpoint else 0
    )
    if training.compile:
        compile_blocks(model, training.compile_mode, world.device)
    module = spread(model, world, training.parallel)
    optimizer = build_optimizer(
        module,
        training.lr,
        (training.beta1, training.beta2),
        training.adam_eps,
        training.weight_decay,
    )
    schedule = Schedule(
        training.lr,
        training.warmup_steps,
        training.total_steps,
        training.min_lr_ratio,
        world.device,
    )
    step = TrainStep(module, optimizer, schedule, world, training, autocast)
    take_step = RecordedStep(step) if training.cuda_graph else step
    return Assembly(model, module, optimizer, schedule, take_step, autocast)


@torch.no_grad()
def weights_are_finite(model: nn.Module, world: World) -> bool:
    """Whether every weight is a finite number, on every process (waits for the device)."""
    bad = torch.zeros((), device=world.device)
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        bad += (~torch.isfinite(local)).any()
    return not bool(world.sum(bad))
