"""Configurations: what a file or an override may say wrongly, and files from before a field existed."""

import json
from pathlib import Path

import pytest

from gptoss.config import ModelConfig, RunConfig, list_configs, load_config

DOCUMENTS = {"yarn_layers": "all", "yarn_mscale_pruned": False}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.yarn_layers=windowed", "ModelConfig.yarn_layers = 'windowed': must be one of global, all"),
        ("model.yarn_layers=", "ModelConfig.yarn_layers = None: expected str"),
        ("model.yarn_mscale_pruned=maybe", "ModelConfig.yarn_mscale_pruned = 'maybe': expected bool"),
        ("model.yarn_layer=all", "did you mean 'yarn_layers'"),
        ("training.rope=auto", "TrainingConfig.rope = 'auto': must be one of plain, yarn"),
        ("training.total_steps=.inf", "TrainingConfig.total_steps = inf: expected int"),
        ("training.total_steps=.nan", "TrainingConfig.total_steps = nan: expected int"),
        ("training.seed=-1", "TrainingConfig.seed = -1: must lie in 0 to 4294967295"),
        ("training.lr=.nan", "TrainingConfig.lr = nan: must be positive"),
        ("training.lr=[1", "override 'training.lr=.1': not valid YAML"),
        ("model.n_layers=: :", "override 'model.n_layers=: :': not valid YAML"),
        ("data.retrieval_near_misses=-1", "DataConfig.retrieval_near_misses = -1: must not be negative"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_in_one_line(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as problem:
        load_config("tiny", [override])
    assert len(str(problem.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"model: [1]", "expected sections"),
        (b"model:\n  1: 2", "unknown key in ModelConfig: 1"),
        (b"3: {}", "unknown section: 3"),
        (b"\xff\xfe\x00", r"run\.yaml: not UTF-8"),
        (b"model:\n\tx: 1", "not valid YAML"),
        (b"0", "expected sections"),
        (b"training:\n  lr: 1.0\n  lr: 2.0\n", "'lr' stands there twice"),
        (b"training: {lr: 1.0}\ntraining: {}\n", "'training' stands there twice"),
        (b"training:\n  validation_batches: 0", "validation_batches = 0: must be positive"),
        (b"training:\n  save_dir: ' '", "save_dir = ' ': must name a directory"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=words) as problem:
        load_config(path)
    assert len(str(problem.value).splitlines()) == 1


def test_a_home_directory_in_a_file_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run.yaml"
    path.write_text("training:\n  save_dir: ~/runs/a\ndata:\n  train_data_path: ~/text\n")
    run = load_config(path, ["data.tokenizer=~/t.json"])
    assert run.training.save_dir == f"{tmp_path}/runs/a"
    assert (run.data.train_data_path, run.data.tokenizer) == (
        f"{tmp_path}/text",
        f"{tmp_path}/t.json",
    )


def test_yarn_settings_of_a_file_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  yarn_layers: all\n  yarn_mscale_pruned: false\n")
    model = load_config(path).model
    assert (model.yarn_layers, model.yarn_mscale_pruned) == ("all", False)
    assert (ModelConfig().yarn_layers, ModelConfig().yarn_mscale_pruned) == ("global", True)


@pytest.mark.parametrize("name", list_configs())
def test_what_is_written_is_read_back(name: str) -> None:
    run = load_config(name)
    assert run.training.rope == "plain"
    assert RunConfig.from_saved(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize(("rope", "meant"), [("yarn", DOCUMENTS), ("plain", {"yarn_layers": "global", "yarn_mscale_pruned": True})])  # fmt: skip
def test_a_saved_run_from_before_yarn_layers_keeps_the_function_it_was_trained_as(
    rope: str, meant: dict
) -> None:
    """YaRN then changed all layers and left pruned pairs at 1. A plainly trained model is read as well as is known."""
    saved = load_config("tiny", [f"training.rope={rope}"]).to_dict()
    for name in DOCUMENTS:
        del saved["model"][name]
    model = RunConfig.from_saved(saved).model
    assert {name: getattr(model, name) for name in meant} == meant
    assert not set(DOCUMENTS) & set(saved["model"])  # its argument is not changed


@pytest.mark.parametrize("saved", [[], None, {"model": 3}, {"training": []}, "x"])
def test_a_saved_run_of_another_form_is_refused(saved: object) -> None:
    with pytest.raises(ValueError, match="expected sections"):
        RunConfig.from_saved(saved)
