"""OPT-17, OPT-18 and OPT-19: short trainings of a small model on this package's own text, one setting changed.

The same seed gives both sides the same weights and the same batches; the seeds differ among themselves, and that is the
noise; a loss that differs by less than rounding moves it (`agreement.py`) is no difference. A run of a hundred steps says
nothing about step 30,000.

Shapes: B batch, T tokens, L layers, E experts.
"""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptoss.bench.agreement import BAND, STRETCH
from gptoss.bench.passkey import HELD_OUT
from gptoss.config import RunConfig, TrainingConfig, load_config
from gptoss.inference.filler import read_filler
from gptoss.model.moe import expert_load
from gptoss.model.transformer import GPTOSS
from gptoss.pretrained import load_pretrained
from gptoss.training.assembly import assemble
from gptoss.training.distributed import World

from .reading import DIFFERENCE, Place, Row, compare

Prepare = Callable[[GPTOSS], None]


class Sizes(NamedTuple):
    """Of one training."""

    steps: int
    warmup: int
    seeds: tuple[int, ...]
    batch: int
    length: int

    @classmethod
    def at(cls, place: Place) -> "Sizes":
        return cls(120, 15, (0, 1, 2), 8, 256) if place.cuda else cls(30, 5, (0, 1), 2, 64)


class Outcome(NamedTuple):
    """Loss in nats a token over the last steps, and how uneven the experts' load is: max share · E, mean over layers."""

    loss: float
    imbalance: float


def configuration(place: Place) -> RunConfig:
    """nano at half its depth; on a CPU smaller still."""
    run = load_config("nano")
    sizes: dict[str, Any] = dict(n_layers=4, moe_dispatch="triton_grouped")
    if not place.cuda:
        sizes = dict(n_layers=2, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, ffn_dim=32, moe_dispatch="stacked", dtype="fp32")  # fmt: skip
    shape = Sizes.at(place)
    training = TrainingConfig(
        micro_batch_size=shape.batch,
        gradient_accumulation_steps=1,
        total_steps=shape.steps,
        warmup_steps=shape.warmup,
        lr=run.training.lr,
        grad_checkpoint=False,
        compile=False,
    )
    return RunConfig(dataclasses.replace(run.model, **sizes), training)


def train(place: Place, run: RunConfig, seed: int, prepare: Prepare | None = None) -> Outcome:
    """Train once; `prepare` changes the model before its first step."""
    text: Tensor = place.once("text", lambda: torch.from_numpy(read_filler(load_pretrained("nano")[1], HELD_OUT, 100_000)))  # fmt: skip
    sizes = Sizes.at(place)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(text) - sizes.length, (sizes.steps + 1, 1, sizes.batch, 1), generator=generator)  # fmt: skip
    batches = text[places + torch.arange(sizes.length + 1)].to(place.device)
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, seed=seed))
    built = assemble(run, World(place.device))
    if prepare is not None:
        prepare(built.model)
    losses = []
    for batch in batches[:-1]:
        losses.append(built.take_step(batch[..., :-1], batch[..., 1:]).wait().loss)
    with torch.autocast(place.device.type, dtype=built.autocast, enabled=built.autocast is not None):  # fmt: skip
        load = expert_load(built.model, batches[-1, 0, :, :-1]).double()  # (L, E)
    imbalance = load.shape[1] * (load.max(dim=1).values / load.sum(dim=1)).mean().item()
    del built
    gc.collect()
    return Outcome(statistics.fmean(losses[-STRETCH:]), imbalance)


def compare_runs(
    place: Place, what: str, *, prepare: Prepare | None = None, load: bool = False, **changed: Any
) -> Iterator[Row]:
    """Train every seed with the documents' setting (on, one set of runs for all entries) and with another (off).

    Args:
        place: where.
        what: the two settings in words.
        prepare: what makes the model another one on the off side.
        load: a second row, of the experts' load.
        changed: training settings of the off side.
    """
    run, sizes = configuration(place), Sizes.at(place)
    other = dataclasses.replace(run, training=dataclasses.replace(run.training, **changed))
    on = place.once("as documented", lambda: [train(place, run, seed) for seed in sizes.seeds])
    off = [train(place, other, seed, prepare) for seed in sizes.seeds]
    where = f"{sizes.steps} steps of {sizes.batch} x {sizes.length} tokens, {len(sizes.seeds)} seeds; {what}"  # fmt: skip
    yield compare(
        where,
        f"nats a token, last {STRETCH} steps",
        [o.loss for o in off],
        [o.loss for o in on],
        compared=DIFFERENCE,
        resolution=BAND,
    )
    if load:
        yield compare(
            where,
            "largest expert's share · E",
            [o.imbalance for o in off],
            [o.imbalance for o in on],
            compared=DIFFERENCE,
        )


def adam_eps(place: Place) -> Iterator[Row]:
    """OPT-17: eps 1e-6 against 1e-8."""
    return compare_runs(place, "eps 1e-6 against 1e-8", adam_eps=1e-8)


def warmup(place: Place) -> Iterator[Row]:
    """OPT-18: a linear warmup against none."""
    return compare_runs(
        place, f"{Sizes.at(place).warmup} steps of warmup against none", warmup_steps=0, load=True
    )


def aux_loss(place: Place) -> Iterator[Row]:
    """OPT-19: the load-balancing loss with 0.01 against without."""
    return compare_runs(place, "aux 0.01 against 0", aux_loss_alpha=0.0, load=True)
