"""Passkey retrieval, measured: how far a model trained at 4,096 tokens reads, by recipe, length and depth.

`gptoss bench passkey`.

The shipped model was trained with plain RoPE. A recipe says how it is read beyond: with plain RoPE; with YaRN in every
layer, as the source documents do; in the global layers only, since a window holds no new distance; and so with every
rotary pair sharpened by mscale, the pruned ones too.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from gptoss.bench.evidence import make_evidence
from gptoss.inference.filler import read_filler
from gptoss.inference.passkey import PasskeyEvaluator
from gptoss.model.transformer import GPTOSS
from gptoss.pretrained import load_pretrained

COLUMNS = {
    "recipe": "how the model is read beyond its training length",
    "filler": "what the number is hidden in",
    "distractors": "other keys with other names in the same prompt",
    "length": "tokens of prompt and answer",
    "depth": "where the key line stands, 0 first and 1 last; all depths where empty",
    "right": "right answers",
    "trials": "questions asked",
    "low95": "lower end of the 95% Wilson interval of the share",
    "high95": "upper end of the 95% Wilson interval of the share",
    "answer_loss": "mean cross-entropy of the answer in nats a token",
}
CONVENTION = (
    "greedy, all digits right; lengths in the model's own tokens; the question names the key and does not contain it; "
    "trials are spread evenly over ten depths"
)
LENGTHS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
FEWER = (4096, 16_384, 65_536, 131_072)  # for the rows beside the best recipe


class Recipe(NamedTuple):
    """A rotary setting for reading: the mode, the layers that YaRN changes, and whether pruned pairs are sharpened."""

    mode: str
    layers: str = "global"
    mscale_pruned: bool = True


RECIPES = {
    "plain": Recipe("plain"),
    "YaRN in all layers": Recipe("yarn", "all", False),
    "YaRN in global layers": Recipe("yarn", "global", False),
    "YaRN in global layers, all pairs sharpened": Recipe("yarn"),
}
BEST = "YaRN in global layers, all pairs sharpened"
SENTENCE = "repeated sentence"
SPREAD = 2.5  # held-out text over the longest prompt: trials cut it anywhere, and share what they must share
HELD_OUT = "package:gptoss"  # this package's own source: real, always there, and not among the model's training text


def measure(
    *,
    model: str = "nano",
    lengths: Sequence[int] | None = None,
    trials: int | None = None,
    other_trials: int | None = None,
    beyond: int | None = 262_144,
    command: str = "gptoss bench passkey",
    commit: str | None = None,
) -> dict[str, Any]:
    """Ask a shipped model for hidden numbers.

    Args:
        model: one of `list_pretrained()`, or a folder of that form.
        lengths: tokens; 4,096 to 131,072 on a GPU, up to 8,192 on a CPU.
        trials: for the best recipe in held-out text, at each length; 100 on a GPU, 10 on a CPU.
        other_trials: for every other row, at those lengths that are in `FEWER`; 20 on a GPU, 10 on a CPU.
        beyond: a last, longer length for the best recipe, on a GPU only.
        command, commit: for the evidence file.

    Returns:
        The evidence: a row a recipe, filler and length, and for the best recipe a row a depth too.
    """
    cuda = torch.cuda.is_available()
    lengths = lengths or (LENGTHS if cuda else LENGTHS[:2])
    trials = trials or (100 if cuda else 10)
    other_trials = other_trials or (20 if cuda else 10)
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    net, tokenizer = load_pretrained(model, device, dtype)
    held_out = read_filler(tokenizer, HELD_OUT, round(SPREAD * max(lengths)))
    rows: list[dict[str, Any]] = []

    def ask(recipe: str, filler: str, lengths: Sequence[int], n: int, distractors: int = 0) -> None:
        text: np.ndarray | None = held_out if filler == HELD_OUT else None
        with read_as(net, RECIPES[recipe]) as mode:
            evaluator = PasskeyEvaluator(
                net, tokenizer, filler=text, rope=mode, n_distractors=distractors,
                batch_tokens=131_072 if cuda else 65_536,
            )  # fmt: skip
            result = evaluator.evaluate_grid(lengths, n).to_dict()
        what = {"recipe": recipe, "filler": filler, "distractors": distractors}
        cells = result["cells"] if n >= 100 else []
        for row in (*result["rows"], *cells):
            found = {key: value for key, value in row.items() if key in COLUMNS}
            rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in found.items()}
            rows.append(what | rounded)
            if "depth" not in rounded:
                print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)

    ask(BEST, HELD_OUT, lengths, trials)
    fewer = [length for length in lengths if length in FEWER] or lengths
    ask(BEST, SENTENCE, fewer, other_trials)
    ask(BEST, HELD_OUT, fewer, other_trials, distractors=4)
    for recipe in RECIPES:
        if recipe != BEST:
            ask(recipe, HELD_OUT, fewer, other_trials)
    if beyond and cuda:
        ask(BEST, SENTENCE, [beyond], other_trials)
    cfg = net.cfg
    notes = [f"{model}: {net.num_parameters():,} parameters, trained at {cfg.max_seq_len:,} tokens with plain RoPE"]  # fmt: skip
    return make_evidence(
        "passkey", "Passkey retrieval by recipe and length", COLUMNS, rows,
        command=command, convention=CONVENTION, notes=notes, commit=commit,
    )  # fmt: skip


@contextmanager
def read_as(model: GPTOSS, recipe: Recipe) -> Any:
    """Give a model a recipe's setting inside a with-block; yields the rotary mode to ask for."""
    cfg, pruned = model.cfg, model.rope.mscale_pruned
    model.cfg = dataclasses.replace(cfg, yarn_layers=recipe.layers)
    model.rope.mscale_pruned = recipe.mscale_pruned
    try:
        yield recipe.mode
    finally:
        model.cfg, model.rope.mscale_pruned = cfg, pruned
