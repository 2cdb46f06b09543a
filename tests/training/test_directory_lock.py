"""Two trainers never share a directory, and a killed one is in nobody's way."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from gptoss.training import directory_lock
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.directory_lock import LOCK_FILE, DirectoryInUse, hold_directory
from gptoss.training.journal import read_journal
from gptoss.training.pretrain import pretrain
from gptoss.training.restore import load_run

pytest.importorskip("fcntl", reason="this system has no record locks")

HOLDER = """
import os, sys, time
from pathlib import Path
from gptoss.training.directory_lock import hold_directory
with hold_directory(Path(sys.argv[1])):
    worker = os.fork()  # as a data worker: it has the parent's open files
    if worker == 0:
        time.sleep(600)
    print(worker, flush=True)
    time.sleep(600)
"""


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "gptoss", "pretrain", "--config", str(config)]


def steps_in(directory: Path) -> list[int]:
    records = read_journal(directory / "metrics.jsonl")
    return [record["step"] for record in records if "event" not in record]


def wait_for(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def workers_of(pid: int) -> list[int]:
    """The children of a process, by /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


@pytest.fixture
def endless(small_run, tmp_path):
    """A run that does not end by itself, and its trainer in another process, which has taken a few steps."""
    run = small_run(
        total_steps=10**6, save_interval=5, validation_interval=0, data={"num_workers": 2}
    )
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run.to_dict()))
    trainer = subprocess.Popen([*command(config), "--quiet"])
    try:
        wait_for(lambda: trainer.poll() is not None or len(steps_in(tmp_path / "run")) > 6)
        assert trainer.poll() is None
        yield run, config, trainer
    finally:
        trainer.kill()
        trainer.wait()


def test_second_trainer_is_refused_in_one_line_and_the_first_goes_on(endless, tmp_path) -> None:
    _, config, trainer = endless
    second = subprocess.run(command(config), capture_output=True, text=True, timeout=90)
    assert second.returncode == 2
    assert second.stdout == ""
    (line,) = second.stderr.splitlines()
    assert line.startswith(
        f"gptoss: {tmp_path / 'run'}: another trainer works here (process {trainer.pid} on {socket.gethostname()}, since "
    )
    assert line.endswith(
        "wait until it has ended, end it, or choose another directory with --set training.save_dir=…"
    )
    reached = steps_in(tmp_path / "run")[-1]
    wait_for(lambda: steps_in(tmp_path / "run")[-1] > reached)
    assert steps_in(tmp_path / "run") == list(range(1, steps_in(tmp_path / "run")[-1] + 1))


def test_reading_is_not_blocked_and_leaves_the_lock_alone(endless, tmp_path) -> None:
    run, _, trainer = endless
    model, _, found = load_run(tmp_path / "run", step=0)
    assert model.cfg == run.model
    assert found.training.save_dir == run.training.save_dir
    assert CheckpointManager(tmp_path / "run").latest_step() >= 5
    assert trainer.poll() is None
    with pytest.raises(DirectoryInUse), hold_directory(tmp_path / "run", patience=0):
        pass


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
def test_resume_goes_on_at_once_after_a_kill_although_data_workers_live(endless, tmp_path) -> None:
    run, _, trainer = endless
    workers = workers_of(trainer.pid)
    assert len(workers) >= 2
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # it does not see that its trainer is gone
    try:
        trainer.kill()
        trainer.wait()
        assert (tmp_path / "run" / LOCK_FILE).exists()
        saved = CheckpointManager(tmp_path / "run").latest_step()
        result = pretrain(run, progress=False, max_steps=1)
        assert (result.first_step, result.step) == (saved, saved + 1)
        for worker in workers:
            os.kill(worker, 0)  # still there
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_lock_dies_with_its_process_and_not_with_a_fork_of_it(tmp_path) -> None:
    """The fork outlives the killed holder with all its open files, as a worker would that hangs."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(DirectoryInUse, match=f"process {holder.pid} on "):
            hold_directory(tmp_path, patience=0).__enter__()
        holder.kill()
        holder.wait()
        with hold_directory(tmp_path, patience=0):
            os.kill(worker, 0)
    finally:
        holder.kill()
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()


def test_a_fork_that_ends_does_not_take_the_lock_with_it(tmp_path) -> None:
    """It closes the file that it has inherited, tries in vain to lock another description of it, and closes that too."""
    other = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with hold_directory(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                hold_directory(tmp_path, patience=0).__enter__()
            except DirectoryInUse:
                os._exit(7)
            os._exit(1)
        assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 7
        refused = subprocess.run(other, capture_output=True, text=True, timeout=60)
        assert f"DirectoryInUse: {tmp_path}: another trainer works here" in refused.stderr


def test_same_process_cannot_train_twice_into_a_directory(small_run, tmp_path) -> None:
    """A second descriptor, once closed, would give the first one's lock up: the table is asked before."""
    said: list[BaseException] = []

    def again() -> None:
        try:
            pretrain(small_run(), progress=False)
        except DirectoryInUse as error:
            said.append(error)

    def on_step(step, _) -> None:
        if step == 3:
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
            other = subprocess.run(
                [sys.executable, "-c", HOLDER, str(tmp_path / "run")], capture_output=True
            )
            assert b"DirectoryInUse" in other.stderr

    assert pretrain(small_run(), progress=False, on_step=on_step).step == 10
    assert len(said) == 1
    assert "this process trains into it already" in str(said[0])
    assert steps_in(tmp_path / "run") == list(range(1, 11))


def test_nothing_stays_in_the_directory_and_a_file_that_was_left_is_no_lock(
    small_run, tmp_path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / LOCK_FILE).write_text("process 1 on elsewhere, since a long time\n" * 3)
    seen = []

    def on_step(step, _) -> None:
        seen.append((directory / LOCK_FILE).read_text())

    # Reading the file here would give the lock up (any descriptor of it does); this run has nobody beside it.
    pretrain(small_run(), progress=False, max_steps=1, on_step=on_step)
    assert seen[0].startswith(f"process {os.getpid()} on {socket.gethostname()}, since ")
    assert seen[0].count("\n") == 1
    assert not (directory / LOCK_FILE).exists()


def test_a_name_taken_away_while_one_waits_is_not_mistaken_for_the_lock(tmp_path, monkeypatch):
    """Between opening and locking its holder ends: the file is locked, but it has no name any more."""
    real, opened = os.open, []

    def slow_open(path, *arguments) -> int:
        descriptor = real(path, *arguments)
        opened.append(descriptor)
        if len(opened) == 1:
            os.unlink(path)
        return descriptor

    monkeypatch.setattr(directory_lock.os, "open", slow_open)
    with hold_directory(tmp_path, patience=0):
        assert len(opened) == 2
        assert (tmp_path / LOCK_FILE).exists()
    monkeypatch.undo()
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_deleted_lock_file_of_another_is_left_alone(tmp_path) -> None:
    with hold_directory(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        (tmp_path / LOCK_FILE).write_text("of another trainer")
    assert (tmp_path / LOCK_FILE).exists()


def test_holder_on_another_machine_may_be_gone_for_good(tmp_path, monkeypatch) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    worker = int(holder.stdout.readline())
    monkeypatch.setattr(directory_lock.socket, "gethostname", lambda: "another")
    try:
        with pytest.raises(DirectoryInUse, match=f"gone for good, delete {tmp_path / LOCK_FILE}"):
            hold_directory(tmp_path, patience=0).__enter__()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        os.kill(worker, signal.SIGKILL)


def test_file_system_without_locks_is_a_warning(small_run, tmp_path, monkeypatch) -> None:
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directory_lock.fcntl, "lockf", no_locks)
    with pytest.warns(UserWarning, match="knows no locks"):
        assert pretrain(small_run(), progress=False, max_steps=1).step == 1
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_system_without_fcntl_trains_without_a_lock(small_run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(directory_lock, "fcntl", None)
    assert pretrain(small_run(), progress=False, max_steps=1).step == 1


def test_refused_run_leaves_the_directory_as_it_was(small_run, tmp_path) -> None:
    pretrain(small_run(), progress=False, max_steps=1)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(ValueError, match="holds checkpoints"):
        pretrain(small_run(), progress=False, resume="never")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    with pytest.raises(ValueError, match="no data"):
        pretrain(small_run("new", data={"train_data_path": None, "corpus": None}), progress=False)
    assert not (tmp_path / "new").exists()


def test_two_that_begin_a_new_directory_at_once(small_run, tmp_path, monkeypatch) -> None:
    """Neither found a directory; one has trained and left while the other was still building its model."""
    module = sys.modules["gptoss.training.pretrain"]
    assemble, others = module.assemble, []

    def slow_assemble(*arguments):
        if not others:
            others.append(None)
            others[0] = pretrain(small_run(), progress=False)
        return assemble(*arguments)

    monkeypatch.setattr(module, "assemble", slow_assemble)
    with pytest.raises(ValueError, match="another trainer has saved here meanwhile: start again"):
        pretrain(small_run(), progress=False)
    assert others[0].step == 10
    assert steps_in(tmp_path / "run") == list(range(1, 11))
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    assert pretrain(small_run(), progress=False).first_step == 10


def test_every_process_of_a_refused_run_ends(small_run, tmp_path) -> None:
    """The main one tries the lock, all learn what came of it, one says so: nobody waits for the others for ever."""
    (tmp_path / "run").mkdir()
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_run().to_dict()))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*launch, *command(config)[1:], "--device", "cpu"]
    with hold_directory(tmp_path / "run"):
        refused = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=120
        )
    assert refused.returncode != 0
    lines = [line for line in refused.stderr.splitlines() if line.startswith("gptoss: ")]
    assert len(lines) == 1
    assert f"process {os.getpid()} on " in lines[0]
