"""Load a shipped model by name, offline; or ship one.

A shipped model is a folder: `config.json` (the run that trained it), `tokenizer.json`, `model-*.safetensors` in bf16,
and README.md, its model card.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gptoss.config import RunConfig, read_run_config
from gptoss.data.tokenizers import Tokenizer
from gptoss.model.transformer import GPTOSS
from gptoss.pretrained.weights import TOKENIZER_KEY, read_weights

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
        FileNotFoundError: no such model (the message lists those there are), or a file of it is missing.
        ValueError: a file is damaged, or weights, tokenizer and configuration do not belong together.
    """
    folder = Path(__file__).parent / name if str(name) in list_pretrained() else Path(name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no pretrained model {str(name)!r}: expected one of {', '.join(list_pretrained()) or '(none)'} "
            "or a folder with config.json, tokenizer.json and model-*.safetensors"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"dtype = {dtype}: expected a floating dtype, as in torch.bfloat16")
    run = read_run_config(folder / "config.json")
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens and the model {run.model.vocab_size}: it is another "
            "model's; put the right one there"
        )
    with torch.device("meta"):
        model = GPTOSS(run.model)
    wanted = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if run.model.weight_tying:
        del wanted["head.weight"]
    weights = read_weights(folder, wanted, tokenizer.sha256)
    model.load_state_dict({k: t.to(dtype) for k, t in weights.items()}, strict=False, assign=True)
    model.set_rope_mode(run.training.rope)
    return model.to(device).eval(), tokenizer


def export_pretrained(
    model: GPTOSS, run: RunConfig, tokenizer: Tokenizer, folder: Path
) -> list[Path]:
    """Write a trained model in the form that `load_pretrained` reads, its weights in bf16.

    A file holds at most 15 MiB of weights, so that it can lie in a repository; a tensor that is larger by itself, as the
    embedding of a large model, has a file of its own.

    Args:
        model: the trained model.
        run: the configuration that it was trained with.
        tokenizer: what its token ids mean.
        folder: created if needed; model files that are there are replaced.

    Returns:
        The files written. The model card is written by hand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        key: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for key, tensor in model.state_dict().items()
        if not (key == "head.weight" and run.model.weight_tying)
    }
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = MAX_FILE_BYTES
    for key, tensor in weights.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = MAX_FILE_BYTES
        parts[-1][key] = tensor
        room -= tensor.nbytes
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    written = []
    for number, part in enumerate(parts, start=1):
        path = folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, path, metadata={TOKENIZER_KEY: tokenizer.sha256})
        written.append(path)
    (folder / "config.json").write_text(json.dumps(run.to_dict(), indent=1) + "\n")
    tokenizer.save(folder / "tokenizer.json")
    return [*written, folder / "config.json", folder / "tokenizer.json"]
