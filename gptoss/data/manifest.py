"""manifest.json: what a directory of shards holds, and whether its files agree (chapter 13).

The manifest is written last, so a directory with a manifest is complete. Reading it looks at names and sizes only;
`verify_shards` reads every byte.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
REQUIRED_KEYS = ("dtype", "vocab_size", "eos_token_id", "total_tokens", "shard_count")


def dtype_for_vocabulary(vocab_size: int) -> str:
    """The smallest integer that holds every id below vocab_size: "uint16" to 65,536, then "uint32".

    Raises:
        ValueError: vocab_size is not in [1, 2**32].
    """
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size = {vocab_size}: expected 1 to 2**32")
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class ShardInfo:
    """One file: its name, its number of tokens, the SHA-256 of its bytes ("" when the manifest has none)."""

    name: str
    tokens: int
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a directory of shards holds. `text_bytes` is the UTF-8 size of the text, for bits per byte; 0 if unknown."""

    dtype: str
    vocab_size: int
    eos_token_id: int
    total_tokens: int
    shard_count: int
    shards: tuple[ShardInfo, ...] = ()
    tokenizer_sha256: str = ""
    documents: int = 0
    text_bytes: int = 0
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The manifest's text: keys in a fixed order, so equal manifests are equal bytes."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_manifest(directory: str | Path) -> Manifest:
    """Read a directory's manifest and hold it against the files: their number, names and sizes.

    Files without per-shard entries (only dtype, vocab_size, eos_token_id, total_tokens, shard_count) are taken too.

    Raises:
        FileNotFoundError: no such directory, no manifest, or a shard that the manifest counts is missing.
        ValueError: not a manifest of this form, or it disagrees with the files; the message names the file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: no such directory of shards; make one with `gptoss prepare`"
        )
    path = directory / MANIFEST
    files = sorted(directory.glob("shard_*.bin"))
    if not path.is_file():
        what = "no manifest.json" if files else "no shard_*.bin and no manifest.json"
        raise FileNotFoundError(
            f"{directory}: {what} here; run `gptoss prepare` (again, if it was interrupted)"
        )
    manifest = _parse_manifest(path)
    if not files:
        raise FileNotFoundError(
            f"{directory}: no shard_*.bin here, though {path} counts {manifest.shard_count}"
        )
    item = DTYPES[manifest.dtype].itemsize
    found = tuple(ShardInfo(file.name, file.stat().st_size // item) for file in files)
    listed = manifest.shards or found
    names = {shard.name for shard in found}
    for shard in listed:
        if shard.name not in names:
            raise FileNotFoundError(f"{directory / shard.name}: missing, though {path} lists it")
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{file}: empty shard; prepare the data again")
        if file.stat().st_size % item:
            raise ValueError(
                f"{file}: {file.stat().st_size} bytes is no whole number of {manifest.dtype} tokens; "
                "the file was cut or is no shard"
            )
    by_name = {shard.name: shard for shard in listed}
    for shard in found:
        if shard.name not in by_name:
            raise ValueError(f"{directory / shard.name}: not listed in {path}; remove one of them")
        if shard.tokens != by_name[shard.name].tokens:
            raise ValueError(
                f"{directory / shard.name}: holds {shard.tokens} tokens, but {path} says "
                f"{by_name[shard.name].tokens}; prepare the data again"
            )
    for name, says, has in (
        ("shard_count", manifest.shard_count, len(found)),
        ("total_tokens", manifest.total_tokens, sum(shard.tokens for shard in found)),
    ):
        if says != has:
            raise ValueError(f"{path}: {name} says {says}, but the files hold {has}")
    return Manifest(**{**manifest.__dict__, "shards": tuple(by_name[s.name] for s in found)})


def verify_shards(directory: str | Path, progress: Callable[[str], None] | None = None) -> Manifest:
    """Read every byte: check each shard's SHA-256 and that every id lies in the vocabulary.

    Raises:
        ValueError: a checksum or an id that is wrong; the message names the file and the place.
        FileNotFoundError: as `read_manifest`.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    for shard in manifest.shards:
        path = directory / shard.name
        if progress is not None:
            progress(shard.name)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            first = 0
            while data := file.read(1 << 24):
                digest.update(data)
                ids = np.frombuffer(data, DTYPES[manifest.dtype])
                check_ids(ids, manifest.vocab_size, path, first)
                first += ids.size
        if shard.sha256 and digest.hexdigest() != shard.sha256:
            raise ValueError(
                f"{path}: its checksum is not the one in {directory / MANIFEST}; the file has changed"
            )
    return manifest


def check_ids(ids: np.ndarray, vocab_size: int, path: Path, first: int) -> None:
    """Raise a ValueError naming file and position if an id is not below vocab_size."""
    if ids.size and int(ids.max()) >= vocab_size:
        at = int(np.argmax(ids >= vocab_size))
        raise ValueError(
            f"{path}: token {first + at} is id {int(ids[at])}, but the manifest's vocab_size is {vocab_size}; "
            "the shard was written with another tokenizer"
        )


def _parse_manifest(path: Path) -> Manifest:
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict) or any(key not in raw for key in REQUIRED_KEYS):
        raise ValueError(f"{path}: expected the keys {', '.join(REQUIRED_KEYS)}")
    for key in REQUIRED_KEYS[1:]:
        if not isinstance(raw[key], int) or isinstance(raw[key], bool):
            raise ValueError(f"{path}: {key} = {raw[key]!r}: expected an integer")
    if raw["dtype"] not in tuple(DTYPES):  # which compares: JSON may hold anything
        raise ValueError(f"{path}: dtype = {raw['dtype']!r}: expected one of {', '.join(DTYPES)}")
    if raw.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version = {raw['format_version']}: this version reads {FORMAT_VERSION}"
        )
    if raw["vocab_size"] < 1 or dtype_for_vocabulary(raw["vocab_size"]) > raw["dtype"]:
        raise ValueError(
            f"{path}: a vocabulary of {raw['vocab_size']} does not fit into {raw['dtype']}"
        )
    if not 0 <= raw["eos_token_id"] < raw["vocab_size"]:
        raise ValueError(
            f"{path}: eos_token_id = {raw['eos_token_id']} is outside the vocabulary of {raw['vocab_size']}"
        )
    try:
        shards = tuple(ShardInfo(**shard) for shard in raw.get("shards", ()))
    except TypeError as error:
        raise ValueError(f"{path}: shards: expected name, tokens and sha256 in each") from error
    known = {key: raw[key] for key in Manifest.__dataclass_fields__ if key in raw}
    return Manifest(**{**known, "shards": shards})
