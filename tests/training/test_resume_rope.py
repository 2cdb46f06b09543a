"""A run goes on with the rotary function that it began with, and files from before a setting existed say what they meant."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gptoss.training.pretrain import pretrain
from gptoss.training.restore import load_run


def forget(directory: Path, *names: str) -> None:
    """Make a run's config.json one from before some fields of the model existed."""
    path = directory / "config.json"
    saved = json.loads(path.read_text())
    for name in names:
        del saved["model"][name]
    path.write_text(json.dumps(saved))


def with_documents_yarn(run):
    return replace(run, model=replace(run.model, yarn_layers="all", yarn_mscale_pruned=False))


def test_an_old_run_trained_with_yarn_is_read_as_it_was_trained(small_run, tmp_path) -> None:
    run = with_documents_yarn(small_run(rope="yarn", total_steps=2))
    trained = pretrain(run, progress=False).model.eval()
    forget(tmp_path / "run", "yarn_layers", "yarn_mscale_pruned")
    model, _, read = load_run(tmp_path / "run")
    assert (read.model.yarn_layers, read.model.yarn_mscale_pruned) == ("all", False)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(model(ids)[0], trained(ids)[0])


def test_an_old_run_trained_with_yarn_is_not_continued_as_something_else(small_run, tmp_path) -> None:  # fmt: skip
    old = with_documents_yarn(small_run(rope="yarn", total_steps=4))
    pretrain(old, progress=False, max_steps=2)
    forget(tmp_path / "run", "yarn_layers", "yarn_mscale_pruned")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"config.json.*yarn_layers = 'all'.*'global'.*model.yarn_layers=all"):  # fmt: skip
        pretrain(small_run(rope="yarn", total_steps=4), progress=False)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert pretrain(old, progress=False).first_step == 2


def test_an_old_plain_run_goes_on(small_run, tmp_path) -> None:
    pretrain(small_run(total_steps=4), progress=False, max_steps=2)
    forget(tmp_path / "run", "yarn_layers", "yarn_mscale_pruned")
    assert pretrain(small_run(total_steps=4), progress=False).first_step == 2


def test_a_run_does_not_change_its_rotary_mode_unsaid(small_run) -> None:
    """rope was "yarn" where a file left it out, and is "plain" now."""
    pretrain(small_run(rope="yarn", total_steps=4), progress=False, max_steps=2)
    with pytest.raises(ValueError, match=r"training.rope = 'yarn'.*'plain'.*--set training.rope=yarn"):  # fmt: skip
        pretrain(small_run(total_steps=4), progress=False)


def test_a_run_without_its_description_goes_on(small_run, tmp_path) -> None:
    pretrain(small_run(total_steps=4), progress=False, max_steps=2)
    (tmp_path / "run" / "config.json").unlink()
    assert pretrain(small_run(total_steps=4), progress=False).first_step == 2


@pytest.mark.parametrize(
    ("rope", "name", "value"),
    [
        ("plain", "rope_theta", 500.0),
        ("plain", "yarn_prune_rope_global", False),
        ("yarn", "yarn_scale_factor", 4.0),
    ],
)
def test_a_run_keeps_its_rotary_numbers(small_run, rope, name, value) -> None:
    pretrain(small_run(rope=rope, total_steps=4), progress=False, max_steps=2)
    with pytest.raises(ValueError, match=f"began with model.{name} = .*--set model.{name}="):
        pretrain(small_run(rope=rope, total_steps=4, model={name: value}), progress=False)


def test_yarn_numbers_may_change_under_a_plain_run(small_run) -> None:
    pretrain(small_run(total_steps=4), progress=False, max_steps=2)
    changed = small_run(total_steps=4, model={"yarn_scale_factor": 4.0})
    assert pretrain(changed, progress=False).first_step == 2


def test_a_resume_names_the_settings_that_are_other_than_before(small_run, capsys) -> None:
    pretrain(small_run(total_steps=6), max_steps=2)
    pretrain(small_run(total_steps=6), max_steps=2)
    assert "otherwise than before" not in capsys.readouterr().out
    pretrain(small_run(total_steps=6, lr=2e-2, model={"window_size": 4}), max_steps=2)
    line = next(x for x in capsys.readouterr().out.splitlines() if "otherwise than before" in x)
    assert line.endswith("before: model.window_size 8 → 4, training.lr 0.01 → 0.02")
