"""The log line and its tokens per second."""

import math

import pytest

from gptoss.training.metrics import Interval, TrainingLogger, log_line


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    def __init__(self):
        self.points, self.closed = [], False

    def write(self, step, values):
        self.points.append((step, dict(values)))

    def close(self):
        self.closed = True


def test_the_documents_line_to_the_character():
    interval = Interval(200, 3.2145, 142_350.0, 1.0)
    line = log_line(interval, 2.67e-4, {"aux": 0.0031})
    assert line == (
        "step=    200 | loss=3.2145 | ppl=24.89 | lr=2.67e-04 | tps=142,350 | aux=0.0031"
    )


def test_every_token_of_every_rank_counts():
    clock, lines = Clock(), []
    logger = TrainingLogger(2, seq_len=4096, sequences_per_step=32, echo=lines.append, clock=clock)
    assert logger.log(1, 3.0, {"aux": 1.0}, 1e-3) is None
    clock.now += 4.0
    interval = logger.log(2, 2.0, {"aux": 1.5}, 1e-3)
    assert interval.tokens_per_second == 2 * 131_072 / 4.0
    assert interval.loss == 2.5
    assert lines == [
        "step=      2 | loss=2.5000 | ppl=12.18 | lr=1.00e-03 | tps=65,536 | aux=1.5000"
    ]


def test_pauses_are_not_training_time():
    clock = Clock()
    logger = TrainingLogger(1, seq_len=10, echo=None, clock=clock)
    with logger.pause():
        clock.now += 50.0
    clock.now += 2.0
    assert logger.log(1, 1.0).tokens_per_second == 5.0


def test_an_interval_cut_by_a_resume_counts_its_own_steps():
    clock = Clock()
    logger = TrainingLogger(10, seq_len=100, echo=None, clock=clock)  # goes on behind step 7
    for step in (8, 9, 10):
        clock.now += 1.0
        interval = logger.log(step, float(step))
    assert interval.tokens_per_second == 100
    assert interval.loss == 9.0


def test_trackers_get_the_same_numbers_and_are_closed():
    tracker = Recorder()
    logger = TrainingLogger(1, 8, trackers=[tracker], echo=None, clock=Clock())
    logger.log(1, 0.0, {"aux": 1.0}, 0.5)
    logger.finish()
    step, values = tracker.points[0]
    assert step == 1
    assert (values["loss"], values["perplexity"], values["lr"], values["aux"]) == (0, 1, 0.5, 1)
    assert tracker.closed


def test_an_enormous_loss_has_an_infinite_perplexity():
    assert Interval(1, 1e5, 1.0, 1.0).perplexity == math.inf


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match="log_interval = 0"):
        TrainingLogger(0)
