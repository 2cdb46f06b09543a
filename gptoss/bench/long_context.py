"""The long-context experiment: which way of training and of reading keeps a model usable far beyond 4,096 tokens?

`gptoss experiment`, on one GPU. Every arm is one training run of the same budget: plain RoPE or the source documents'
YaRN in training, pruning on or off, sinks on or off. Each trained model is read with plain RoPE, with YaRN in all
layers and with YaRN in the global ones.

An arm takes minutes, so each writes a file when it is done, and the same command goes on where it was stopped. Arms may
be made by several processes in one folder, and on several machines: the table says what the files say. What cannot be
read in the end is refused before anything is trained, and results of other settings are never mixed in.
"""

import dataclasses
import gc
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from gptoss.bench.arm_results import (
    made_where,
    read_result,
    require_same,
    settings_of,
    write_result,
)
from gptoss.bench.arms import ARMS, Arm, configure
from gptoss.bench.evidence import make_evidence
from gptoss.bench.passkey import RECIPES, Recipe, read_as
from gptoss.config import ModelConfig, RunConfig, load_config, read_run_config
from gptoss.inference.long_context import loss_by_position, mean_between
from gptoss.inference.passkey import PasskeyEvaluator
from gptoss.inference.passkey_prompt import build_passkey_prompt
from gptoss.model.transformer import GPTOSS
from gptoss.training.distributed import World
from gptoss.training.pretrain import pretrain
from gptoss.training.restore import CONFIG_FILE
from gptoss.training.run_data import open_run_data

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


def recipes_for(cfg: ModelConfig) -> dict[str, Recipe]:
    """The ways to read a model that differ: without pruned pairs there is nothing for `mscale_pruned` to act on."""
    if any(cfg.n_pruned_pairs(layer) for layer in range(cfg.n_layers)):
        return RECIPES
    # Of recipes that differ in `mscale_pruned` alone, the last.
    last = {(recipe.mode, recipe.layers): name for name, recipe in RECIPES.items()}
    return {name: RECIPES[name] for name in last.values()}


def run_arm(run: RunConfig, lengths: Sequence[int], trials: int) -> dict[str, Any]:
    """Train one arm, then read its model in every way.

    Args:
        run: the arm's configuration.
        lengths: of prompts, in tokens.
        trials: at each length.

    Returns:
        `tokens_per_step`, `seconds` of training (of this call, when it goes on) and of reading, and `rows` with `read`
        and what was found; the arm's own columns are the caller's.

    Raises:
        ValueError: the run was stopped before its end.
    """
    text = held_out(run, max(lengths) + 1)
    began = time.monotonic()
    result = pretrain(run)
    trained = time.monotonic()
    if result.stopped_by:
        raise ValueError(
            f"{run.training.save_dir}: stopped by {result.stopped_by} at step {result.step}; start it again to go on"
        )
    assert result.tokenizer is not None, "`check_reading` has seen it"
    device = next(result.model.parameters()).device
    model = GPTOSS(dataclasses.replace(run.model, attention_backend="auto"))
    model.load_state_dict(result.model.state_dict())
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    model.set_rope_mode(run.training.rope)
    rows: list[dict[str, Any]] = [{"validation_loss": round(result.validation[-1].loss, 4)}]
    edges = [0, *(n for n in (1024 * 2**i for i in range(12)) if n < max(lengths)), max(lengths)]
    for name, recipe in recipes_for(run.model).items():
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
    seconds = {
        "training": round(trained - began, 1),
        "reading": round(time.monotonic() - trained, 1),
    }
    return {"tokens_per_step": result.tokens_per_step, "seconds": seconds, "rows": rows}


