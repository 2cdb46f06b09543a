"""The long-context experiment on a model of 35,000 parameters: arms, going on, and what is refused before training."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from gptoss.bench import arm_results, long_context
from gptoss.bench.arms import ARMS, DOCUMENTS, configure, parse_arm
from gptoss.bench.evidence import check_evidence
from gptoss.bench.passkey import RECIPES, read_as
from gptoss.cli import main
from gptoss.config import ModelConfig, RunConfig, load_config
from gptoss.data.prepare import prepare
from gptoss.data.shards import ShardWriter
from gptoss.model.transformer import GPTOSS
from gptoss.training.pretrain import pretrain

FIRST, SECOND = parse_arm("plain-pruned-sinks-1"), parse_arm("yarn-whole-bare-2")  # fmt: skip

MODEL = {
    **{"vocab_size": 400, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
    **{"head_dim": 8, "ffn_dim": 16, "n_routed_experts": 4, "window_size": 8},
    **{"yarn_scale_factor": 2, "yarn_original_max_seq_len": 64, "yarn_target_seq_len": 128},
    **{"max_seq_len": 64, "eval_max_seq_len": 128, "dtype": "fp32"},
}
TRAINING = {
    **{"micro_batch_size": 2, "gradient_accumulation_steps": 2, "warmup_steps": 3, "lr": 1e-2},
    **{"grad_checkpoint": False, "compile": False, "validation_batches": 2},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    """A YAML file of a small run over text that was prepared with its own tokenizer."""
    root = tmp_path_factory.mktemp("long")
    texts = root / "texts"
    texts.mkdir()
    for number in range(50):
        lines = [f"def f_{number}_{i}(x):\n    return x + {i} * {number}\n" for i in range(14)]
        (texts / f"{number:02d}.py").write_text("\n".join(lines))
    prepare(texts, root / "data", vocab_size=400, val_fraction=0.2, retrieval_names=True)
    run = {"model": MODEL, "training": TRAINING, "data": {"train_data_path": str(root / "data")}}
    path = root / "small.yaml"
    path.write_text(yaml.safe_dump(run))
    return str(path)


def ask(folder: Path, config: str, arms=(FIRST, SECOND), **changes):
    settings = {"steps": 2, "trials": 2, "lengths": (80, 128), "commit": "test"} | changes
    return long_context.experiment(folder, arms, config=config, **settings)


@pytest.fixture(scope="module")
def first(config, tmp_path_factory) -> Path:
    """A folder in which the first arm is done."""
    folder = tmp_path_factory.mktemp("first")
    ask(folder, config, [FIRST])
    return folder


@pytest.fixture
def done(first, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(first, tmp_path / "moved"))


@pytest.fixture
def trainings(monkeypatch) -> list[str]:
    """Names of the arms whose training was started, in order."""
    started: list[str] = []

    def counted(run: RunConfig):
        started.append(Path(run.training.save_dir).name)
        return pretrain(run)

    monkeypatch.setattr(long_context, "pretrain", counted)
    return started


GLOBAL, SHARP = "YaRN in global layers", "YaRN in global layers, all pairs sharpened"


def test_each_arm_is_trained_and_read_in_every_way_that_differs(
    config, tmp_path, trainings, capsys
):
    table = ask(tmp_path, config)
    check_evidence(table, "long_context")
    assert trainings == [FIRST.name, SECOND.name]
    whole = ["plain", "YaRN in all layers", SHARP]  # no pruned pairs: GLOBAL would be SHARP again
    for arm, ways in ((FIRST, list(RECIPES)), (SECOND, whole)):
        rows = [r for r in table["rows"] if all(r[k] == v for k, v in arm._asdict().items())]
        asked = [(r["read"], r["length"], r["trials"]) for r in rows if "length" in r]
        assert asked == [(read, length, 2) for read in ways for length in (80, 128)]
        texts = [(r["read"], r["loss_from"]) for r in rows if "text_loss" in r]
        assert texts == [(read, 0) for read in ways]
        assert sum("validation_loss" in r for r in rows) == 1
    # 2 sequences × 2 micro-steps × 64 tokens × 2 steps
    assert "2 steps, 512 tokens" in table["notes"][0]
    assert f'read once, as "{SHARP}"' in table["notes"][1]
    assert table["title"].endswith("64 tokens")
    said = capsys.readouterr().out
    for arm in (FIRST, SECOND):
        kept = json.loads((tmp_path / f"{arm.name}.json").read_text())["seconds"]
        assert all(seconds > 0 for seconds in kept.values())
        line = f"[arm] {arm.name}: trained in {kept['training']} s, read in {kept['reading']} s"
        assert line in said.splitlines()


@pytest.mark.parametrize("pruned", [False, True])
def test_sharpening_pruned_pairs_changes_nothing_where_none_is_pruned(pruned):
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**MODEL, yarn_prune_rope_global=pruned)).eval()
    ids = torch.randint(0, 400, (1, 100))  # beyond the 64 tokens of training
    logits = {}
    for name in RECIPES:
        with read_as(model, RECIPES[name]) as mode, torch.no_grad():
            model.set_rope_mode(mode)
            logits[name] = model(ids)[0]
    assert torch.equal(logits[GLOBAL], logits[SHARP]) is not pruned
    distinct = [name for name in RECIPES if pruned or name != GLOBAL]
    assert list(long_context.recipes_for(model.cfg)) == distinct
    for i, name in enumerate(distinct):  # and those that are read are all different
        for other in distinct[:i]:
            assert not torch.equal(logits[name], logits[other])


def test_an_arm_changes_what_its_name_says():
    base = load_config("nano")
    documents = configure(base, DOCUMENTS, 30, Path("x"))
    assert documents.training.rope == "yarn"
    assert (documents.model.yarn_layers, documents.model.yarn_mscale_pruned) == ("all", False)
    assert (documents.training.warmup_steps, documents.training.total_steps) == (3, 30)
    bare = configure(base, SECOND._replace(rope="plain"), 30, Path("x"))
    assert not bare.model.sink_bias
    assert not bare.model.yarn_prune_rope_global
    assert (bare.training.seed, bare.training.save_dir) == (2, "x/plain-whole-bare-2")
    assert len({arm.name for arm in ARMS}) == 8
    assert all(parse_arm(arm.name) == arm for arm in ARMS)


def test_it_goes_on_after_a_kill_between_arms(config, tmp_path, trainings, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(long_context, "pretrain", lambda run: 1 / 0 if "yarn" in run.training.save_dir else pretrain(run))  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            ask(tmp_path, config)
    first = (tmp_path / f"{FIRST.name}.json").read_bytes()
    table = ask(tmp_path, config)
    assert trainings == [SECOND.name]
    assert (tmp_path / f"{FIRST.name}.json").read_bytes() == first
    assert {row["rope"] for row in table["rows"]} == {"plain", "yarn"}
    assert [path.name for path in tmp_path.glob("*.partial")] == []
    assert ask(tmp_path, config)["rows"] == table["rows"]
    assert trainings == [SECOND.name]


def test_an_arm_killed_before_its_result_is_only_read_again(config, done):
    table = ask(done, config, [FIRST])
    (done / f"{FIRST.name}.json").unlink()
    saved = done / FIRST.name / "model_step_2.safetensors"
    before = saved.stat().st_mtime_ns
    assert ask(done, config, [FIRST])["rows"] == table["rows"]
    assert saved.stat().st_mtime_ns == before


def test_an_arm_named_twice_counts_once(config, done):
    assert len(ask(done, config, [FIRST, FIRST])["rows"]) == 1 + 4 * 3


def made_elsewhere(path: Path, **changes) -> None:
    """Change what a result says of its making."""
    result = json.loads(path.read_text())
    result["made"] |= changes
    path.write_text(json.dumps(result))


def test_the_table_says_where_its_arms_were_made(config, done, trainings, monkeypatch):
    there = {"machine": "one NVIDIA H200", "software": {"torch": "2.11"}, "commit": "abc1234", "date": "2026-01-02"}  # fmt: skip
    made_elsewhere(done / f"{FIRST.name}.json", **there)
    monkeypatch.setattr(long_context, "check_reading", lambda *_: pytest.fail("the data is not here"))  # fmt: skip
    table = ask(done, config, [FIRST], commit="here")
    assert {key: table[key] for key in there} == there
    check_evidence(table, "long_context")
    assert not any("made" in note for note in table["notes"])
    assert trainings == []


def test_arms_of_different_machines_and_commits_are_noted(config, done):
    made_elsewhere(
        done / f"{FIRST.name}.json", machine="one NVIDIA H200", commit="abc1234", date="2999-01-02"
    )
    table = ask(done, config, commit="def5678")
    # the latest of the two says where the table was made
    assert (table["machine"], table["commit"], table["date"]) == ("one NVIDIA H200", "abc1234", "2999-01-02")  # fmt: skip
    notes = [note for note in table["notes"] if note.startswith("arms were made")]
    assert len(notes) == 2  # the software is the same
    assert f"on different machines; one NVIDIA H200: {FIRST.name}; {arm_results.machine()}: {SECOND.name}" in notes[0]  # fmt: skip
    assert f"at different commits; abc1234: {FIRST.name}; def5678: {SECOND.name}" in notes[1]
    made_elsewhere(done / f"{FIRST.name}.json", date="1999-01-02")
    assert ask(done, config)["commit"] == "def5678"


@pytest.mark.parametrize("missing", ["made", "commit", "software"])
def test_a_result_that_does_not_say_where_it_was_made_is_refused(config, done, trainings, missing):
    path = done / f"{FIRST.name}.json"
    result = json.loads(path.read_text())
    del (result if missing == "made" else result["made"])[missing]
    path.write_text(json.dumps(result))
    with pytest.raises(ValueError, match=rf"{FIRST.name}.json: does not say on which machine.*delete it"):  # fmt: skip
        ask(done, config)
    assert trainings == []


def test_another_process_makes_another_arm_in_the_same_folder_meanwhile(
    config, tmp_path, monkeypatch
):
    """The first arm is half trained when the second is made from beginning to end, by a process of its own."""
    folder = tmp_path / "runs"
    command = [sys.executable, "-m", "gptoss", "experiment", str(folder), "--config", config, "--arm", SECOND.name]  # fmt: skip
    command += ["--steps", "2", "--trials", "2", "--length", "80", "--length", "128", "--out", str(tmp_path / "out")]  # fmt: skip

    def interrupted(run: RunConfig):
        pretrain(run, max_steps=1)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert {path.parent.name for path in before} == {FIRST.name}
        other = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert other.returncode == 0, other.stderr
        assert all(path.read_bytes() == content for path, content in before.items())
        return pretrain(run)

    monkeypatch.setattr(long_context, "pretrain", interrupted)
    table = ask(folder, config, [FIRST])
    assert {row["seed"] for row in table["rows"]} == {FIRST.seed}
    names = {FIRST.name, SECOND.name, f"{FIRST.name}.json", f"{SECOND.name}.json"}
    assert {path.name for path in folder.iterdir()} == names
    monkeypatch.setattr(long_context, "pretrain", lambda _: pytest.fail("both are made"))
    assert {row["seed"] for row in ask(folder, config)["rows"]} == {FIRST.seed, SECOND.seed}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 3}, "training.total_steps is 2 there and 3 here"),
        ({"trials": 1}, "trials is 2 there and 1 here"),
        ({"lengths": (80,)}, "lengths is"),
        ({"overrides": ["training.lr=2e-2"]}, "training.lr is 0.01 there and 0.02 here"),
    ],
)
def test_results_of_other_settings_are_not_mixed_in(config, done, trainings, changes, words):
    with pytest.raises(ValueError, match=words):
        ask(done, config, **changes)
    assert trainings == []


def test_a_half_trained_arm_of_other_settings_is_refused(config, tmp_path, trainings):
    pretrain(configure(load_config(config), FIRST, 2, tmp_path), max_steps=1, progress=False)  # fmt: skip
    with pytest.raises(ValueError, match=r"training.total_steps is 2 there and 4 here.*delete"):
        ask(tmp_path, config, steps=4)
    assert trainings == []
    ask(tmp_path, config, [FIRST])


def test_a_damaged_result_is_named(config, tmp_path):
    (tmp_path / f"{FIRST.name}.json").write_text("[{")
    with pytest.raises(ValueError, match=rf"{FIRST.name}.json.*delete it"):
        ask(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": None}, "no rows"),
        ({"rows": []}, "no rows"),
        ({"rows": [1]}, "not iterable"),
        ({"rows": [{"colour": 1}]}, "column 'colour' has no meaning"),
        ({"tokens_per_step": "x"}, "no number of tokens"),
    ],
)
def test_a_result_without_its_content_is_named_before_training(
    config, done, trainings, change, words
):
    path = done / f"{FIRST.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"{FIRST.name}.json: .*{words}.*delete it"):
        ask(done, config)
    whole = json.loads(path.read_text())
    del whole[next(iter(change))]
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=rf"{FIRST.name}.json: .*is missing.*delete it"):
        ask(done, config)
    assert trainings == []


def test_a_folder_where_a_result_should_be_is_refused_before_training(config, tmp_path, trainings):
    (tmp_path / f"{FIRST.name}.json").mkdir()
    with pytest.raises(ValueError, match=rf"{FIRST.name}.json: not a file"):
        ask(tmp_path, config)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match="is a file: name a folder"):
        ask(file, config)
    assert trainings == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"lengths": (80, 80)}, "each once"),
        ({"lengths": (-5,)}, "positive"),
        ({"lengths": (80, 0)}, "positive"),
        ({"arms": (FIRST, FIRST._replace(seed=2**32))}, "seed = 4294967296: must lie in"),
        ({"trials": 0}, "trials"),
        ({"lengths": ()}, "length"),
        ({"lengths": (80, 129)}, "eval_max_seq_len = 128"),
        ({"lengths": (8, 80)}, "too short"),
        ({"arms": ()}, "arm"),
        ({"lengths": (99_999,), "overrides": ["model.eval_max_seq_len=100000"]}, "val-fraction"),
    ],
)
def test_what_cannot_be_read_is_refused_before_training(
    config, tmp_path, trainings, changes, words
):
    with pytest.raises(ValueError, match=words):
        ask(tmp_path / "out", config, **changes)
    assert trainings == []
    assert not (tmp_path / "out").exists()


def test_text_without_a_tokenizer_is_refused_before_training(config, tmp_path, trainings):
    shards = tmp_path / "bare"
    shutil.copytree(Path(load_config(config).data.train_data_path or "") / "train", shards)
    with pytest.raises(ValueError, match="tokenizer"):
        ask(tmp_path / "out", config, overrides=[f"data.train_data_path={shards}"])
    assert trainings == []


def test_held_out_text_is_read_in_its_own_dtype(config, tmp_path):
    """Shards of a large vocabulary are uint32, and the command line reads them as such."""
    run = load_config(config)
    folder = Path(run.data.train_data_path or "") / "validation"
    ids = np.fromfile(folder / "shard_00000.bin", dtype=np.uint16)[:129].astype(np.int64)
    assert np.array_equal(long_context.held_out(run, 129), ids)
    for split in ("train", "validation"):
        with ShardWriter(tmp_path / split, vocab_size=70_000, eos_token_id=0) as writer:
            writer.write(np.arange(69_000, 69_600))
    wide = dataclasses.replace(run.data, train_data_path=str(tmp_path))
    text = long_context.held_out(
        dataclasses.replace(
            run, data=wide, model=dataclasses.replace(run.model, vocab_size=70_000)
        ),
        129,
    )
    assert text.tolist() == list(range(69_000, 69_129))


@pytest.mark.parametrize("name", ["plain", "rope-pruned-sinks-1", "plain-pruned-sinks-", "plain-bare-sinks-1", "yarn-whole-pruned-1", "plain-pruned-sinks-²"])  # fmt: skip
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match="as in yarn-pruned-sinks-1337"):
        parse_arm(name)


def test_the_command_runs_it_and_writes_the_evidence(config, tmp_path, capsys):
    arguments = ["experiment", tmp_path / "runs", "--config", config, "--arm", FIRST.name, "--steps", 2]  # fmt: skip
    arguments += ["--trials", 2, "--length", 80, "--set", "training.micro_batch_size=auto", "--out", tmp_path / "out"]  # fmt: skip
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    assert not left.value.code, capsys.readouterr().err
    written = json.loads((tmp_path / "out" / "long_context.json").read_text())
    assert "--set training.micro_batch_size=auto" in written["command"]
    assert "--steps 2" in written["command"]
