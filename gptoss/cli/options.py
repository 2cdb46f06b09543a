"""Options that several commands share, and what they stand for."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from gptoss.data.tokenizers import Tokenizer
    from gptoss.model.transformer import GPTOSS

Checkpoint = Annotated[
    Path | None, typer.Option(help="A run's save_dir; its latest complete checkpoint is used.")
]
Step = Annotated[int | None, typer.Option(help="Which checkpoint, when not the latest.")]
Shipped = Annotated[str | None, typer.Option("--model", help='A model of the package: "nano".')]
Device = Annotated[
    str | None, typer.Option(help="cuda, cuda:1, cpu; a GPU where there is one when left out.")
]
Rope = Annotated[str, typer.Option(help='Rotary mode: "auto", "plain" or "yarn".')]
Config = Annotated[
    str, typer.Option(help="A configuration of the package (tiny, …) or a YAML file.")
]


def is_main_process() -> bool:
    """Whether this is the one process of the run that speaks; torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"


def device_of(name: str | None) -> "torch.device":
    """The device that a command runs on: the named one, else a GPU where there is one."""
    import torch

    place = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device {place}: PyTorch sees no CUDA device here; leave it out or say cpu"
        )
    try:
        device = torch.device(place)
    except RuntimeError:
        device = None
    if device is None or device.type == "meta":
        raise ValueError(f"device {place}: expected cpu, cuda or cuda:NUMBER")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such number, or a kind that is not here
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {place}: cannot be used here: {reason}") from error
    return device


def writable(path: Path | None) -> None:
    """See that a file can be written before the work that it is for; its folder is made.

    Raises:
        OSError: it cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written: name another file")


def load_model(
    checkpoint: Path | None, shipped: str | None, step: int | None, device: str | None
) -> "tuple[GPTOSS, Tokenizer]":
    """The model that a command names, on its device, with its tokenizer."""
    if (checkpoint is None) == (shipped is None):
        raise ValueError("expected a model: --checkpoint DIRECTORY or --model NAME, one of the two")
    if shipped is not None and step is not None:
        raise ValueError(
            "--step chooses among a run's checkpoints: give --checkpoint, or leave it out"
        )
    place = device_of(device)
    if shipped is not None:
        from gptoss.pretrained import load_pretrained

        net, words = load_pretrained(shipped)
        return net.to(place), words
    from gptoss.training.restore import load_run

    assert checkpoint is not None
    model, tokenizer, _ = load_run(checkpoint, step, place)
    if tokenizer is None:
        raise ValueError(
            f"{checkpoint} has no tokenizer.json: put the one of the training text there"
        )
    return model, tokenizer
