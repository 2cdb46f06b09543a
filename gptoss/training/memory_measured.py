"""Memory as it is: what autograd keeps, and the largest number of bytes alive in a step (chapter 11)."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptoss.config import ModelConfig, RunConfig, TrainingConfig
from gptoss.training.assembly import assemble
from gptoss.training.distributed import World

Result = TypeVar("Result")


class _Held:
    """What autograd is given in place of a tensor, so that one can see when it lets go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_for_backward(
    forward: Callable[[], Result], exclude: Iterable[Tensor] = ()
) -> tuple[Result, dict[int, int]]:
    """Run a forward pass and see which memory still waits for its backward pass.

    Views of one storage count once, and a storage counts whole, however little of it is looked at.

    Args:
        forward: the computation.
        exclude: tensors that exist anyway, such as the parameters.

    Returns:
        (the result of `forward`, bytes of each storage by its identity).
    """
    alive: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Held:
        held = _Held(tensor)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        result = forward()
    known = {tensor.untyped_storage()._cdata for tensor in exclude}
    storages = (held.tensor.untyped_storage() for held in alive)
    return result, {s._cdata: s.nbytes() for s in storages if s._cdata not in known}


class LiveBytes(TorchDispatchMode):
    """Follow every storage that operations make, on any device, and remember the most bytes alive in each phase.

    What an operation uses and gives back inside itself is not seen, nor what an allocator rounds up.

    Args:
        existing: tensors that are there already, such as parameters and the optimiser's state.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = 0
        self.phase = "start"
        self.peaks: dict[str, int] = {}
        for tensor in existing:
            self._follow(tensor)

    def enter(self, phase: str) -> None:
        """Count what follows under another name."""
        self.phase = phase

    @property
    def peak(self) -> int:
        """The most bytes alive in any phase."""
        return max(self.peaks.values(), default=self.now)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._sizes:
            return
        self._sizes[identity] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._forget, identity)

    def _forget(self, identity: int) -> None:
        self.now -= self._sizes.pop(identity, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.now)
        return result


class PeakMeter:
    """A model in training whose step can be asked for its peak memory, with one setting of checkpointing after another.

    The trainer's own step on random tokens: fp32 weights, activations as `config.dtype` says, clip, AdamW.

    Args:
        config: the architecture, with dispatch and attention backend.
        batch, seq_len: sequences of a micro-batch and their tokens.
        loss_chunk: tokens whose logits exist at once.
        compiled: run blocks through torch.compile.
        accumulation: micro-batches of a step.
        device: "cuda" or "cpu"; a GPU where there is one when left out.

    Source: chapter 11.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        seq_len: int,
        loss_chunk: int = 4096,
        compiled: bool = False,
        accumulation: int = 1,
        device: str | None = None,
    ) -> None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        training = TrainingConfig(
            micro_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            grad_checkpoint=False,
            loss_chunk_size=loss_chunk,
            compile=compiled,
            compile_mode="default",
        )
        self.device = where
        self.built = assemble(RunConfig(config, training), World(where), draw_on=where)
        size = (accumulation, batch, seq_len + 1)
        self.tokens = torch.randint(config.vocab_size, size, device=where)

    def measure(self, every: int = 0, steps: int = 2) -> int:
        """Take a few steps and return the most bytes that were alive at once in the last one.

        Args:
            every: gradient checkpointing; 0 is off.
            steps: how many are taken, at least 2. Those before the last compile, tune and make the optimiser's state.

        Returns:
            Bytes. On a GPU as `torch.cuda.max_memory_allocated` counts them, without the context and the allocator's
            reserve; on a CPU as `LiveBytes` sees them, without what is used and given back inside one operation.

        Raises:
            ValueError: fewer than 2 steps.
        """
        if steps < 2:
            raise ValueError(
                f"steps = {steps}: expected at least 2, the first makes the optimiser's state"
            )
        built = self.built
        built.model.enable_gradient_checkpointing(every)
        inputs, targets = self.tokens[:, :, :-1], self.tokens[:, :, 1:]
        for _ in range(steps - 1):
            built.take_step(inputs, targets).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            built.take_step(inputs, targets).wait()
            return torch.cuda.max_memory_allocated(self.device)
        state = (t for s in built.optimizer.state.values() for t in s.values())
        with LiveBytes([*built.model.parameters(), *state, self.tokens]) as live:
            built.take_step(inputs, targets).wait()
        return live.peak


def measure_training_peak(
    config: ModelConfig, *, every: int = 0, steps: int = 2, **setting: Any
) -> int:
    """Bytes at the peak of a step, for one setting of checkpointing; all else as `PeakMeter` takes it."""
    return PeakMeter(config, **setting).measure(every, steps)
