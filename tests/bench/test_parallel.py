"""One process against two over gloo: equal losses and tokens, speed from the journal, and launches that fail say why."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from small_run import SMALL_MODEL, SMALL_TRAINING, write_shards

from gptoss.bench import parallel
from gptoss.bench.evidence import check_evidence
from gptoss.bench.launch import Engine, reason_in
from gptoss.bench.parallel import compare_engines, engines_of
from gptoss.cli import main

TRAINING = SMALL_TRAINING | {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
STEPS = 9
COMMAND = ["--set", "training.lr=2e-2", "--steps", str(STEPS), "--processes", "2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("parallel")
    write_shards(root / "train", 10_000, 0)
    write_shards(root / "validation", 1_000, 1)
    data = {name: str(root / name.split("_")[0]) for name in ("train_data_path", "validation_data_path")}  # fmt: skip
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump({"model": SMALL_MODEL, "training": TRAINING, "data": data}))
    return str(path)


@pytest.fixture(scope="module")
def table(config, tmp_path_factory) -> dict:
    """The command's evidence, of a comparison with a fourth launch that cannot start."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        wrong = Engine("FSDP3", 2, "fsdp3")
        patch.setattr(parallel, "engines_of", lambda n: (*engines_of(n), wrong))
        with pytest.raises(SystemExit) as left:
            main(["parallel", "--config", config, *COMMAND, "--out", str(out)])
    assert left.value.code == 1  # a launch failed
    return json.loads((out / "parallel.json").read_text())


def rows_of(table: dict) -> dict[str, dict]:
    return {row["who"]: row for row in table["rows"] if "loss" not in row}


def test_one_process_and_two_have_the_same_losses(table):
    check_evidence(table, "parallel")
    rows = rows_of(table)
    # fp32 sums in another order, grown by nine steps of training; other sequences move a loss by 1e-2 and more.
    assert rows["DDP"]["apart"] < 1e-3
    assert rows["FSDP2"]["apart"] < 1e-3
    assert "apart" not in rows["one process"]
    curves = {who: [(r["step"], r["loss"]) for r in table["rows"] if r["who"] == who and "loss" in r] for who in rows}  # fmt: skip
    assert [step for step, _ in curves["DDP"]] == list(range(1, STEPS + 1))
    assert curves["DDP"][-1][1] < curves["DDP"][0][1] - 0.1  # the steps were taken
    for who in ("DDP", "FSDP2"):
        for (step, loss), (same, alone) in zip(curves[who], curves["one process"], strict=True):
            assert (step, loss) == (same, pytest.approx(alone, abs=1e-3))


def test_tokens_a_step_are_equal_and_speed_is_held_against_one_process(table):
    rows = rows_of(table)
    measured = [rows["one process"], rows["DDP"], rows["FSDP2"]]
    # 2 sequences × 4 micro-steps × 32 tokens
    assert [row["tokens_per_step"] for row in measured] == [256] * 3
    assert [row["processes"] for row in measured] == [1, 2, 2]
    for row in measured[1:]:
        assert row["against"] == pytest.approx(row["tokens_per_s"] / measured[0]["tokens_per_s"], abs=1e-3)  # fmt: skip


def test_a_launch_that_fails_is_a_row_with_its_reason(table):
    row = rows_of(table)["FSDP3"]
    assert row["error"] == "exit code 1: TrainingConfig.parallel = 'fsdp3': must be one of ddp, fsdp2"  # fmt: skip
    assert "tokens_per_s" not in row


def test_the_command_says_how_it_was_started(table, config):
    assert table["command"] == " ".join(["gptoss parallel --config", config, *COMMAND])


