"""The command line: one line and exit code 2 for what a user got wrong, nothing half-written, and the main job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gptoss.cli import main
from gptoss.config import DataConfig, ModelConfig, RunConfig, TrainingConfig, load_config

COMMANDS = (
    *("pretrain", "prepare", "generate", "passkey", "kv-cache"),
    *("smoke", "profile", "vram", "step-time", "bench", "experiment", "parallel", "record"),
)


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Run a command in this process: (exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def fails(capsys, *arguments: object) -> str:
    """Run a command that must fail with one line and exit code 2; returns the line."""
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert err.startswith("gptoss: ")
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        lines = [f"def f_{number}_{i}(x):\n    return x + {i}\n" for i in range(12)]
        (folder / f"{number:02d}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory) -> Path:
    """`prepare` and `pretrain` through the command line: the directory of the run."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.raises(SystemExit) as left:
        main(
            [
                "prepare",
                str(texts),
                str(root / "data"),
                "--vocab-size",
                "300",
                "--val-fraction",
                "0.2",
            ]
        )
    assert not left.value.code
    config = root / "run.yaml"
    config.write_text(yaml.safe_dump(small(root / "data", root / "run").to_dict()))
    with pytest.raises(SystemExit) as left:
        main(["pretrain", "--config", str(config), "--set", "training.lr=2e-2", "--quiet"])
    assert not left.value.code
    return root / "run"


