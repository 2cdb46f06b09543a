"""OPT-7, OPT-16 and OPT-20: what changes around the trainer's own step.

One model serves all three: checkpointing and compilation are switched on it, so that both sides train the same weights.

Shapes: B batch, T tokens.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gptoss.config import load_config
from gptoss.training.assembly import Assembly, assemble
from gptoss.training.compiling import eager_blocks
from gptoss.training.distributed import World

from .reading import DIFFERENCE, Place, Row, compare, compare_peaks, compare_times, relative_error

EVERY = 3


class Trainer:
    """A production step with compiled blocks and real shapes, on random tokens; the tiny model on a CPU."""

    def __init__(self, place: Place) -> None:
        run = load_config("pretrain_a100_502m" if place.cuda else "tiny")
        batch, length = (4, 4096) if place.cuda else (1, 64)
        dispatch = "triton_grouped" if place.cuda else "stacked"
        training = dataclasses.replace(
            run.training,
            micro_batch_size=batch,
            gradient_accumulation_steps=1,
            grad_checkpoint=False,
            compile=True,
            compile_mode="default",
        )
        model = dataclasses.replace(run.model, moe_dispatch=dispatch)
        if not place.cuda:  # one kind of block to compile
            model = dataclasses.replace(model, n_layers=1, yarn_prune_rope_global=False)
        self.built: Assembly = assemble(dataclasses.replace(run, model=model, training=training), World(place.device))  # fmt: skip
        tokens = torch.randint(0, model.vocab_size, (1, batch, length + 1), device=place.device)
        self.inputs, self.targets = tokens[..., :-1], tokens[..., 1:]
        self.name = place.name(f"training step, {batch} x {length} tokens")

    @classmethod
    def of(cls, place: Place) -> "Trainer":
        """The one of this table."""
        return place.once("trainer", lambda: cls(place))

    def step(self, every: int = 0) -> None:
        """One step with its blocks as they are, checkpointed every so many."""
        self.built.model.enable_gradient_checkpointing(every)
        self.built.take_step(self.inputs, self.targets).wait()

    def eager(self, every: int = 0) -> None:
        """One step with uncompiled blocks."""
        with eager_blocks(self.built.model):
            self.step(every)


def checkpointing(place: Place) -> Iterator[Row]:
    """OPT-7: every third block's activations computed again, against all of them kept."""
    trainer = Trainer.of(place)
    where = trainer.name + ", eager"
    row = compare_times(place, where, trainer.eager, lambda: trainer.eager(EVERY), repeats=1)  # fmt: skip
    yield row
    yield from compare_peaks(place, where, trainer.eager, lambda: trainer.eager(EVERY))


def compilation(place: Place) -> Iterator[Row]:
    """OPT-16: compiled blocks against eager ones, and what the first step takes. Mode "default": the documents' max-autotune tunes for minutes."""
    trainer = Trainer.of(place)
    trainer.eager()  # kernels outside the blocks, and the allocator
    first = []
    for step in (trainer.eager, trainer.step):
        start = time.perf_counter()
        step()  # waits for its result
        first.append(time.perf_counter() - start)
    row = compare_times(place, trainer.name, trainer.eager, trainer.step, repeats=1)
    yield row
    yield from compare_peaks(place, trainer.name, trainer.eager, trainer.step)
    yield compare(trainer.name + ", the first one", "seconds", first[:1], first[1:])


def hardware_settings(place: Place) -> Iterator[Row]:
    """OPT-20: the documents' switches for cuDNN, TF32 and BLAS, each where it could act."""
    side = 4096 if place.cuda else 256
    a, b = torch.randn(2, side, side, device=place.device).unbind(0)
    low_a, low_b = a.to(place.dtype), b.to(place.dtype)
    trainer = Trainer.of(place)

    def switched_product() -> None:
        with blas_assigned():
            low_a @ low_b

    def switched_step() -> None:
        with documents_settings():
            trainer.eager()

    def wide_product(tf32: bool) -> torch.Tensor:
        with tf32_set(tf32):
            return a @ b

    original = torch.backends.cuda.preferred_blas_library
    before = original() if place.cuda else None
    with blas_assigned():
        after = original() if place.cuda else None
    truth = a.double() @ b.double()
    errors = [relative_error(wide_product(tf32), truth) for tf32 in (False, True)]
    product = f"{side}^3 product"
    yield compare_times(
        place,
        place.name(product + ', preferred_blas_library = "cublaslt"'),
        lambda: low_a @ low_b,
        switched_product,
    )
    yield compare_times(
        place,
        f"{product}, fp32, allow_tf32",
        lambda: wide_product(False),
        lambda: wide_product(True),
    )
    yield compare(f"{product}, fp32, allow_tf32", "error against float64", errors[:1], errors[1:])
    yield compare_times(place, trainer.name + ", eager, all switches", trainer.eager, switched_step, repeats=1)  # fmt: skip
    if place.cuda:
        lt = [int("cublaslt" in str(library).lower()) for library in (before, after)]
        yield compare("PyTorch prefers cublasLt after the assignment", "1 yes, 0 no", lt[:1], lt[1:], compared=DIFFERENCE, higher_is_better=True)  # fmt: skip


@contextmanager
def blas_assigned() -> Iterator[None]:
    """The documents' assignment, which puts a text in the place of a function; undone at the end."""
    cuda = torch.backends.cuda
    function = cuda.preferred_blas_library
    cuda.preferred_blas_library = "cublaslt"  # type: ignore[assignment]  # what is measured
    try:
        yield
    finally:
        cuda.preferred_blas_library = function


@contextmanager
def tf32_set(allowed: bool) -> Iterator[None]:
    """TF32 in fp32 products, or not; what was set before comes back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextmanager
def documents_settings() -> Iterator[None]:
    """All five switches of the documents; what was set before comes back."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32
    with blas_assigned(), tf32_set(True):
        cudnn.benchmark, cudnn.allow_tf32 = True, True
        if before[1] is not None:  # None: a build without cuDNN
            cudnn.benchmark_limit = 0
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.allow_tf32 = before[0], before[2]
            if before[1] is not None:
                cudnn.benchmark_limit = before[1]