def held_out(run: RunConfig, n_tokens: int) -> Int[np.ndarray, "n"]:
    """(n_tokens,) ids of the run's held-out text.

    Raises:
        ValueError: there are fewer.
    """
    data = open_run_data(run, World(torch.device("cpu"))).validation
    n_windows = -(-(n_tokens - 1) // data.max_seq_len)
    if n_windows > len(data):
        raise ValueError(
            f"{data.data_path}: {len(data) * data.max_seq_len + 1:,} held-out tokens and {n_tokens:,} are needed; "
            "ask for a shorter length, or prepare with a larger --val-fraction"
        )
    # A window's last token is the next one's first.
    windows = [data.window(i) for i in range(n_windows)]
    return np.concatenate([*(window[:-1] for window in windows), windows[-1][-1:]])[:n_tokens]


def check_reading(run: RunConfig, lengths: Sequence[int], trials: int) -> None:
    """Refuse before the training what could not be read after it.

    Raises:
        ValueError: no length or trial, a length twice, one that the model or the text does not reach or that is too
            short for a question, or text without a tokenizer.
    """
    if not lengths or trials < 1:
        raise ValueError(f"expected lengths and trials >= 1, got {list(lengths)} and {trials}")
    if min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths {list(lengths)}: expected positive ones, each once")
    if max(lengths) > run.model.eval_max_seq_len:
        raise ValueError(
            f"length {max(lengths)} exceeds eval_max_seq_len = {run.model.eval_max_seq_len}; ask for shorter ones"
        )
    tokenizer = open_run_data(run, World(torch.device("cpu"))).tokenizer
    if tokenizer is None:
        raise ValueError("the shards have no tokenizer.json beside them: set data.tokenizer")
    text = held_out(run, max(lengths) + 1)
    build_passkey_prompt(tokenizer, min(lengths), 0.5, random.Random(0), filler=text)


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
        command: for the evidence.
        commit: for the results that this call makes; asked of git unless given.

    Returns:
        The evidence, of all these arms, with the machine, software, commit and date of their results.

    Raises:
        ValueError: settings that do not fit the data, the model or what the folder holds; nothing was trained.
    """
    base = load_config(config, overrides)
    runs = {arm: configure(base, arm, steps, folder) for arm in arms}
    if not runs:
        raise ValueError("expected at least one arm")
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name a folder for checkpoints and results")
    results = {}
    for arm, run in runs.items():
        asked = settings_of(run, lengths, trials)
        results[arm] = read_result(folder / f"{arm.name}.json", asked, COLUMNS)
        begun = Path(run.training.save_dir) / CONFIG_FILE
        if results[arm] is None and begun.is_file():
            there = settings_of(read_run_config(begun), lengths, trials)
            require_same(begun.parent, there, asked)
    if None in results.values():
        check_reading(next(iter(runs.values())), lengths, trials)
    folder.mkdir(parents=True, exist_ok=True)
    for arm, run in runs.items():
        if results[arm] is None:
            print(f"[arm] {arm.name}", flush=True)
            found = run_arm(run, lengths, trials)
            path = folder / f"{arm.name}.json"
            results[arm] = write_result(path, run, lengths, trials, found, commit)
            took = found["seconds"]
            print(
                f"[arm] {arm.name}: trained in {took['training']} s, read in {took['reading']} s",
                flush=True,
            )
            gc.collect()
            torch._dynamo.reset()  # this arm's compiled code is not needed again
    done = {arm: result for arm, result in results.items() if result is not None}
    table = [arm._asdict() | row for arm, result in done.items() for row in result["rows"]]
    tokens = steps * next(iter(done.values()))["tokens_per_step"]
    made, apart = made_where({arm.name: result for arm, result in done.items()})
    notes = [f"each arm: {steps:,} steps, {tokens:,} tokens of {config}, one run a seed", *apart]
    if not all(arm.pruned for arm in done):
        notes.append(
            'arms without pruning: "YaRN in global layers" sharpens all their pairs, so it is read once, as '
            '"YaRN in global layers, all pairs sharpened"'
        )
    title = f"Training at and reading beyond {base.model.max_seq_len:,} tokens"
    evidence = make_evidence(
        "long_context", title, COLUMNS, table,
        command=command, convention=CONVENTION, notes=notes, commit=made["commit"],
    )  # fmt: skip
    return evidence | made  # where the arms were made, which need not be here
