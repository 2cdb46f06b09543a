"""SIGKILL at every call into the file system, and at random moments: a finished save is never lost, none is mixed."""

from pathlib import Path

import kills


def test_kill_before_each_system_call_of_a_new_step(tmp_path: Path) -> None:
    """Save 2 is a step of its own after save 1."""
    call = 0
    found = []
    while True:
        call += 1
        directory = tmp_path / str(call)
        kills.save(directory, 1)
        if not kills.kill_before_call(directory, 2, call):
            break
        found.append(kills.newest_serial(directory))
        kills.save(directory, 3)  # goes on, and clears what the kill left
        assert kills.newest_serial(directory) == 3
        assert len(list(directory.iterdir())) == 3
    assert found == sorted(found)  # one moment decides: before it save 1, after it save 2
    assert set(found) == {1, 2}
    assert call > 10


def test_kill_before_each_system_call_of_an_overwritten_step(tmp_path: Path) -> None:
    """Saves 4 and 5 are the same step."""
    call = 0
    found = []
    while True:
        call += 1
        directory = tmp_path / str(call)
        kills.save(directory, 4)
        if not kills.kill_before_call(directory, 5, call):
            break
        found.append(kills.newest_serial(directory))
    assert found == sorted(found)
    assert set(found) == {4, 5}


def test_thirty_kills_at_random_moments(tmp_path: Path) -> None:
    assert kills.kill_at_random(tmp_path, kills=30) > 30
