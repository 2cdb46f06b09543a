"""The bar: plain text where somebody watches, nothing elsewhere; durations as people say them."""

import io

import pytest

from gptoss.training.metrics import Interval
from gptoss.training.progress import ProgressBar, duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (3 * 86_400 + 4 * 3600, "3 d 04 h"),
        (-1, "0 s"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nobody_watches_and_nothing_but_the_lines_is_printed(capsys):
    with ProgressBar(10) as bar:
        assert not bar.is_live
        bar.show(1, 2.0, None, None, None)
        bar.echo("a line [not markup]")
    captured = capsys.readouterr()
    assert captured.out == "a line [not markup]\n"
    assert captured.err == ""


def test_a_terminal_sees_loss_speed_mfu_memory_and_time_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with ProgressBar(100, step=10) as bar:
        assert bar.is_live
        bar.show(40, 3.25, Interval(40, 3.3, 12_345.0, 2.0), 0.123, 20.5)
        bar.echo("step=     40 | loss=3.3000")
    shown = terminal.getvalue()
    for words in (
        "40/100",
        "loss 3.250",
        "12,345 tok/s",
        "MFU 12.3%",
        "20.5 GiB",
        "2 min 00 s left",
    ):
        assert words in shown
    assert "step=     40 | loss=3.3000" in shown


def test_it_can_be_turned_off_in_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    assert not ProgressBar(10, enabled=False).is_live
