"""The weights of a shipped model, read from its files: all of them, whole, of one export, and of the right shapes."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

TOKENIZER_KEY = "tokenizer_sha256"  # in the files' metadata, since an export writes it
FILE = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
NAMED_AT_MOST = 3


def read_weights(
    folder: Path, wanted: Mapping[str, torch.Size], tokenizer_sha256: str
) -> dict[str, Tensor]:
    """Read `model-NNNNN-of-MMMMM.safetensors` and hold them against a model.

    Args:
        folder: where they are.
        wanted: the shape of each tensor.
        tokenizer_sha256: of the tokenizer beside them.

    Returns:
        Each tensor by name, in the dtype that it is stored in.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, left over from another export or made with another tokenizer, or its tensors are
            not those of the model.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                written_with = (file.metadata() or {}).get(TOKENIZER_KEY, tokenizer_sha256)
                part = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 # it is no dict
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cut or damaged ({error}); put a whole copy there") from error
        if written_with != tokenizer_sha256:
            raise ValueError(
                f"{path} was made with another tokenizer than {folder / 'tokenizer.json'}: put that one there"
            )
        found |= part
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{folder}: weights do not fit config.json; missing {_named(missing)}, unexpected {_named(unexpected)}"
        )
    for key, tensor in found.items():
        if tensor.shape != wanted[key] or not tensor.is_floating_point():
            raise ValueError(
                f"{folder}: weights do not fit config.json; {key} is {tuple(tensor.shape)} of {tensor.dtype}, expected "
                f"{tuple(wanted[key])} of a floating dtype"
            )
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files of one export, in order.

    Raises:
        FileNotFoundError: one is missing, or all are.
        ValueError: there are files of several exports.
    """
    there = {path.name for path in folder.glob("model-*.safetensors")}
    counts = {found[1] if (found := FILE.fullmatch(name)) else "0" for name in there}
    if not there:
        raise FileNotFoundError(f"{folder}: no model-*.safetensors; put the model's files there")
    names = [f"model-{i:05d}-of-{n}.safetensors" for n in counts for i in range(1, int(n) + 1)]
    if len(counts) > 1 or there - set(names):
        raise ValueError(
            f"{folder}: files of several exports: {_named(sorted(there))}; delete those that do not belong to the model"
        )
    for name in names:
        if name not in there:
            raise FileNotFoundError(f"{folder / name}: missing; put the model's other files there")
    return [folder / name for name in names]


def _named(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED_AT_MOST]) or "none"
    more = len(names) - NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown
