"""Ctrl-C and SIGTERM: the step is finished and saved; a second one leaves at once; nothing is harmed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.interrupt import stop_on_signal
from gptoss.training.journal import read_journal
from gptoss.training.pretrain import pretrain


def send(number: signal.Signals, at: int, times: int = 1):
    def on_step(step, _):
        if step == at:
            for _ in range(times):
                os.kill(os.getpid(), number)

    return on_step


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_the_step_is_saved_and_the_lines_say_so(small_run, tmp_path, capfd, number, name):
    result = pretrain(small_run(), on_step=send(number, 3))
    assert (result.step, result.stopped_by) == (3, name)
    assert CheckpointManager(tmp_path / "run").latest_step() == 3
    captured = capfd.readouterr()
    assert captured.err == (
        f"\n[stop] {name}: finishing the step, then saving; once more leaves at once\n"
    )
    assert captured.out.splitlines()[-1] == (
        f"[stop] {name}: step 3 of 10 is saved in {tmp_path / 'run'}; the same command goes on"
    )


def test_the_interrupted_run_ends_as_the_uninterrupted_one(small_run):
    straight = pretrain(small_run("straight"), progress=False)
    first = pretrain(small_run(), progress=False, on_step=send(signal.SIGINT, 4))
    second = pretrain(small_run(), progress=False)
    assert first.losses + second.losses == straight.losses


def test_a_second_signal_leaves_at_once_and_harms_nothing(small_run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pretrain(small_run(), progress=False, on_step=send(signal.SIGINT, 7, times=2))
    assert CheckpointManager(tmp_path / "run").latest_step() == 5
    assert pretrain(small_run(), progress=False).step == 10
    steps = [
        r["step"] for r in read_journal(tmp_path / "run" / "metrics.jsonl") if "event" not in r
    ]
    assert steps == list(range(1, 11))


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signal():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_trains_without_signals(small_run):
    results = []
    thread = threading.Thread(target=lambda: results.append(pretrain(small_run(), progress=False)))
    thread.start()
    thread.join()
    assert results[0].step == 10


def test_sigterm_to_the_command_saves_and_the_same_command_goes_on(small_run, tmp_path):
    run = small_run(total_steps=100_000, save_interval=50_000, validation_interval=0)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run.to_dict()))
    command = [sys.executable, "-m", "gptoss", "pretrain", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (journal.exists() and len(read_journal(journal)) > 3):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "[stop] SIGTERM: step" in out
    assert "Traceback" not in err
    step = CheckpointManager(tmp_path / "run").latest_step()
    assert step is not None
    assert step > 2
    assert pretrain(run, progress=False, max_steps=1).first_step == step
