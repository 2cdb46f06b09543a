"""The long-context experiment: which way of training and of reading keeps a model usable far beyond 4,096 tokens?

`gptoss experiment`, on one GPU. Every arm is one training run of the same budget: plain RoPE or the source documents'
YaRN in training, pruning on or off, sinks on or off. Each trained model is read with plain RoPE, with YaRN in all
layers and with YaRN in the global ones. Chapters 8 and 16 read the table.

An arm takes minutes, so each writes a file when it is done, and the same command goes on where it was stopped.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gptoss.bench.evidence import make_evidence
from gptoss.bench.passkey import RECIPES, read_as
from gptoss.config import RunConfig, load_config
from gptoss.inference.long_context import loss_by_position, mean_between
from gptoss.inference.passkey import PasskeyEvaluator
from gptoss.model.transformer import GPTOSS
from gptoss.training.pretrain import pretrain

COLUMNS = {
    "rope": "rotary mode in training; yarn is in all layers, as in the source documents",
    "pruned": "whether the fastest quarter of the pairs of global layers is left unrotated",
    "sinks": "whether attention has learned sinks",
    "seed": "of weights and data order",
    "read": "how the model is read",
    "length": "tokens of prompt and answer",
    "right": "right answers",
    "trials": "questions asked",
    "low95": "lower end of the 95% Wilson interval of the share",
    "high95": "upper end of the 95% Wilson interval of the share",
    "answer_loss": "mean cross-entropy of the answer in nats a token",
    "loss_from": "first position of the stretch of held-out text that `text_loss` averages over",
    "text_loss": "mean loss of held-out text from `loss_from` to twice it, in nats a token",
    "validation_loss": "loss on held-out windows of the training length, in nats a token",
}
CONVENTION = (
    "greedy, all digits right; trials spread evenly over ten depths; held-out text as filler"
)
LENGTHS = (4096, 16_384, 65_536, 131_072)
SEEDS = (1337, 1, 2)


class Arm(NamedTuple):
    """One training run."""

    rope: str
    pruned: bool
    sinks: bool
    seed: int = SEEDS[0]

    @property
    def name(self) -> str:
        words = (self.rope, "pruned" if self.pruned else "whole", "sinks" if self.sinks else "bare")
        return "-".join((*words, str(self.seed)))


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
    words = {"pruned": True, "whole": False, "sinks": True, "bare": False}
    if rope not in ("plain", "yarn") or {pruned, sinks} - set(words) or not seed.isdigit():
        raise ValueError(
            f"arm {name!r}: expected plain|yarn-pruned|whole-sinks|bare-SEED, as in {DOCUMENTS.name}"
        )
    return Arm(rope, words[pruned], words[sinks], int(seed))


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


def run_arm(run: RunConfig, lengths: Sequence[int], trials: int) -> list[dict[str, Any]]:
    """Train one arm, then read its model in every way.

    Args:
        run: the arm's configuration.
        lengths: of prompts, in tokens.
        trials: at each length.

    Returns:
        Rows with `read` and what was found; the arm's own columns are the caller's.

    Raises:
        ValueError: the run did not reach its end, or has no held-out text.
    """
    result = pretrain(run)
    if result.stopped_by or result.tokenizer is None or not result.validation:
        raise ValueError(
            f"{run.training.save_dir}: the run ended early or has no tokenizer and held-out text; start it again"
        )
    device = next(result.model.parameters()).device
    model = GPTOSS(dataclasses.replace(run.model, attention_backend="auto"))
    model.load_state_dict(result.model.state_dict())
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    model.set_rope_mode(run.training.rope)
    text = held_out(run, max(lengths) + 1)
    rows: list[dict[str, Any]] = [{"validation_loss": round(result.validation[-1].loss, 4)}]
    edges = [0, *(n for n in (1024 * 2**i for i in range(12)) if n < max(lengths)), max(lengths)]
    for name, recipe in RECIPES.items():
        with read_as(model, recipe) as mode:
            evaluator = PasskeyEvaluator(model, result.tokenizer, filler=text, rope=mode, batch_tokens=131_072)  # fmt: skip
            for row in evaluator.evaluate_grid(lengths, trials).to_dict()["rows"]:
                kept = {key: value for key, value in row.items() if key in COLUMNS}
                rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in kept.items()}
                rows.append({"read": name} | rounded)
            ids = torch.from_numpy(text[: max(lengths) + 1])[None]
            losses = mean_between(loss_by_position(model, ids, rope=mode, chunk_size=4096), edges)
        rows += [
            {"read": name, "loss_from": start, "text_loss": round(loss, 4)}
            for start, loss in zip(edges, losses, strict=False)
        ]
    return rows


def held_out(run: RunConfig, n_tokens: int) -> np.ndarray:
    """(n_tokens,) ids of the run's validation shards.

    Raises:
        ValueError: no validation shards, or too few tokens in them.
    """
    folder = Path(run.data.validation_data_path or "")
    shards = sorted(folder.glob("*.bin")) if run.data.validation_data_path else []
    ids = np.concatenate([np.fromfile(p, dtype=np.uint16) for p in shards]) if shards else np.empty(0)  # fmt: skip
    if len(ids) < n_tokens:
        raise ValueError(
            f"{folder}: {len(ids):,} held-out tokens and {n_tokens:,} are needed; prepare with a larger --val-fraction"
        )
    return ids[:n_tokens].astype(np.int64)


def experiment(
    folder: Path,
    arms: Sequence[Arm] = ARMS,
    *,
    config: str = "nano",
    overrides: Sequence[str] = (),
    steps: int = 1250,
    lengths: Sequence[int] = LENGTHS,
    trials: int = 20,
    command: str = "gptoss experiment",
    commit: str | None = None,
) -> dict[str, Any]:
    """Train and read every arm that has no result yet, and put the table together.

    Args:
        folder: takes a checkpoint directory and a result file an arm.
        arms: which.
        config, overrides: what every arm starts from.
        steps: of each arm; 1,250 of nano's are about two minutes on one H200.
        lengths, trials: of the passkey questions.
        command, commit: for the evidence.

    Returns:
        The evidence, of the arms that have a result by now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = load_config(config, overrides)
    for arm in arms:
        path = folder / f"{arm.name}.json"
        if path.exists():
            continue
        print(f"[arm] {arm.name}", flush=True)
        rows = run_arm(configure(base, arm, steps, folder), lengths, trials)
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(rows))
        partial.replace(path)
    table = []
    for arm in arms:
        for row in json.loads((folder / f"{arm.name}.json").read_text()):
            table.append(arm._asdict() | row)
    tokens = steps * base.training.gradient_accumulation_steps * base.model.max_seq_len
    notes = [
        f"each arm: {steps:,} steps, {tokens * int(base.training.micro_batch_size):,} tokens of {config}, one run a seed"
    ]
    return make_evidence(
        "long_context", "Training and reading beyond 4,096 tokens", COLUMNS, table,
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip
