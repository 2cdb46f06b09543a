"""Damaged files, full disks and hostile files: the previous checkpoint loads, or one line names the file."""

import errno
import json
import os
import pickle
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kills
import pytest
import torch
from torch import nn

from gptoss.data import atomic
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.checkpoint_files import CheckpointError
from gptoss.training.file_record import sha256_of

FILES = ("model_step_2.safetensors", "optim_step_2.safetensors", "meta_step_2.json")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1024])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.fixture
def two_steps(tmp_path: Path) -> CheckpointManager:
    """Steps 1 and 2, with serial numbers 1 and 2 in every tensor."""
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(*kills.state_of(step), step=step, extra_meta={"serial": step})
    return manager


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, empty, Path.unlink])
def test_damaged_step_is_skipped_and_named(two_steps, name: str, damage, caplog) -> None:
    damage(two_steps.save_dir / name)
    assert two_steps.latest_step() == 1
    assert two_steps.list_checkpoints() == [1]
    assert name in caplog.text or name.startswith("meta")
    model, _ = kills.state_of(0)
    assert two_steps.load(model)["serial"] == 1
    assert model.weight[0, 0] == 1
    with pytest.raises((CheckpointError, FileNotFoundError), match=name):
        two_steps.load(model, step=2)


@pytest.mark.parametrize("name", FILES[:2])
def test_flipped_bit_is_found(two_steps, name: str) -> None:
    flip(two_steps.save_dir / name)
    assert CheckpointManager(two_steps.save_dir).latest_step() == 1
    with pytest.raises(CheckpointError, match=rf"{name}: its bytes changed"):
        two_steps.load(kills.state_of(0)[0], step=2)


def test_damage_after_a_check_is_still_found(two_steps) -> None:
    assert two_steps.latest_step() == 2
    flip(two_steps.save_dir / FILES[0])
    assert two_steps.latest_step() == 1


def test_nothing_sound_left_names_every_fault(two_steps) -> None:
    empty(two_steps.save_dir / "model_step_1.safetensors")
    empty(two_steps.save_dir / "meta_step_2.json")
    with pytest.raises(
        FileNotFoundError, match=r"model_step_1\.safetensors: 0 bytes.*meta_step_2\.json"
    ):
        two_steps.load(kills.state_of(0)[0])


def test_empty_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="it holds no checkpoint file"):
        CheckpointManager(tmp_path).load(kills.state_of(0)[0])


def test_meta_that_points_elsewhere_is_refused(two_steps) -> None:
    path = two_steps.save_dir / "meta_step_2.json"
    meta = json.loads(path.read_text())
    meta["checkpoint"]["files"]["model"]["name"] = "../../etc/passwd"
    path.write_text(json.dumps(meta))
    assert two_steps.latest_step() == 1


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", FILES[:2])
@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_pickle_in_place_of_a_tensor_file_runs_nothing(two_steps, tmp_path, name, writer) -> None:
    """Even where the attacker also writes the right length and checksum into the meta file."""
    sprung = tmp_path / "sprung"
    path = two_steps.save_dir / name
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Trap(sprung)))
    else:
        torch.save(Trap(sprung), path)
    meta_path = two_steps.save_dir / "meta_step_2.json"
    meta = json.loads(meta_path.read_text())
    record = meta["checkpoint"]["files"]["model" if name.startswith("model") else "optim"]
    record.update(bytes=path.stat().st_size, sha256=sha256_of(path))
    meta_path.write_text(json.dumps(meta))
    model, optimizer = kills.state_of(0)
    with pytest.raises(CheckpointError, match=rf"{name}: not a safetensors file"):
        two_steps.load(model, step=2, optimizer=optimizer)
    assert not sprung.exists()
    assert model.weight[0, 0] == 0
    pickle.loads(pickle.dumps(Trap(sprung)))  # the trap itself works
    assert sprung.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 10 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def large_state(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1000, int(megabytes * 250), bias=False)
    return model, torch.optim.SGD(model.parameters())


def test_full_disk_keeps_the_previous_checkpoint_and_names_the_file(small_disk: Path) -> None:
    manager = CheckpointManager(small_disk)
    model, optimizer = large_state(megabytes=6)
    manager.save(model, optimizer, 1)
    with pytest.raises(
        OSError, match=r"step 2 not saved.*No space left.*model_step_2\.safetensors"
    ):
        manager.save(model, optimizer, 2)
    assert manager.latest_step() == 1
    assert len(list(small_disk.iterdir())) == 3
    manager.load(model)


def test_full_disk_at_the_second_file_takes_the_first_away(small_disk: Path) -> None:
    manager = CheckpointManager(small_disk)
    model, optimizer = large_state(megabytes=6)
    optimizer.state[model.weight]["momentum_buffer"] = torch.zeros_like(model.weight)
    with pytest.raises(OSError, match=r"optim_step_1\.safetensors"):
        manager.save(model, optimizer, 1)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "name"), [(500, "model_step_3.safetensors"), (40_000, "meta_step_3.json")]
)
def test_size_limit_on_files_keeps_the_previous_checkpoint(
    two_steps, limit: int, name: str
) -> None:
    """Works without root: the system refuses to let a file grow past the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    model, optimizer = kills.state_of(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=f"step 3 not saved.*{name}"):
            two_steps.save(model, optimizer, 3, extra_meta={"long": "x" * 50_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert two_steps.latest_step() == 2
    assert not list(two_steps.save_dir.glob("*step_3*"))


def test_failed_overwrite_keeps_the_step_that_stood(two_steps) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match="step 2 not saved"):
            two_steps.save(*kills.state_of(9), step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert two_steps.load(kills.state_of(0)[0])["serial"] == 2


@pytest.mark.parametrize(
    ("failing", "file", "serial", "words"),
    [
        (1, "model_step_2.2.safetensors", 2, "not saved"),
        (2, "optim_step_2.2.safetensors", 2, "not saved"),
        (3, "meta_step_2.json", 9, "complete, but a power cut may undo it"),
    ],
)
def test_step_saved_again_is_never_lost_when_a_directory_cannot_be_flushed(
    two_steps, monkeypatch, failing: int, file: str, serial: int, words: str
) -> None:
    """The flush follows the rename: at the third file the new data are what the meta file names."""
    sync, calls = atomic.sync_directory, iter(range(1, 9))

    def fail_once(directory: Path) -> None:
        if next(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        sync(directory)

    monkeypatch.setattr(atomic, "sync_directory", fail_once)
    with pytest.raises(OSError, match=rf"step 2 {words}.*Input/output error.*{file}"):
        two_steps.save(*kills.state_of(9), step=2, extra_meta={"serial": 9})
    assert two_steps.list_checkpoints() == [1, 2]
    assert two_steps.load(kills.state_of(0)[0])["serial"] == serial
    assert (two_steps.save_dir / file).exists() == (serial == 9)
    two_steps.save(*kills.state_of(7), step=2, extra_meta={"serial": 7})
    assert two_steps.load(kills.state_of(0)[0])["serial"] == 7
    assert len(list(two_steps.save_dir.glob("*_step_2*"))) == 3