@pytest.mark.parametrize(
    ("overrides", "settings", "words"),
    [
        (["training.gradient_accumulation_steps=3"], {}, "= 3 does not divide among 2 processes"),
        ([], {"processes": 3}, "= 4 does not divide among 3 processes; set a multiple of 3"),
        ([], {"processes": 1}, "at least 2 processes"),
        ([], {"processes": 0}, "at least 2 processes"),
        ([], {"steps": 1}, "2 steps"),
        (["training.micro_batch_size=auto"], {}, "set a number"),
        (["training.lrr=1"], {}, "lrr"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    config, monkeypatch, overrides, settings, words
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(parallel, "launch", lambda *_: pytest.fail("a launch was started"))
    with pytest.raises(ValueError, match=words):
        compare_engines(config, overrides, **{"processes": 2} | settings)


def test_more_processes_than_gpus_are_refused(config, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 processes need as many GPUs, and there are 2"):
        compare_engines(config, processes=4)


def journal(losses, speeds) -> list[dict]:
    steps = [{"step": i + 1, "loss": loss} for i, loss in enumerate(losses)]
    for step, speed in speeds.items():
        steps[step - 1] |= {"tokens_per_second": speed, "memory_gib": step / 8}
    validation = {"event": "validation", "step": len(losses), "loss": 9.0}
    return [{"event": "start", "step": 0, "tokens_per_step": 64}, *steps, validation]


def test_a_failed_first_launch_leaves_nothing_to_hold_against(config, monkeypatch):
    def fake(engine: Engine, config: str, told: list[str]) -> list[dict]:
        if engine.processes == 1:
            raise RuntimeError("no memory")
        assert "training.log_interval=2" in told
        return journal([1.0] * 16, {2: 1.0, 4: 50.0, 6: 100.0, 8: 300.0})

    monkeypatch.setattr(parallel, "launch", fake)
    rows = rows_of(compare_engines(config, steps=16, processes=2, commit="test"))
    assert rows["one process"]["error"] == "no memory"
    # the first of four intervals holds the compilation: the median of 50, 100 and 300
    assert (rows["DDP"]["tokens_per_s"], rows["DDP"]["peak_gib"]) == (100, 1.0)
    assert not {"against", "apart"} & set(rows["DDP"])


def test_a_launch_whose_files_fail_is_a_row_too(config, monkeypatch):
    def fake(engine: Engine, config: str, told: list[str]) -> list[dict]:
        if engine.parallel == "fsdp2":
            raise OSError("no space\nleft")
        return journal([1.0, 1.0], {1: 1.0, 2: 1.0})

    monkeypatch.setattr(parallel, "launch", fake)
    rows = rows_of(compare_engines(config, steps=2, processes=2, commit="test"))
    assert rows["FSDP2"]["error"] == "no space left"
    assert rows["DDP"]["against"] == 1


def test_a_launch_that_was_stopped_early_is_no_measurement(config, monkeypatch):
    monkeypatch.setattr(parallel, "launch", lambda *_: journal([1.0], {1: 1.0}))
    with pytest.raises(ValueError, match="no launch ended: one process: it ended after 1 of 8"):
        compare_engines(config, steps=8, processes=2)


def test_without_a_configuration_the_micro_steps_fit_the_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    told: list[list[str]] = []

    def fake(engine: Engine, config: str, overrides: list[str]) -> list[dict]:
        assert config == "pretrain_a100_502m"
        told.append(overrides)
        return journal([1.0, 1.0], {1: 1.0, 2: 1.0})

    monkeypatch.setattr(parallel, "launch", fake)
    compare_engines(steps=2, commit="test")
    # 4 micro-steps of the production run and 8 GPUs
    assert [o[0] for o in told] == ["training.gradient_accumulation_steps=8"] * 3


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "gptoss: warning: slow\nTraceback (most recent call last):\n  File x\n"
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n[rank0]: RuntimeError: peer gone\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\nFAILED\n=====\n",
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("Traceback:\nValueError: /x: no such directory\n", "/x: no such directory"),
        (
            "a.ChildFailedError: \n====\n  traceback : Signal 9 (SIGKILL) received by PID 7\n====\n",
            "traceback : Signal 9 (SIGKILL) received by PID 7",
        ),
        ("Killed\n\n", "Killed"),
        ("", "nothing on standard error"),
    ],
)
def test_the_reason_is_the_first_exception_of_any_process(stderr, reason):
    assert reason_in(stderr) == reason


def test_nothing_stays_in_the_temporary_folder(config, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="exit code"):
        parallel.launch(Engine("one process", 1, "fsdp3"), config, [])
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("number", "processes", "end"),
    [(signal.SIGTERM, 1, ""), (signal.SIGINT, 2, "KeyboardInterrupt")],
)
def test_whoever_ends_the_comparison_ends_the_launch(config, tmp_path, number, processes, end):
    """The signal reaches the starter alone, as `kill PID` sends it; a run without end must not stay behind."""
    told = ["training.total_steps=1000000", "training.save_interval=1000000", "training.validation_interval=0"]  # fmt: skip
    script = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background ignores it
    script += f"from gptoss.bench.parallel import Engine, launch; launch(Engine('x', {processes}, 'ddp'), {config!r}, {told!r})"
    starter = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def launched() -> list[psutil.Process]:
        of_all = psutil.process_iter(["cmdline"])
        return [p for p in of_all if any(str(tmp_path) in word for word in p.info["cmdline"] or ())]

    until = time.monotonic() + 120
    while not any(path.read_bytes().count(b"\n") > 3 for path in tmp_path.glob("gptoss-*/metrics.jsonl")):  # fmt: skip
        assert starter.poll() is None
        assert time.monotonic() < until
        time.sleep(0.2)
    try:
        starter.send_signal(number)
        said = starter.communicate(timeout=60)[1]
        assert starter.returncode
        assert said.split()[-1:] == end.split()
        psutil.wait_procs(launched(), timeout=2)
        assert launched() == []
        assert list(tmp_path.glob("gptoss-*")) == []
    finally:
        for process in launched():
            process.kill()
