"""TensorBoard and Weights & Biases: when asked, and as one curve over a resume."""

import sys
import types

import pytest

from gptoss.training import reporter
from gptoss.training.journal import read_journal
from gptoss.training.pretrain import pretrain
from gptoss.training.trackers import open_trackers


class FakeRun:
    def __init__(self, **settings):
        self.settings, self.id, self.points, self.finished = settings, "abc123", [], False

    def log(self, values, step):
        self.points.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.runs = []

    def init(**settings):
        module.runs.append(FakeRun(**settings))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_nothing_is_opened_unasked(tmp_path, wandb):
    assert open_trackers(tmp_path, 0, {}, tensorboard=False, environment={}) == []
    assert wandb.runs == []


def test_wandb_follows_the_documents_variables(tmp_path, wandb):
    environment = {"WANDB_PROJECT": "gpt-oss-lite", "WANDB_RUN_NAME": "first"}
    (tracker,) = open_trackers(tmp_path, 0, {"model": {}}, False, environment)
    tracker.write(3, {"loss": 2.0})
    tracker.close()
    (run,) = wandb.runs
    assert run.settings["project"] == "gpt-oss-lite"
    assert run.settings["name"] == "first"
    assert run.settings["id"] is None
    assert run.points == [(3, {"loss": 2.0})]
    assert run.finished


def test_a_resume_goes_on_in_the_same_wandb_run(tmp_path, wandb):
    for _ in range(2):
        open_trackers(tmp_path, 0, {}, False, {"WANDB_PROJECT": "p"})
    assert [run.settings["id"] for run in wandb.runs] == [None, "abc123"]


def test_a_missing_wandb_is_said_and_skipped(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    lines = []
    assert open_trackers(tmp_path, 0, {}, False, {"WANDB_PROJECT": "p"}, lines.append) == []
    assert lines == ["[logging] wandb not installed -- skipping WandB integration"]


def test_tensorboard_hides_what_is_behind_the_resumed_step(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard missing"
    )
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        (tracker,) = open_trackers(tmp_path, start, {}, True, {})
        for step in steps:
            tracker.write(step, {"loss": float(start + step)})
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0), (5, 7.0)]


def test_tensorboard_forgets_what_is_behind_a_rollback(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard missing"
    )
    (tracker,) = open_trackers(tmp_path, 0, {}, True, {})
    for first, last, value in ((1, 5, 1.0), (4, 6, 2.0), (3, 4, 3.0)):
        if first > 1:
            tracker.rewind(first - 1)
        for step in range(first, last + 1):
            tracker.write(step, {"loss": value})
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0)]


def test_wandb_keeps_what_it_has_seen_before_a_rollback(tmp_path, wandb):
    (tracker,) = open_trackers(tmp_path, 0, {}, False, {"WANDB_PROJECT": "p"})
    tracker.write(3, {"loss": 2.0})
    tracker.rewind(2)
    tracker.write(3, {"loss": 1.0})
    (run,) = wandb.runs  # the same run; of two values of a step W&B itself keeps the first
    assert run.points == [(3, {"loss": 2.0}), (3, {"loss": 1.0})]


def test_trackers_get_numbers_alone_where_no_tokenizer_tells_bytes(small_run, monkeypatch):
    """TensorBoard takes nothing else."""
    points = []
    tracker = types.SimpleNamespace(write=lambda *point: points.append(point), close=lambda: None)
    monkeypatch.setattr(reporter, "open_trackers", lambda *_, **__: [tracker])
    run = small_run()
    result = pretrain(run, progress=False)
    validation = [(step, v) for step, v in points if "validation/loss" in v]
    assert validation == [(e.step, {"validation/loss": e.loss}) for e in result.validation]
    records = read_journal(f"{run.training.save_dir}/metrics.jsonl")
    assert not any("bits_per_byte" in record for record in records)


def test_a_missing_tensorboard_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        open_trackers(tmp_path, 0, {}, True, {})
