"""A run's journal becomes evidence with the run's own machine, and nothing is invented."""

import json
from pathlib import Path

import pytest

from gptoss.bench.training_run import read_run

START = {
    "event": "start", "step": 0, "date": "2026-01-02", "machine": "one TEST", "software": {"torch": "2"},
    "commit": "abc1234", "tokens_per_step": 100,
}  # fmt: skip


def write(folder: Path, records: list[dict]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def step(number: int, loss: float, **logged: float) -> dict:
    return {"step": number, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, **logged}


def test_a_row_holds_the_mean_since_the_row_before(tmp_path: Path) -> None:
    records = [
        START,
        step(1, 4.0),
        step(2, 2.0, tokens_per_second=10.0, seconds=20.0, mfu=0.5, memory_gib=3.0),
        step(3, 1.0),
        {"event": "validation", "step": 3, "loss": 1.5, "bits_per_byte": 0.7},
        {"event": "sample", "step": 3, "text": "def f"},
        step(4, 2.0, tokens_per_second=12.0, seconds=30.0),
    ]
    table = read_run(write(tmp_path, records), "training_x", "a run", "gptoss pretrain")
    assert (table["machine"], table["date"], table["commit"]) == ("one TEST", "2026-01-02", "abc1234")  # fmt: skip
    second, third, fourth = table["rows"]
    assert (second["loss"], second["tokens"], second["mfu"], second["peak_gib"]) == (3, 200, 0.5, 3)
    assert third == {"step": 3, "tokens": 300, "validation_loss": 1.5, "bits_per_byte": 0.7, "sample": "def f"}  # fmt: skip
    assert (fourth["loss"], fourth["tokens_per_s"]) == (1.5, 12)


def test_a_run_without_a_tokenizer_has_no_bits_a_byte(tmp_path: Path) -> None:
    """Older journals say null there, newer ones nothing."""
    validation = {"event": "validation", "step": 1, "loss": 1.5}
    logged = step(1, 4.0, tokens_per_second=10.0, seconds=20.0)
    for told in ({}, {"bits_per_byte": None}):
        write(tmp_path, [START, logged, validation | told])
        (row,) = read_run(tmp_path, "training_x", "a run", "gptoss pretrain")["rows"]
        assert row["validation_loss"] == 1.5
        assert "bits_per_byte" not in row


def test_a_run_that_does_not_say_where_it_was_made_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [step(1, 1.0, tokens_per_second=1.0, seconds=1.0)])
    with pytest.raises(ValueError, match="on which machine"):
        read_run(tmp_path, "training_x", "a run", "gptoss pretrain")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="save_dir"):
        read_run(tmp_path, "training_x", "a run", "gptoss pretrain")


def test_what_the_run_knew_of_its_text_is_the_first_row(tmp_path: Path) -> None:
    known = {
        "training_tokens": 900,
        "held_out_tokens": 90,
        "held_out_bytes": 300,
        "counting_loss": 7.25,
    }
    forecast = {"event": "forecast", "step": 1, "tokens_per_second": 9.6}
    write(tmp_path, [START | known, step(1, 4.0, tokens_per_second=10.0, seconds=20.0), forecast])
    first, second = read_run(tmp_path, "training_x", "a run", "gptoss pretrain")["rows"]
    assert first == {"step": 0, "tokens": 0, "forecast_tokens_per_s": 10} | known
    assert "counting_loss" not in second


FIRST_STEP = step(1, 4.0, tokens_per_second=10.0, seconds=20.0)


@pytest.mark.parametrize("before", [{}, {"training_tokens": 5, "training_bytes": 9}])
def test_the_last_start_says_which_text_it_was(tmp_path: Path, before: dict) -> None:
    """The first may come from a version that did not say it, or from before the text was prepared again."""
    known = {"training_tokens": 900, "counting_loss": 7.25}
    again = [START | before, FIRST_STEP, START | known | {"step": 1}]
    table = read_run(write(tmp_path, again), "training_x", "a run", "gptoss pretrain")
    assert table["rows"][0] == {"step": 0, "tokens": 0} | known
    assert table["notes"] == ["resumed 1 times"]
    write(tmp_path, [START | known, FIRST_STEP, START | {"step": 1}])
    assert read_run(tmp_path, "x", "a run", "gptoss pretrain")["rows"][0]["counting_loss"] == 7.25


@pytest.mark.parametrize("lost", ["step", "loss", "grad_norm", "machine", "tokens_per_step"])
def test_a_journal_that_lost_a_value_is_named(tmp_path: Path, lost: str) -> None:
    records = [START | {"training_tokens": 900}, FIRST_STEP]
    write(tmp_path, [{k: v for k, v in r.items() if k != lost} for r in records])
    with pytest.raises(ValueError, match=rf"metrics.jsonl: not the journal.*{lost}"):
        read_run(tmp_path, "training_x", "a run", "gptoss pretrain")
    write(tmp_path, [r | {lost: None} if lost in r else r for r in records])
    if lost != "machine":
        with pytest.raises(ValueError, match=r"metrics.jsonl"):
            read_run(tmp_path, "training_x", "a run", "gptoss pretrain")


def test_a_run_without_a_logged_step_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [START | {"training_tokens": 900}, step(1, 4.0)])
    with pytest.raises(ValueError, match="holds no logged step"):
        read_run(tmp_path, "training_x", "a run", "gptoss pretrain")
