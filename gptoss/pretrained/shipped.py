"""Load a shipped model by name, offline; or ship one.

A shipped model is a folder: `config.json` (the run that trained it), `tokenizer.json`, `model-*.safetensors` in bf16,
and README.md, its model card.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gptoss.config import RunConfig
from gptoss.data.tokenizers import Tokenizer
from gptoss.model.transformer import GPTOSS

MAX_FILE_BYTES = 15 * 2**20


def list_pretrained() -> list[str]:
    """The names that `load_pretrained` knows."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/config.json"))


def load_pretrained(
    name: str | Path = "nano",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[GPTOSS, Tokenizer]:
    """Load a shipped model, ready to run, with its tokenizer. Nothing is fetched.

    Args:
        name: one of `list_pretrained()`, or a folder of that form.
        device: where to put it.
        dtype: of its weights, which are stored in bf16.

    Returns:
        The model in evaluation mode, set to the rotary mode that it was trained with, and its tokenizer.

    Raises:
        FileNotFoundError: no such model; the message lists those there are.
        ValueError: the weights do not fit the configuration beside them.
    """
    folder = Path(__file__).parent / name if str(name) in list_pretrained() else Path(name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no pretrained model {str(name)!r}: expected one of {', '.join(list_pretrained()) or '(none)'} "
            "or a folder with config.json, tokenizer.json and model-*.safetensors"
        )
    run = RunConfig.from_dict(json.loads((folder / "config.json").read_text()))
    with torch.device("meta"):
        model = GPTOSS(run.model)
    weights = {
        key: tensor.to(dtype)
        for path in sorted(folder.glob("model-*.safetensors"))
        for key, tensor in load_file(path).items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = {"head.weight"} if run.model.weight_tying else set()
    if unexpected or set(missing) - tied:
        raise ValueError(
            f"{folder}: weights do not fit config.json; missing {sorted(set(missing) - tied)}, unexpected {unexpected}"
        )
    if run.model.weight_tying:
        model.head.weight = model.embed.weight
    model.set_rope_mode(run.training.rope)
    return model.to(device).eval(), Tokenizer.load(folder / "tokenizer.json")


def export_pretrained(
    model: GPTOSS, run: RunConfig, tokenizer: Tokenizer, folder: Path
) -> list[Path]:
    """Write a trained model in the form that `load_pretrained` reads, its weights in bf16 in files of at most 15 MiB.

    Args:
        model: the trained model.
        run: the configuration that it was trained with.
        tokenizer: what its token ids mean.
        folder: created if needed; model files that are there are replaced.

    Returns:
        The files written. The model card is written by hand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    weights = {
        key: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for key, tensor in model.state_dict().items()
        if not (key == "head.weight" and run.model.weight_tying)
    }
    total = sum(tensor.nbytes for tensor in weights.values())
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = MAX_FILE_BYTES
    for key, tensor in weights.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = MAX_FILE_BYTES
        parts[-1][key] = tensor
        room -= tensor.nbytes
    assert len(parts) >= math.ceil(total / MAX_FILE_BYTES)
    written = []
    for number, part in enumerate(parts, start=1):
        path = folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, path)
        written.append(path)
    (folder / "config.json").write_text(json.dumps(run.to_dict(), indent=1) + "\n")
    tokenizer.save(folder / "tokenizer.json")
    return [*written, folder / "config.json", folder / "tokenizer.json"]
