"""A run in pieces is the run in one piece: losses, weights, optimiser, data order, journal. Bit for bit."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_config

from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.journal import read_journal
from gptoss.training.pretrain import pretrain


def steps_of(directory: Path) -> list[dict]:
    """The journal's steps without what depends on the clock."""
    timed = ("tokens_per_second", "seconds")
    return [
        {k: v for k, v in record.items() if k not in timed}
        for record in read_journal(directory / "metrics.jsonl")
        if "event" not in record
    ]


def same_files(a: Path, b: Path, step: int) -> None:
    for kind in ("model", "optim"):
        left, right = (load_file(d / f"{kind}_step_{step}.safetensors") for d in (a, b))
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("workers", [0, 2])
def test_ten_steps_equal_three_pieces(shards, tmp_path, workers):
    data = {"num_workers": workers}
    straight = small_config(shards, tmp_path / "straight", data=data)
    pieces = small_config(shards, tmp_path / "pieces", data=data)
    whole = pretrain(straight, progress=False)
    parts = [pretrain(pieces, progress=False, max_steps=n) for n in (5, 2, 3)]
    assert [p.first_step for p in parts] == [0, 5, 7]
    assert whole.losses == [loss for p in parts for loss in p.losses]
    assert len(whole.losses) == 10
    same_files(tmp_path / "straight", tmp_path / "pieces", 10)
    assert steps_of(tmp_path / "straight") == steps_of(tmp_path / "pieces")
    assert [r["step"] for r in steps_of(tmp_path / "pieces")] == list(range(1, 11))


def test_across_epoch_and_shard_edges(shards, tmp_path):
    # 93 windows of 32 tokens in shards of 900 tokens; 25 steps of 4 sequences read 100: more than an epoch.
    data = {"train_data_path": str(shards / "validation")}
    runs = [
        small_config(
            shards,
            tmp_path / name,
            data=data,
            total_steps=25,
            save_interval=22,
            validation_interval=0,
        )
        for name in ("straight", "pieces")
    ]
    whole = pretrain(runs[0], progress=False)
    parts = [pretrain(runs[1], progress=False, max_steps=n) for n in (22, 2, 1)]
    assert whole.losses == [loss for p in parts for loss in p.losses]
    same_files(tmp_path / "straight", tmp_path / "pieces", 25)


def test_a_run_killed_behind_its_checkpoint_repeats_those_steps(shards, tmp_path):
    straight = small_config(shards, tmp_path / "straight")
    killed = small_config(shards, tmp_path / "killed")
    pretrain(straight, progress=False)

    def kill(step, _):
        if step == 8:
            raise SystemExit("as if the power went")

    with pytest.raises(SystemExit):
        pretrain(killed, progress=False, on_step=kill)
    assert [r["step"] for r in steps_of(tmp_path / "killed")][-1] == 8
    again = pretrain(killed, progress=False)
    assert again.first_step == 5
    same_files(tmp_path / "straight", tmp_path / "killed", 10)
    assert steps_of(tmp_path / "straight") == steps_of(tmp_path / "killed")


def test_a_step_can_be_chosen_and_later_ones_give_way(shards, tmp_path):
    run = small_config(shards, tmp_path / "run", save_interval=2)
    whole = pretrain(run, progress=False)
    again = pretrain(run, resume=4, progress=False, max_steps=3)
    assert again.losses == whole.losses[4:7]
    assert CheckpointManager(tmp_path / "run").list_checkpoints() == [0, 2, 4, 6, 7]
    assert [r["step"] for r in steps_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_finished_run_has_nothing_to_do(shards, tmp_path):
    run = small_config(shards, tmp_path / "run", total_steps=5)
    first = pretrain(run, progress=False)
    before = hashlib.sha256((tmp_path / "run" / "model_step_5.safetensors").read_bytes()).digest()
    again = pretrain(run, progress=False)
    assert (again.step, again.first_step, again.losses) == (5, 5, [])
    assert again.validation[-1] == first.validation[-1]
    after = hashlib.sha256((tmp_path / "run" / "model_step_5.safetensors").read_bytes()).digest()
    assert before == after


def test_a_longer_run_goes_on_from_a_shorter_ones_checkpoint(shards, tmp_path):
    run = small_config(shards, tmp_path / "run", total_steps=4)
    pretrain(run, progress=False)
    longer = replace(run, training=replace(run.training, total_steps=6))
    assert pretrain(longer, progress=False).step == 6


def test_accumulation_and_micro_batch_may_change_at_a_resume(shards, tmp_path):
    whole = pretrain(small_config(shards, tmp_path / "whole"), progress=False)
    run = small_config(shards, tmp_path / "run")
    first = pretrain(run, progress=False, max_steps=5)
    changed = small_config(
        shards, tmp_path / "run", micro_batch_size=1, gradient_accumulation_steps=4
    )
    second = pretrain(changed, progress=False)
    # The same sequences in other pieces: the aux loss is that of smaller micro-batches, so near and not equal.
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-3)


def test_only_the_newest_checkpoints_are_kept(shards, tmp_path):
    run = small_config(shards, tmp_path / "run", save_interval=2, keep_last=2)
    pretrain(run, progress=False)
    found = sorted(p.name for p in (tmp_path / "run").glob("model_step_*"))
    assert found == ["model_step_10.safetensors", "model_step_8.safetensors"]
