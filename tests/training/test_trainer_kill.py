"""SIGKILL while the trainer works, saves included: it goes on, and ends where an uninterrupted run ends."""

from pathlib import Path

import kills
import pytest
import torch
from safetensors.torch import load_file
from small_run import small_config

from gptoss.config import RunConfig
from gptoss.training.journal import read_journal


def steps_of(directory: Path) -> list[tuple[int, float]]:
    """Every step in the journal, with its loss."""
    records = read_journal(directory / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if "event" not in record]


def survive(shards: Path, root: Path, count: int) -> kills.Toll:
    """Kill runs `count` times; each ends with the weights, optimiser and journal of the uninterrupted one."""

    def make_run(name: str) -> RunConfig:
        settings = {"total_steps": 24, "save_interval": 3, "validation_interval": 0, "keep_last": 2}
        return small_config(shards, root / name, **settings)

    toll = kills.kill_trainer(make_run, count)
    assert toll.kills >= count
    for index in range(len(toll.per_run)):
        for kind in ("model", "optim"):
            name = f"{kind}_step_24.safetensors"
            straight, killed = (
                load_file(root / run / name) for run in ("uninterrupted", f"killed{index}")
            )
            assert straight.keys() == killed.keys()
            assert all(torch.equal(straight[key], killed[key]) for key in straight)
        assert steps_of(root / f"killed{index}") == steps_of(root / "uninterrupted")
    return toll


def test_thirty_kills_of_the_trainer(shards: Path, tmp_path: Path) -> None:
    survive(shards, tmp_path, 30)


@pytest.mark.torture
def test_two_hundred_kills_of_the_trainer(shards: Path, tmp_path: Path, capsys) -> None:
    toll = survive(shards, tmp_path, 200)
    with capsys.disabled():
        print(
            f"\n{toll.kills} kills of the trainer over {len(toll.per_run)} runs, {toll.during_a_save} of them during a "
            "save: every run ended with the weights, optimiser and journal of the uninterrupted one"
        )


@pytest.mark.torture
def test_two_hundred_kills_of_a_process_that_saves(tmp_path: Path, capsys) -> None:
    saves = kills.kill_at_random(tmp_path, kills=200)
    assert saves > 200
    with capsys.disabled():
        print(f"\n200 kills of a process that saves, {saves} saves: none lost, none mixed")
