"""The arms of the long-context experiment: what each training run changes, and the name that says so (chapters 8, 16)."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from gptoss.config import ROPE_MODES, RunConfig

SEEDS = (1337, 1, 2)
PRUNED, SINKS = ("pruned", "whole"), ("sinks", "bare")  # words of an arm's name, for yes and no


class Arm(NamedTuple):
    """One training run."""

    rope: str
    pruned: bool
    sinks: bool
    seed: int = SEEDS[0]

    @property
    def name(self) -> str:
        pruned, sinks = PRUNED[not self.pruned], SINKS[not self.sinks]
        return f"{self.rope}-{pruned}-{sinks}-{self.seed}"


DOCUMENTS = Arm("yarn", True, True)
ARMS = tuple(
    Arm(rope, pruned, sinks)
    for rope in ("plain", "yarn")
    for pruned in (True, False)
    for sinks in (True, False)
)


def parse_arm(name: str) -> Arm:
    """The arm of a name such as "plain-pruned-sinks-1337".

    Raises:
        ValueError: the name has another form.
    """
    rope, _, rest = name.partition("-")
    pruned, _, rest = rest.partition("-")
    sinks, _, seed = rest.partition("-")
    if rope not in ROPE_MODES or pruned not in PRUNED or sinks not in SINKS or not seed.isdecimal():
        raise ValueError(
            f"arm {name!r}: expected plain|yarn-pruned|whole-sinks|bare-SEED, as in {DOCUMENTS.name}"
        )
    return Arm(rope, pruned == PRUNED[0], sinks == SINKS[0], int(seed))


def configure(run: RunConfig, arm: Arm, steps: int, folder: Path) -> RunConfig:
    """A run's configuration changed to an arm's; training with YaRN is as the source documents have it."""
    documents = arm.rope == "yarn"
    model = dataclasses.replace(
        run.model,
        yarn_prune_rope_global=arm.pruned,
        sink_bias=arm.sinks,
        yarn_layers="all" if documents else "global",
        yarn_mscale_pruned=not documents,
    )
    training = dataclasses.replace(
        run.training,
        rope=arm.rope,
        seed=arm.seed,
        total_steps=steps,
        warmup_steps=min(run.training.warmup_steps, max(1, steps // 10)),
        save_interval=steps,
        validation_interval=steps,
        save_dir=str(folder / arm.name),
    )
    return RunConfig(model, training, run.data)