def small(data: Path, save_dir: Path) -> RunConfig:
    model = ModelConfig(
        **{"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
        **{"head_dim": 8, "ffn_dim": 16, "n_routed_experts": 4, "window_size": 8},
        **{"yarn_scale_factor": 2, "yarn_original_max_seq_len": 32, "yarn_target_seq_len": 128},
        **{"max_seq_len": 32, "eval_max_seq_len": 128, "dtype": "fp32"},
    )
    training = TrainingConfig(
        **{"micro_batch_size": 2, "gradient_accumulation_steps": 1, "total_steps": 6},
        **{"warmup_steps": 1, "lr": 1e-3, "grad_checkpoint": False, "compile": False},
        **{"save_interval": 3, "log_interval": 2, "rope": "plain", "validation_batches": 1},
        save_dir=str(save_dir),
    )
    return RunConfig(model, training, DataConfig(train_data_path=str(data)))


@pytest.fixture
def config_file(trained, tmp_path) -> Path:
    """The trained run's configuration, saving elsewhere."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(small(trained.parent / "data", tmp_path / "run").to_dict()))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_page_of_help(capsys, command):
    code, out, err = run(capsys, command, "--help")
    assert code == 0
    assert "Usage" in out
    assert err == ""
    assert len(out.splitlines()) < 70


def test_no_command_shows_the_commands(capsys):
    _, out, err = run(capsys)
    assert all(command in out + err for command in COMMANDS)


def test_python_m_gptoss_is_the_same():
    command = [sys.executable, "-m", "gptoss", "kv-cache", "--no-allocate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "2.00×" in done.stdout
    assert done.stderr == ""


def test_an_output_that_is_not_utf8_shows_question_marks():
    command = [sys.executable, "-m", "gptoss", "kv-cache", "--no-allocate"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2.00?" in done.stdout


def test_pretrain_then_generate(capsys, trained):
    assert (trained / "model_step_6.safetensors").exists()
    written = RunConfig.from_dict(json.loads((trained / "config.json").read_text()))
    assert written.training.lr == 2e-2  # --set reached the run
    arguments = ("generate", "--checkpoint", trained, "--prompt", "def ", "--max-new-tokens", 12)
    code, out, err = run(capsys, *arguments, "--seed", 1)
    assert code == 0
    assert err == ""
    assert out.startswith("def ")
    assert run(capsys, *arguments, "--seed", 1)[1] == out
    greedy = [
        run(capsys, *arguments, "--temperature", 0, cache)[1] for cache in ("--cache", "--no-cache")
    ]
    assert greedy[0] == greedy[1]


def test_pretrain_prints_the_plan_the_line_and_what_to_do_next(capsys, config_file, tmp_path):
    code, out, err = run(capsys, "pretrain", "--config", config_file)
    assert code == 0
    assert err == ""
    assert "64 tokens = 2 sequences × 1 micro-step × 1 process × 32 tokens" in out
    assert "step=      6 | loss=" in out
    assert "counting tokens alone gives" in out
    assert f'gptoss generate --checkpoint {tmp_path / "run"} --prompt "def "' in out
    code, out, _ = run(capsys, "pretrain", "--config", config_file)
    assert code == 0
    assert "[resume] going on from step 6" in out


def test_max_steps_and_resume(capsys, config_file, tmp_path):
    run(capsys, "pretrain", "--config", config_file, "--max-steps", 4, "--quiet")
    assert (tmp_path / "run" / "model_step_4.safetensors").exists()
    run(capsys, "pretrain", "--config", config_file, "--resume", 3, "--max-steps", 1, "--quiet")
    line = fails(capsys, "pretrain", "--config", config_file, "--resume", 2)
    assert "no complete checkpoint of step 2" in line
    assert "holds checkpoints" in fails(
        capsys, "pretrain", "--config", config_file, "--resume", "never"
    )


def test_the_passkey_table(capsys, trained, tmp_path):
    arguments = ("passkey", "--checkpoint", trained, "--length", 100, "--trials", 2)
    code, out, err = run(capsys, *arguments, "--out", tmp_path / "passkey.json")
    assert code == 0, err
    assert "95% interval" in out
    assert json.loads((tmp_path / "passkey.json").read_text())["rows"][0]["trials"] == 2


def test_smoke_passes_all_eight_steps(capsys):
    code, out, _ = run(capsys, "smoke", "--device", "cpu")
    lines = out.splitlines()
    assert code == 0, out
    assert [line[:3] for line in lines[:8]] == [
        "✓ 1",
        "✓ 2",
        "✓ 3",
        "– 4",
        "✓ 5",
        "✓ 6",
        "✓ 7",
        "✓ 8",
    ]
    assert lines[-1] == "all steps passed"


def test_smoke_says_what_failed(capsys, monkeypatch):
    from gptoss.bench.smoke import Smoke

    monkeypatch.setattr(Smoke, "long_forward", lambda self: 1 / 0)
    code, out, _ = run(capsys, "smoke", "--device", "cpu")
    assert code == 1
    assert "✗ 8" in out
    assert "ZeroDivisionError" in out


def test_profiles(capsys, config_file):
    code, out, _ = run(capsys, "profile", "components", "--config", config_file)
    assert code == 0
    assert "attention layer, windowed" in out
    code, out, _ = run(capsys, "profile", "moe", "--config", config_file, "--tokens", 64)
    assert code == 0
    assert "grouped_mm" in out
    code, out, _ = run(capsys, "profile", "decode", "--config", config_file, "--new", 4)
    assert code == 0
    assert "prompt=32, new=4" in out


def test_vram_predicts_and_holds_against_a_threshold(capsys):
    code, out, _ = run(capsys, "vram", "--no-measure", "--threshold-gib", 1000)
    assert code == 0
    assert "predicted peak" in out
    assert run(capsys, "vram", "--no-measure", "--threshold-gib", 1)[0] == 1


def test_bench_lists_its_tables_and_names_an_unknown_one(capsys):
    code, out, _ = run(capsys, "bench")
    assert code == 0
    assert "step" in out
    assert "no table 'stepp'" in fails(capsys, "bench", "stepp")


# What a user may get wrong, each with what must be in the one line.


def test_an_unknown_key_names_its_nearest_neighbour(capsys, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("model:\n  n_layer: 4\n")
    assert "'n_layer'; did you mean 'n_layers'?" in fails(capsys, "pretrain", "--config", path)


def test_a_broken_rule_names_field_value_and_rule(capsys, config_file, tmp_path):
    line = fails(capsys, "pretrain", "--config", config_file, "--set", "model.n_heads=5")
    assert "ModelConfig.n_heads = 5: n_heads must be a multiple of n_kv_heads" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lr", "expected section.key=value"),
        ("training.lr=fast", "TrainingConfig.lr = 'fast': expected float"),
        ("trainig.lr=1", "did you mean 'training'?"),
    ],
)
def test_a_bad_override(capsys, config_file, tmp_path, override, message):
    assert message in fails(capsys, "pretrain", "--config", config_file, "--set", override)
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_is_not_there(capsys):
    line = fails(capsys, "pretrain", "--config", "tinny")
    assert "'tinny'" in line
    assert "tiny" in line.replace("tinny", "")


def test_a_missing_corpus(capsys, config_file, tmp_path):
    line = fails(
        capsys, "pretrain", "--config", config_file, "--set", "data.train_data_path=/no/where"
    )
    assert "/no/where" in line
    assert not (tmp_path / "run").exists()
    text = ("--set", "data.train_data_path=null", "--set", "data.corpus=stdlb")
    assert "data.corpus = stdlb" in fails(capsys, "pretrain", "--config", config_file, *text)
    assert not (tmp_path / "run").exists()


def test_an_empty_corpus(capsys, config_file, tmp_path):
    (tmp_path / "empty").mkdir()
    line = fails(capsys, "prepare", tmp_path / "empty", tmp_path / "out")
    assert str(tmp_path / "empty") in line
    assert not (tmp_path / "out").exists()
    place = f"data.train_data_path={tmp_path / 'empty'}"
    assert "gptoss prepare" in fails(capsys, "pretrain", "--config", config_file, "--set", place)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_larger_than_the_models(capsys, config_file, tmp_path):
    line = fails(capsys, "pretrain", "--config", config_file, "--set", "model.vocab_size=128")
    assert "model.vocab_size = 128" in line
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written(capsys, config_file, tmp_path):
    (tmp_path / "file").write_text("")
    place = f"training.save_dir={tmp_path / 'file' / 'run'}"
    assert "is a file" in fails(capsys, "pretrain", "--config", config_file, "--set", place)


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99", "fpga"])
@pytest.mark.parametrize("command", [("pretrain", "--config", "tiny"), ("kv-cache",), ("smoke",)])
def test_a_device_that_is_none(capsys, tmp_path, monkeypatch, command, device):
    monkeypatch.chdir(tmp_path)
    assert f"device {device}" in fails(capsys, *command, "--device", device)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("vram", "--seq-len", 0),
        ("profile", "moe", "--tokens", 0),
        ("profile", "components", "--seq-len", 0),
        ("profile", "decode", "--new", 0),
        ("step-time", "--steps", 0),
        ("step-time", "--every", -1),
    ],
)
def test_nothing_to_measure_is_a_usage_error(capsys, arguments):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert f"Invalid value for '{arguments[-2]}'" in err


def test_step_time_runs_the_configured_kernels(capsys, config_file, monkeypatch):
    settings = yaml.safe_load(config_file.read_text())
    settings["model"] |= {"attention_backend": "reference", "moe_dispatch": "stacked"}
    config_file.write_text(yaml.safe_dump(settings))
    measured = []

    def measure(variants, **_):
        measured.extend(variants)
        return {"rows": [{}]}

    monkeypatch.setattr("gptoss.bench.step.measure", measure)
    monkeypatch.setattr("gptoss.bench.evidence.format_table", str)
    assert run(capsys, "step-time", "--config", config_file)[0] == 0
    assert [(v.attention, v.dispatch) for v in measured] == [("reference", "stacked")]


def test_a_step_that_cannot_be_timed_says_why_and_fails(capsys):
    once = ("step-time", "--config", "tiny", "--steps", 1)
    for option, words in (("--dispatch=foo", "moe_dispatch = 'foo'"), ("--cuda-graph", "on cpu")):
        code, _, err = run(capsys, *once, option)
        assert code == 1
        assert words in err


def test_an_empty_prompt(capsys, trained):
    assert "prompt" in fails(capsys, "generate", "--checkpoint", trained, "--prompt", "")


def test_a_prompt_that_is_too_long(capsys, trained):
    line = fails(capsys, "generate", "--checkpoint", trained, "--prompt", "x = 1\n" * 100)
    assert "eval_max_seq_len = 128" in line


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", -1, "temperature"),
        ("--top-p", 2, "top_p"),
        ("--max-new-tokens", -1, "max_new_tokens"),
        ("--rope", "cubic", "rope"),
        ("--step", 5, "5"),
        ("--device", "cuda:99", "CUDA"),
        ("--device", "foo", "device foo: expected cpu, cuda"),
        ("--device", "meta", "device meta: expected cpu, cuda"),
        ("--seed", 2**70, "seed = 11"),
    ],
)
def test_a_bad_setting_of_generate(capsys, trained, option, value, message):
    short = () if option == "--max-new-tokens" else ("--max-new-tokens", 4)
    arguments = ("generate", "--checkpoint", trained, "--prompt", "a", *short, option, value)
    assert message in fails(capsys, *arguments)


def test_no_model_or_two(capsys, trained):
    assert "one of the two" in fails(capsys, "generate", "--prompt", "a")
    both = ("--checkpoint", trained, "--model", "nano")
    assert "one of the two" in fails(capsys, "generate", "--prompt", "a", *both)


def test_a_step_of_a_shipped_model(capsys):
    assert "--checkpoint" in fails(capsys, "generate", "--model", "nano", "--prompt", "a", "--step", 4)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", 0), "expected positive ones"),
        (("--length", 90, "--length", 90), "each once"),
        (("--length", 129), "eval_max_seq_len = 128"),
        (("--length", 90, "--trials", 0), "one trial"),
        ((), "the model reads 128 tokens at most"),
        (("--length", 90, "--filler", "/no/where"), "/no/where: no such file or folder"),
    ],
)
def test_a_bad_setting_of_passkey(capsys, trained, arguments, message):
    assert message in fails(capsys, "passkey", "--checkpoint", trained, *arguments)


def test_a_filler_that_is_too_short(capsys, trained, tmp_path):
    (tmp_path / "short.txt").write_text("short\n")
    arguments = ("--length", 90, "--filler", tmp_path / "short.txt")
    assert "name a longer text" in fails(capsys, "passkey", "--checkpoint", trained, *arguments)


def test_a_filler_of_two_texts_read_as_far_as_asked(capsys, trained, tmp_path):
    (tmp_path / "one.txt").write_text("one line of text\n" * 4)
    (tmp_path / "two.txt").write_text("two lines of text\n" * 4)
    both = ("--filler", tmp_path / "one.txt", "--filler", tmp_path / "two.txt")
    arguments = ("passkey", "--checkpoint", trained, "--length", 90, "--trials", 1)
    assert "name a longer text" in fails(capsys, *arguments, *both[:2])
    assert run(capsys, *arguments, *both)[0] == 0
    line = fails(capsys, *arguments, *both, "--filler-tokens", 1000)
    assert "1,000 are needed" in line
    assert "one.txt" in line
    assert "two.txt" in line


def test_a_place_that_cannot_be_written_is_refused_before_the_work(capsys, trained, tmp_path):
    (tmp_path / "file").write_text("")
    arguments = ("passkey", "--checkpoint", trained, "--length", 100, "--trials", 1, "--out")
    code, _, _ = run(capsys, *arguments, tmp_path / "new" / "passkey.json")
    assert code == 0
    assert (tmp_path / "new" / "passkey.json").exists()
    assert "name a file" in fails(capsys, *arguments, tmp_path)
    for command in (("bench", "step"), ("experiment", tmp_path / "runs"), ("parallel",), ("record", trained, "x")):  # fmt: skip
        assert "name a folder" in fails(capsys, *command, "--out", tmp_path / "file")
    assert not (tmp_path / "runs").exists()


def test_a_run_is_recorded_under_a_plain_name(capsys, trained, tmp_path):
    assert run(capsys, "record", trained, "training_small", "--out", tmp_path)[0] == 0
    assert json.loads((tmp_path / "training_small.json").read_text())["rows"]
    assert "without .json" in fails(capsys, "record", trained, "../x", "--out", tmp_path / "in")
    assert [path.name for path in tmp_path.glob("*.json")] == ["training_small.json"]


def test_a_directory_without_a_run(capsys, tmp_path):
    line = fails(capsys, "generate", "--prompt", "a", "--checkpoint", tmp_path / "nothing")
    assert "no such directory" in line
    assert "config.json: missing" in fails(
        capsys, "generate", "--prompt", "a", "--checkpoint", tmp_path
    )


def test_prepare_without_a_place_to_write(capsys, texts):
    assert "the directory to write" in fails(capsys, "prepare", texts)


def test_an_unknown_option_is_a_usage_error(capsys):
    code, _, err = run(capsys, "pretrain", "--confg", "tiny")
    assert code == 2
    assert "--config" in err


def test_traceback_shows_where(trained):
    with pytest.raises(ValueError, match="one of the two"):
        main(["generate", "--prompt", "a", "--traceback"])


@pytest.mark.parametrize("name", ["tiny", "pretrain_a100_502m"])
def test_the_packaged_configurations_load(name):
    assert load_config(name).training.total_steps > 0


def test_all_tables_want_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, problem = run(capsys, "bench", "all")
    assert code == 2
    assert "needs a GPU" in problem


def test_a_table_that_fails_does_not_lose_the_others(capsys, monkeypatch, tmp_path):
    from gptoss.bench import head, kv_cache

    def breaks(**_):
        raise RuntimeError("no such kernel")

    measured = {"head": breaks, "kv_cache": lambda **_: {**_TABLE, "name": "kv_cache"}}
    monkeypatch.setattr(head, "measure", measured["head"])
    monkeypatch.setattr(kv_cache, "measure", measured["kv_cache"])
    code, out, problem = run(capsys, "bench", "head", "kv_cache", "--out", tmp_path)
    assert code == 1
    assert (tmp_path / "kv_cache.json").is_file()
    assert "kv_cache: 0 s" in out
    assert "not measured: head (no such kernel)" in problem


def test_a_table_that_cannot_be_kept_does_not_lose_the_others(capsys, monkeypatch, tmp_path):
    from gptoss.bench import head, kv_cache

    released = []
    monkeypatch.setattr("gptoss.bench.release.release_memory", lambda: released.append(1))
    for module, name in ((head, "head"), (kv_cache, "kv_cache")):
        monkeypatch.setattr(module, "measure", lambda name=name, **_: {**_TABLE, "name": name})
    (tmp_path / "head.json").mkdir()
    code, _, problem = run(capsys, "bench", "head", "kv_cache", "--out", tmp_path)
    assert code == 1
    assert "not measured: head (" in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head.json", "kv_cache.json"]
    assert len(released) == 2  # a table that failed holds memory too


def test_ctrl_c_says_which_tables_there_are_not(capsys, monkeypatch, tmp_path):
    from gptoss.bench import head, kv_cache, memory

    def breaks(**_):
        raise RuntimeError("no such kernel")

    def leaves(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(head, "measure", breaks)
    monkeypatch.setattr(kv_cache, "measure", lambda **_: {**_TABLE, "name": "kv_cache"})
    monkeypatch.setattr(memory, "measure", leaves)
    code, _, problem = run(capsys, "bench", "head", "kv_cache", "memory", "roofline", "--out", tmp_path)  # fmt: skip
    assert code == 130
    assert problem == "not measured: head (no such kernel); memory (Ctrl-C); roofline\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kv_cache.json"]


@pytest.mark.parametrize("command", ["experiment", "parallel"])
def test_ctrl_c_is_one_line(capsys, monkeypatch, tmp_path, command):
    def leaves(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gptoss.bench.long_context.experiment", leaves)
    monkeypatch.setattr("gptoss.bench.parallel.compare_engines", leaves)
    folder = [tmp_path] if command == "experiment" else []
    code, _, problem = run(capsys, command, *folder, "--out", tmp_path)
    assert code == 130
    assert problem.startswith("left; ")
    assert len(problem.splitlines()) == 1


def test_all_leaves_out_the_tables_that_have_their_own_command(capsys, monkeypatch, tmp_path):
    from gptoss.bench import head, kv_cache
    from gptoss.cli import recording

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(recording, "_bench_tables", lambda: ["head", "kv_cache"])
    monkeypatch.setattr(recording, "OUTSIDE_ALL", ("head",))
    monkeypatch.setattr(recording, "UNTIMED", ())
    monkeypatch.setattr(head, "measure", lambda **_: pytest.fail("head has its own command"))
    monkeypatch.setattr(kv_cache, "measure", lambda **_: {**_TABLE, "name": "kv_cache"})
    monkeypatch.setattr("gptoss.bench.release.release_memory", lambda: None)
    assert run(capsys, "bench", "all", "--out", tmp_path)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["kv_cache.json"]


def test_all_measures_tables_without_a_clock_side_by_side(capsys, monkeypatch, tmp_path):
    from gptoss.bench import head
    from gptoss.cli import recording

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(recording, "_bench_tables", lambda: ["head", "kv_cache", "roofline"])
    monkeypatch.setattr(recording, "UNTIMED", ("kv_cache", "roofline"))
    monkeypatch.setattr(head, "measure", lambda **_: {**_TABLE, "name": "head"})
    monkeypatch.setattr("gptoss.bench.release.release_memory", lambda: None)
    (tmp_path / "roofline.json").mkdir()
    code, out, problem = run(capsys, "bench", "all", "--out", tmp_path)
    assert code == 1
    assert (
        json.loads((tmp_path / "kv_cache.json").read_text())["command"] == "gptoss bench kv_cache"
    )
    assert out.index("head: 0 s") < out.index("KV cache of the production model")
    assert "not measured: roofline (" in problem
    assert "roofline.json" in problem


def test_ctrl_c_ends_the_tables_side_by_side(monkeypatch):
    from gptoss.bench import side_by_side

    started = []

    class Patient(side_by_side.subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([command[0], "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

        def wait(self, timeout=None):
            if self.returncode is None and timeout is None and len(started) == 2:
                started.append("left once")
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(side_by_side.subprocess, "Popen", Patient)
    with pytest.raises(KeyboardInterrupt):
        list(side_by_side.measure_side_by_side(["kv_cache", "memory"], None))
    assert [job.returncode for job in started[:2]] == [-15, -15]


_TABLE = {
    "format": 1,
    "title": "t",
    "date": "2026-11-30",
    "machine": "CPU",
    "software": {},
    "commit": "0",
    "command": "c",
    "convention": "",
    "columns": {"a": "a"},
    "rows": [{"a": 1}],
    "notes": [],
}
