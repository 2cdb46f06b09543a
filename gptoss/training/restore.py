"""What lies beside the checkpoints, so that a directory explains itself: config.json and tokenizer.json (chapter 17)."""

import json
from pathlib import Path

import torch

from gptoss.config import RunConfig, read_run_config
from gptoss.data.atomic import remove_partial, write_atomically
from gptoss.data.tokenizers import Tokenizer
from gptoss.model.transformer import GPTOSS
from gptoss.training.checkpoint import CheckpointManager

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"


def write_description(directory: Path, run: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Write config.json and tokenizer.json into a run's directory, each whole or not at all."""
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        remove_partial(directory, name)
    text = json.dumps(run.to_dict(), indent=2) + "\n"
    write_atomically(directory / CONFIG_FILE, text.encode())
    if tokenizer is not None:
        tokenizer.save(directory / TOKENIZER_FILE)


def require_same_rotation(directory: Path, run: RunConfig) -> None:
    """Refuse to go on training a run with another rotary function than it began with; without config.json nothing is known.

    Raises:
        ValueError: the first setting that differs, and how to keep it.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        return
    began = read_run_config(path)
    settings = ["training.rope", "model.rope_theta", "model.yarn_prune_rope_global"]
    if (
        run.training.rope == "yarn"
    ):  # all of YaRN but the length that it is made for, which turns nothing
        yarn = (name for name in vars(run.model) if name.startswith("yarn_"))
        settings += [f"model.{name}" for name in yarn if name != "yarn_target_seq_len"]
    for setting in settings:
        section, name = setting.split(".")
        then, now = (getattr(getattr(one, section), name) for one in (began, run))
        if then != now:
            raise ValueError(
                f"{path}: this run began with {setting} = {then!r}, and now it is {now!r}: go on with --set "
                f"{setting}={str(then).lower() if isinstance(then, bool) else then}, or choose another training.save_dir"
            )


def changed_settings(directory: Path, run: RunConfig) -> list[str]:
    """What a run is now asked for otherwise than by its config.json, as "training.lr 0.001 → 0.0005"."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return []
    before, now = read_run_config(path).to_dict(), run.to_dict()
    return [
        f"{section}.{name} {before[section][name]} → {value}"
        for section, values in now.items()
        for name, value in values.items()
        if before[section][name] != value
    ]


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
    run = read_run_config(path)
    tokenizer_path = directory / TOKENIZER_FILE
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path.is_file() else None
    model = GPTOSS(run.model)
    CheckpointManager(directory).load(model, step=step)
    model.set_rope_mode(run.training.rope)
    return model.to(device).eval(), tokenizer, run
