"""The files of a checkpoint: what a step is on the disk, when it is complete, and what is wrong when it is not.

A step N is three files in one directory:

    model_step_N.safetensors   the model's tensors by name, each stored once
    optim_step_N.safetensors   the optimiser's tensors, random states, whatever tensors the caller adds
    meta_step_N.json           everything else, with the length and SHA-256 of the other two

The meta file is written last and takes its name by one rename: before it the step does not exist, after it the step is
complete. A step that is saved again gets data files with new names ("model_step_N.2.safetensors"); the rename of the
meta file switches to them, and the old ones are deleted after it. So a complete step is never in danger.
Source: the documents' checkpoint protocol, with safetensors for every tensor; chapter 17 of this book.
"""

import errno
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gptoss.data.atomic import remove_partial, sync_directory, write_atomically
from gptoss.training.file_record import FileRecord, fault_in_file, record_of

FORMAT = 1
STEP_FILE = re.compile(
    r"(?:(?:model|optim)_step_(\d+)(?:\.\d+)?\.safetensors|meta_step_(\d+)\.json)"
)


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint is damaged or does not fit (the documents promise RuntimeError where it does not fit)."""


class CheckpointDirectory:
    """The checkpoint files of one run. One process at a time may write.

    Args:
        path: the directory; created by the first write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._sound: set[tuple[str, int, int]] = set()  # files whose bytes were checked already

    def write(
        self,
        step: int,
        model: dict[str, Tensor],
        optim: dict[str, Tensor],
        meta: Mapping[str, Any],
    ) -> None:
        """Write a step's three files, the meta file last.

        Args:
            step: the step.
            model: contiguous CPU tensors of the model.
            optim: contiguous CPU tensors of everything else.
            meta: JSON values; "checkpoint" is a dictionary, to which the records of the two files are added.

        Raises:
            OSError: a file could not be written or flushed. It is named, and all earlier files stand. This attempt's
                are gone, unless the meta file names them already: then the step is complete, as the message says.
        """
        old = self._names(step)
        new: list[str] = []
        records: list[FileRecord] = []
        path = self.path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers(step, old)
            for kind, tensors in (("model", model), ("optim", optim)):
                path = self._free_path(kind, step, old)
                new.append(path.name)
                write_atomically(path, partial(save_file, tensors))
                records.append(record_of(path))
            files = {"model": asdict(records[0]), "optim": asdict(records[1])}
            text = json.dumps(
                {**meta, "checkpoint": {**meta["checkpoint"], "files": files}}, indent=1
            )
            path = self.meta_path(step)
            write_atomically(path, text.encode())
        except (OSError, SafetensorError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            code = (isinstance(error, OSError) and error.errno) or errno.EIO
            message = f"checkpoint of step {step} not saved, earlier ones stand: {reason}"
            if new and new == self._names(step):  # only the flush after the last rename failed
                message = (
                    f"checkpoint of step {step} complete, but a power cut may undo it: {reason}"
                )
            else:
                for name in new:
                    (self.path / name).unlink(missing_ok=True)
            raise OSError(code, message, str(path)) from error
        for name in old:
            (self.path / name).unlink(missing_ok=True)

    def read_meta(self, step: int) -> dict[str, Any]:
        """A step's meta values.

        Raises:
            FileNotFoundError: the step has no meta file, so it was never completed.
            CheckpointError: the file is not a meta file of this format; the message names it.
        """
        path = self.meta_path(step)
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            if meta["step"] != step or meta["checkpoint"]["format"] != FORMAT:
                raise CheckpointError(
                    f"{path}: of step {meta['step']} and format {meta['checkpoint']['format']}; "
                    f"expected step {step} and format {FORMAT}"
                )
            records_of(meta)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path}: missing, so step {step} is not complete") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: not a checkpoint's meta file, or cut short ({type(error).__name__}: {error})"
            ) from error
        return meta

    def fault(self, step: int, *, checksum: bool = True) -> str | None:
        """Say what is wrong with a step, naming the file, or None when it is complete and undamaged.

        Args:
            step: the step.
            checksum: also hold every byte against its SHA-256 (once per file); without it the lengths alone.
        """
        try:
            records = records_of(self.read_meta(step))
        except (OSError, CheckpointError) as error:
            return str(error)
        for record in records:
            fault = fault_in_file(self.path, record, checksum=False)
            if fault is None and checksum and self._stamp(record.name) not in self._sound:
                fault = fault_in_file(self.path, record)
                if fault is None:
                    self._sound.add(self._stamp(record.name))
            if fault:
                return fault
        return None

    def steps(self) -> list[int]:
        """Every step that has at least one file, complete or not, ascending."""
        return sorted({step for step, _ in self._files()})

    def delete(self, step: int) -> None:
        """Delete a step's files, the meta file first, so that a half-deleted step does not look complete."""
        self.meta_path(step).unlink(missing_ok=True)
        for found, path in self._files():
            if found == step:
                path.unlink(missing_ok=True)
        if self.path.is_dir():
            sync_directory(self.path)

    def meta_path(self, step: int) -> Path:
        """Where a step's meta file lies."""
        return self.path / f"meta_step_{step}.json"

    def _files(self) -> list[tuple[int, Path]]:
        if not self.path.is_dir():
            return []
        found = ((STEP_FILE.fullmatch(path.name), path) for path in self.path.iterdir())
        return [(int(match[1] or match[2]), path) for match, path in found if match]

    def _names(self, step: int) -> list[str]:
        """The data files that a step's meta file names; none where there is no readable one."""
        try:
            return [record.name for record in records_of(self.read_meta(step))]
        except (OSError, CheckpointError):
            return []

    def _free_path(self, kind: str, step: int, taken: list[str]) -> Path:
        name, number = f"{kind}_step_{step}.safetensors", 1
        while name in taken:
            number += 1
            name = f"{kind}_step_{step}.{number}.safetensors"
        return self.path / name

    def _remove_leftovers(self, step: int, named: list[str]) -> None:
        """Remove what a killed writer left: staged files, and data files of this step that no meta file names."""
        remove_partial(self.path, "*_step_*")
        for found, path in self._files():
            if found == step and path.suffix == ".safetensors" and path.name not in named:
                path.unlink(missing_ok=True)

    def _stamp(self, name: str) -> tuple[str, int, int]:
        """A file's name, length and time of change: the same stamp, the same bytes."""
        status = (self.path / name).stat()
        return name, status.st_size, status.st_mtime_ns


def records_of(meta: Mapping[str, Any]) -> tuple[FileRecord, FileRecord]:
    """The records of a step's model and optimiser files, from its meta."""
    files = meta["checkpoint"]["files"]
    model, optim = (FileRecord(**files[kind]) for kind in ("model", "optim"))
    for record in (model, optim):
        if Path(record.name).name != record.name:
            raise TypeError(f"{record.name!r} is not a plain file name")
    return model, optim


def read_tensors(path: Path, prefixes: Iterable[str] = ("",)) -> dict[str, Tensor]:
    """The tensors of a safetensors file whose names start with one of the prefixes, on the CPU.

    Raises:
        CheckpointError: it is no safetensors file; nothing in it is run.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if name.startswith(tuple(prefixes))]  # noqa: SIM118 (not a dict)
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from error


def require_json(value: Any, where: str) -> None:
    """Check that a value comes back from JSON as it went in.

    Raises:
        ValueError: something in it would not; the message says where it stands and what it is.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: JSON keeps text keys only")
            require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(
            f"{where} is a {type(value).__name__}: expected text, numbers, lists and dictionaries "
            "(a tensor belongs in extra_state)"
        )
