"""A training step recorded once as a CUDA graph and replayed: the host launches one thing a step, not some thousand (chapter 14).

A step launches some thousand kernels from Python. For a small batch, or on a slow host, that takes longer than the kernels
themselves, and the device waits. `TrainStep` never asks the device for anything and its shapes never change, so all that it
launches can be recorded and launched again as one.

A micro-batches of a step, B batch, T queries.
"""

import gc

import torch
from jaxtyping import Int
from torch import Tensor

from gptoss.training.step import PendingResult, TrainStep

ORDINARY_STEPS = 3  # before the recording: kernels are compiled, the optimiser makes its state


class RecordedStep:
    """`TrainStep`, recorded at the fourth call of a shape and replayed from then on.

    What a step keeps until its backward pass then lives in the graph's own memory, whether a step is running or not.
    Once there is a recording, inputs of another shape are an ordinary step.

    Args:
        step: on one GPU, with kernels that do not ask the host for anything (`preflight.check_recording`).
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._shape: torch.Size | None = None
        self._ordinary = 0  # steps of this shape so far
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, inputs: Int[Tensor, "A B T"], targets: Int[Tensor, "A B T"], stop: bool = False
    ) -> PendingResult:
        """Take one step; the arguments and the result are `TrainStep`'s."""
        if self._graph is None:
            if inputs.shape != self._shape:
                self._shape, self._ordinary = inputs.shape, 0
            if self._ordinary < ORDINARY_STEPS:
                self._ordinary += 1
                return self.step(inputs, targets, stop)
            self._record(inputs, targets)
        if inputs.shape != self._inputs.shape:
            return self.step(inputs, targets, stop)
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._stop.fill_(float(stop))
        assert self._graph is not None
        self._graph.replay()
        return PendingResult(self._values)

    def forget(self) -> None:
        """Record anew, after ordinary steps: moments that are not there yet must not be made inside the recording."""
        self._graph, self._ordinary = None, 0

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs.clone(), targets.clone()
        self._stop = torch.zeros((), device=inputs.device)
        # The graph has memory of its own; what the ordinary steps used goes back first.
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        groups = self.step.optimizer.param_groups
        kept = [group["capturable"] for group in groups]
        for group in groups:
            group["capturable"] = True  # AdamW wants to be told
        try:
            # The outer context brings this stream back if the recording fails. Other threads, those that fetch data, may use
            # the device meanwhile.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                self._values = self.step.on_device(self._inputs, self._targets, self._stop)
        except BaseException:
            self.step.optimizer.zero_grad(set_to_none=True)  # they lie in the graph's memory
            raise
        finally:
            for group, capturable in zip(groups, kept, strict=True):
                group["capturable"] = capturable
        self._graph = graph
