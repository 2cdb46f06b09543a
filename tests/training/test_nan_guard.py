"""Whole runs that meet NaN: refused, rolled back behind the offending data, stopped with the batches named."""

import math
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptoss.training import pretrain as pretrain_module
from gptoss.training import reporter
from gptoss.training import trainer as trainer_module
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.guard import TrainingStopped
from gptoss.training.journal import read_journal
from gptoss.training.pretrain import pretrain
from gptoss.training.trainer import Trainer


class Poison:
    """Makes the gradient NaN, under a finite loss, in chosen launches (counted from 0) of the run."""

    def __init__(self, monkeypatch, launches):
        self.launches, self.count, self.positions = set(launches), 0, []
        self.model = None
        original = pretrain_module.assemble

        def assemble(run, world):
            built = original(run, world)
            self.model = built.model
            built.model.norm.weight.register_hook(self.hook)
            take_step = built.take_step

            def counted(inputs, targets, stop=False):
                self.now = self.count in self.launches
                self.count += 1
                return take_step(inputs, targets, stop)

            return replace(built, take_step=counted)

        monkeypatch.setattr(pretrain_module, "assemble", assemble)

    def hook(self, gradient):
        return gradient * float("nan") if self.now else gradient


@pytest.fixture(params=[0, 1], ids=["host waits", "host runs ahead"])
def lag(request, monkeypatch):
    """On a GPU the host runs a step ahead of what it has read; here it does so on a CPU too."""
    original = Trainer.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.lag = request.param

    monkeypatch.setattr(Trainer, "__init__", init)


def events(run, kind):
    records = read_journal(f"{run.training.save_dir}/metrics.jsonl")
    return [record for record in records if record.get("event") == kind]


def step_lines(run):
    records = read_journal(f"{run.training.save_dir}/metrics.jsonl")
    return [record for record in records if "event" not in record]


@pytest.mark.usefixtures("lag")
def test_one_nan_gradient_is_skipped_and_the_run_completes(small_run, monkeypatch):
    poison = Poison(monkeypatch, [3])
    run = small_run()
    result = pretrain(run, progress=False)
    assert result.step == len(result.losses) == 10
    assert poison.count == 11  # the refused batch cost no step, only its data
    assert [(e["step"], e["first"], e["last"]) for e in events(run, "refused")] == [(3, 12, 15)]
    assert [line["step"] for line in step_lines(run)] == list(range(1, 11))
    assert [line["position"] for line in step_lines(run)] == [4, 8, 12, *range(20, 45, 4)]
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


@pytest.mark.usefixtures("lag")
def test_nothing_is_due_at_step_0_where_the_first_step_is_refused(small_run, monkeypatch):
    Poison(monkeypatch, [0])
    run = small_run()
    result = pretrain(run, progress=False, max_steps=2)
    assert [entry.step for entry in result.validation] == [2]
    assert [e["step"] for e in events(run, "validation")] == [2]


@pytest.mark.usefixtures("lag")
def test_learning_rate_does_not_advance_with_a_refused_step(small_run, monkeypatch):
    clean = small_run("clean")
    pretrain(clean, progress=False)
    expected = [line["lr"] for line in step_lines(clean)]
    Poison(monkeypatch, [2, 5])
    run = small_run()
    pretrain(run, progress=False)
    assert [line["lr"] for line in step_lines(run)] == expected


@pytest.mark.usefixtures("lag")
def test_five_in_a_row_roll_back_and_go_on_behind_the_data(small_run, monkeypatch):
    poison = Poison(monkeypatch, range(7, 12))  # after step 7; the latest checkpoint is step 5
    run = small_run()
    result = pretrain(run, progress=False)
    assert poison.count == 7 + 5 + 5  # seven good, five refused, steps 6 to 10 once more
    (rollback,) = events(run, "rollback")
    assert (rollback["step"], rollback["reached"], rollback["position"]) == (5, 7, 12 * 4)
    assert [line["step"] for line in step_lines(run)] == list(range(1, 11))
    assert [line["position"] for line in step_lines(run)][5:] == [52, 56, 60, 64, 68]
    assert result.step == len(result.losses) == 10
    assert all(math.isfinite(loss) for loss in result.losses)


@pytest.mark.usefixtures("lag")
def test_what_happens_after_a_rollback_is_the_checkpoint_on_later_data(small_run, monkeypatch):
    """Weights, optimiser and schedule are those of the checkpoint: the next losses are a resumed run's on that data."""
    with monkeypatch.context() as poisoned:
        Poison(poisoned, range(7, 12))
        rolled = pretrain(small_run(), progress=False)

    run = small_run("reference")
    pretrain(run, progress=False, max_steps=5)
    original = trainer_module.MicroBatches.seek
    monkeypatch.setattr(
        trainer_module.MicroBatches, "seek", lambda self, position: original(self, 12 * 4)
    )
    resumed = pretrain(run, progress=False)
    assert resumed.losses == rolled.losses[5:]


