"""metrics.jsonl: no step lost, none twice, a cut line is no end."""

import json

import pytest

from gptoss.training.journal import Journal, read_journal


def steps(path) -> list[int]:
    return [record["step"] for record in read_journal(path)]


def write(path, numbers, start=0) -> None:
    journal = Journal(path, start)
    for number in numbers:
        journal.write({"step": number, "loss": 1.0})
    journal.close()


def test_going_back_cuts_what_happens_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3, 4, 5])
    write(path, [4, 5, 6], start=3)
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_line_cut_by_a_crash_is_left_out_and_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-7])
    assert steps(path) == [1, 2]
    write(path, [3, 4], start=2)
    assert steps(path) == [1, 2, 3, 4]


def test_a_fresh_run_starts_an_empty_journal(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    write(path, [1])
    assert steps(path) == [1]


def test_events_go_back_with_their_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.write({"step": 1})
    journal.write({"event": "validation", "step": 1})
    journal.write({"step": 2})
    journal.write({"event": "validation", "step": 2})
    journal.rewind(1)
    journal.write({"step": 2, "again": True})
    journal.close()
    assert read_journal(path) == [
        {"step": 1},
        {"event": "validation", "step": 1},
        {"step": 2, "again": True},
    ]


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_journal(path)


def test_lines_reach_the_file_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    journal.write({"step": 1})
    assert json.loads(path.read_text()) == {"step": 1}
    journal.close()


def test_what_a_killed_rewind_staged_is_cleared_away(tmp_path):
    (tmp_path / ".metrics.jsonl.123.partial").write_text("half")
    Journal(tmp_path / "metrics.jsonl").close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
