"""One training step: micro-batches, one gradient, one update, and nothing that makes the host wait (chapter 17).

A micro-batches of a step, B batch, T queries.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gptoss.config import TrainingConfig
from gptoss.training.distributed import World, gradients_travel
from gptoss.training.losses import IGNORE_INDEX
from gptoss.training.optim import gradient_norm, update
from gptoss.training.schedule import Schedule


@dataclass(frozen=True)
class StepResult:
    """What a step came to. `taken` is False where the update was refused; `stop` where a process was asked to end."""

    loss: float
    aux: float
    grad_norm: float
    lr: float
    taken: bool
    stop: bool


class PendingResult:
    """A step's result on its way from the device. `wait` is the one place where the host waits for a step."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values

    def wait(self) -> StepResult:
        """The result, once the device has computed it."""
        if self._event is not None:
            self._event.synchronize()
        loss, aux, norm, lr, taken, stop = self._values.tolist()
        return StepResult(loss, aux, norm, lr, bool(taken), bool(stop))


class TrainStep:
    """Forward, backward, clip and AdamW over the micro-batches of one step.

        L = Σ_m CE_m / n  +  α · mean_m aux_m

    CE_m is the summed cross-entropy of micro-batch m, n the number of targets that count in all micro-batches of all
    processes: a micro-batch with few such targets weighs little, and with none at all the loss is 0, not NaN. The
    load-balancing loss is computed over each process's micro-batch on its own and averaged, so its value depends a
    little on how a step is cut into micro-batches; the cross-entropy's does not.

    The update is refused on the device when the loss or the gradient norm is not finite (`training.nan_guard`).

    Args:
        module: what to call, from `distributed.spread`.
        optimizer, schedule: of the model's parameters.
        world: the processes.
        settings: aux_loss_alpha, grad_clip, loss_chunk_size, nan_guard.
        autocast: the dtype of activations, or None for full precision.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        world: World,
        settings: TrainingConfig,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.schedule = schedule
        self.world = world
        self.settings = settings
        self.autocast = autocast

    def __call__(
        self, inputs: Int[Tensor, "A B T"], targets: Int[Tensor, "A B T"], stop: bool = False
    ) -> PendingResult:
        """Take one step.

        Args:
            inputs, targets: this process's micro-batches on its device; −100 targets do not count.
            stop: whether this process was asked to end; all processes learn it with the result.
        """
        flag = torch.full((), float(stop), device=inputs.device)
        return PendingResult(self.on_device(inputs, targets, flag))

    def on_device(
        self, inputs: Int[Tensor, "A B T"], targets: Int[Tensor, "A B T"], stop: Float[Tensor, ""]
    ) -> Float[Tensor, "6"]:
        """The step itself, without a word from the device to the host.

        Returns:
            The fields of `StepResult` in their order, as device numbers.
        """
        world, settings = self.world, self.settings
        count = inputs.shape[0]
        counted = world.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)
        # The engines average gradients over the processes; the cross-entropy's are to be summed.
        ce_weight = world.size / counted
        aux_weight = settings.aux_loss_alpha / count
        totals = torch.zeros(
            3, device=inputs.device
        )  # summed CE, summed aux, processes asked to end
        totals[2] = stop
        for m in range(count):
            with gradients_travel(self.module, now=m == count - 1):
                with torch.autocast(
                    inputs.device.type, dtype=self.autocast, enabled=self.autocast is not None
                ):
                    cross_entropy, aux = self.module(
                        inputs[m],
                        targets=targets[m],
                        reduction="sum",
                        loss_chunk_size=settings.loss_chunk_size,
                    )
                (cross_entropy * ce_weight + aux * aux_weight).backward()
            totals[0] += cross_entropy.detach()
            totals[1] += aux.detach()
        world.sum(totals)
        loss = totals[0] / counted
        aux = totals[1] / (count * world.size)
        norm = gradient_norm(self.module.parameters())
        finite = torch.isfinite(loss) & torch.isfinite(aux) & torch.isfinite(norm)
        taken = finite if settings.nan_guard else torch.ones_like(finite)
        rate = self.schedule.rate()
        update(self.optimizer, rate, norm, settings.grad_clip, taken)
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.advance(taken)
        return torch.stack([loss, aux, norm.to(loss), rate, taken.to(loss), totals[2]])