def test_without_progress_it_stops_after_three_rollbacks_and_names_the_batches(
    small_run, monkeypatch
):
    Poison(monkeypatch, range(6, 1000))
    run = small_run(nan_guard_max_consecutive=2)
    with pytest.raises(
        TrainingStopped, match=r"3 rollbacks .* beyond step 6; .* sequences 24-27, 28-31,"
    ):
        pretrain(run, progress=False)
    assert len(events(run, "rollback")) == 3
    assert (
        CheckpointManager(run.training.save_dir).latest_step() == 5
    )  # what was saved before stands


def test_weights_poisoned_in_memory_are_replaced_from_the_checkpoint(small_run, monkeypatch):
    poison = Poison(monkeypatch, [])

    def spoil(step, _):
        if step == 6 and not spoil.done:
            spoil.done = True
            with torch.no_grad():
                poison.model.embed.weight[:] = float("nan")

    spoil.done = False
    run = small_run()
    result = pretrain(run, progress=False, on_step=spoil)
    assert result.step == 10
    assert len(events(run, "rollback")) == 1
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


def test_nan_before_the_first_save_goes_back_to_the_beginning(small_run, monkeypatch):
    Poison(monkeypatch, range(5))
    run = small_run()
    assert pretrain(run, progress=False).step == 10
    assert events(run, "rollback")[0]["step"] == 0


def test_a_rollback_does_not_go_to_later_steps_of_a_branch_that_was_left(small_run, monkeypatch):
    run = small_run(save_interval=2, total_steps=20)
    pretrain(run, progress=False, max_steps=8)
    Poison(monkeypatch, range(1, 6))  # step 3 is taken; steps 4, 6 and 8 are still on the disk
    result = pretrain(run, resume=2, progress=False, max_steps=3)
    (rollback,) = events(run, "rollback")
    assert (rollback["step"], rollback["reached"]) == (2, 3)
    assert (result.step, len(result.losses)) == (5, 3)
    assert CheckpointManager(run.training.save_dir).list_checkpoints() == [0, 2, 4, 5]


def test_a_rollback_passes_over_a_damaged_checkpoint(small_run, monkeypatch):
    Poison(monkeypatch, range(7, 12))  # after step 7
    run = small_run(save_interval=2)

    def damage(step, _):
        path = Path(run.training.save_dir) / "model_step_6.safetensors"
        if step == 7 and not damage.done:
            damage.done = True
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    damage.done = False
    assert pretrain(run, progress=False, on_step=damage).step == 10
    assert events(run, "rollback")[0]["step"] == 4


@pytest.mark.usefixtures("lag")
def test_trackers_go_back_with_the_run(small_run, monkeypatch):
    told = []
    tracker = types.SimpleNamespace(
        write=lambda step, values: told.append(step) if "loss" in values else None,
        rewind=lambda step: told.append(f"back to {step}"),
        close=lambda: told.append("end"),
    )
    monkeypatch.setattr(reporter, "open_trackers", lambda *_, **__: [tracker])
    Poison(monkeypatch, range(7, 12))  # after step 7; the latest checkpoint is step 5
    pretrain(small_run(log_interval=1), progress=False)
    assert told == [1, 2, 3, 4, 5, 6, 7, "back to 5", 6, 7, 8, 9, 10, "end"]


def test_what_a_rollback_undoes_is_not_in_the_result(small_run, prepared, monkeypatch):
    Poison(monkeypatch, range(7, 12))  # after step 7; the latest checkpoint is step 5
    data = {"train_data_path": str(prepared), "validation_data_path": None}
    run = small_run(model={"vocab_size": 320}, data=data, sample_interval=3, validation_interval=3)
    result = pretrain(run, progress=False)
    assert [step for step, _ in result.samples] == [3, 6, 9]
    assert [entry.step for entry in result.validation] == [3, 6, 9, 10]


def test_poisoned_weights_are_never_saved(small_run, monkeypatch):
    poison = Poison(monkeypatch, [])

    def spoil(step, _):
        if step == 5:  # a save is due here
            with torch.no_grad():
                poison.model.norm.weight[0] = float("inf")

    run = small_run(validation_interval=0)
    with pytest.raises(TrainingStopped, match="not finite at step 5: not saved"):
        pretrain(run, progress=False, on_step=spoil)
    assert CheckpointManager(run.training.save_dir).list_checkpoints() == [0]
