"""What lies beside the checkpoints, so that a directory explains itself: config.json and tokenizer.json (chapter 17)."""

import json
from pathlib import Path

import torch

from gptoss.config import RunConfig
from gptoss.data.tokenizers import Tokenizer
from gptoss.model.transformer import GPTOSS
from gptoss.training.atomic import write_atomically
from gptoss.training.checkpoint import CheckpointManager

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"


def write_description(directory: Path, run: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Write config.json and tokenizer.json into a run's directory, each whole or not at all."""
    text = json.dumps(run.to_dict(), indent=2) + "\n"
    write_atomically(directory / CONFIG_FILE, lambda staged: _write(staged, text))
    if tokenizer is not None:
        tokenizer.save(directory / TOKENIZER_FILE)


def load_run(
    directory: str | Path, step: int | None = None, device: torch.device | str = "cpu"
) -> tuple[GPTOSS, Tokenizer | None, RunConfig]:
    """Load a trained model from a run's directory alone.

    Args:
        directory: a run's `save_dir`.
        step: which checkpoint; the latest complete one when left out.
        device: where the model goes.

    Returns:
        (model in evaluation mode and in the rotary mode that it was trained in, tokenizer or None, configuration).

    Raises:
        FileNotFoundError: no such directory, no config.json in it, or no complete checkpoint.
        ValueError: a file that is damaged or does not fit; the message names it.
    """
    directory = Path(directory)
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory; give the save_dir of a run")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; give the save_dir of a run of `gptoss pretrain`")
    try:
        run = RunConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a run's configuration: {error}") from error
    tokenizer_path = directory / TOKENIZER_FILE
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path.is_file() else None
    model = GPTOSS(run.model)
    CheckpointManager(directory).load(model, step=step)
    model.set_rope_mode(run.training.rope)
    return model.to(device).eval(), tokenizer, run


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
