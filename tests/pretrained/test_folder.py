"""A shipped model's folder with something wrong in it: one line that names the file and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss.config import ModelConfig, RunConfig
from gptoss.data.tokenizers import train_tokenizer
from gptoss.model.transformer import GPTOSS
from gptoss.pretrained import export_pretrained, load_pretrained, shipped

TEXT = ["def f(x):\n    return x + 1\n" * 50]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A small model in several files, with its tokenizer."""
    folder = tmp_path_factory.mktemp("exported") / "small"
    config = ModelConfig(
        **{"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8},
        **{"ffn_dim": 8, "n_routed_experts": 2, "yarn_prune_rope_global": False},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "MAX_FILE_BYTES", 11_000)
        export_pretrained(
            GPTOSS(config), RunConfig(model=config), train_tokenizer(TEXT, 280), folder
        )
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    return folder


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "small"))


FIRST, LAST = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def change_config(**model: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        run = json.loads(path.read_text())
        run["model"].update(model)
        path.write_text(json.dumps(run))

    return change


def cut(folder: Path) -> None:
    (folder / LAST).write_bytes((folder / LAST).read_bytes()[:-1000])


def older_export(folder: Path) -> None:
    save_file({"norm.weight": torch.zeros(16)}, folder / "model-00001-of-00003.safetensors")


def stranger(folder: Path) -> None:
    save_file(load_file(folder / LAST) | {"foo": torch.zeros(2)}, folder / LAST)


def integers(folder: Path) -> None:
    weights = load_file(folder / LAST)
    save_file(weights | {"norm.weight": torch.zeros(16, dtype=torch.int32)}, folder / LAST)


def other_tokenizer(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        train_tokenizer(["Other words, and many more of them.\n" * 9], size).save(folder / "tokenizer.json")  # fmt: skip

    return change


def larger_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words |= {f"word{i}": len(words) + i + 5 for i in range(100)}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / LAST).unlink(), f"{LAST}: missing"),
        (lambda folder: [(folder / name).unlink() for name in (FIRST, LAST)], "no model-"),
        (cut, f"{LAST}: cut or damaged"),
        (lambda folder: (folder / LAST).write_bytes(b""), f"{LAST}: cut or damaged"),
        (lambda folder: (folder / LAST).write_bytes(b"x" * 99), f"{LAST}: cut or damaged"),
        (older_export, "files of several exports"),
        (lambda folder: (folder / FIRST).rename(folder / "model-best.safetensors"), "several exports"),
        (stranger, "unexpected foo"),
        (integers, "norm.weight is .16,. of torch.int32"),
        (other_tokenizer(270), "made with another tokenizer"),
        (larger_tokenizer, "another model's"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (change_config(n_layers=4), "missing blocks.2.* and [0-9]+ more"),
        (change_config(n_layers=1), "unexpected blocks.1.* and [0-9]+ more"),
        (change_config(ffn_dim=12), r"experts.w1 is \(2, 8, 16\) .*expected \(2, 12, 16\)"),
        (change_config(n_heads=0), "config.json: not a run's configuration: ModelConfig.n_heads = 0"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not a run's"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: not a run's"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_in_one_short_line(folder, change, words) -> None:
    change(folder)
    with pytest.raises((ValueError, OSError), match=words) as problem:
        load_pretrained(folder)
    assert len(str(problem.value).splitlines()) == 1
    assert len(str(problem.value)) < 400


def test_an_integer_dtype_is_refused(folder) -> None:
    with pytest.raises(ValueError, match="floating dtype"):
        load_pretrained(folder, dtype=torch.int8)


def test_a_whole_folder_loads_as_it_was_written(folder) -> None:
    model, tokenizer = load_pretrained(folder)
    assert model.head.weight is model.embed.weight
    weights = load_file(folder / FIRST) | load_file(folder / LAST)
    for key, tensor in weights.items():
        assert torch.equal(model.state_dict()[key], tensor.float()), key
    assert tokenizer.vocab_size <= 300


def test_an_export_that_replaces_a_larger_one_leaves_none_of_its_files(folder) -> None:
    model, tokenizer = load_pretrained(folder)
    run = RunConfig.from_saved(json.loads((folder / "config.json").read_text()))
    export_pretrained(model, run, tokenizer, folder)
    assert [path.name for path in folder.glob("model-*")] == ["model-00001-of-00001.safetensors"]
    load_pretrained(folder)


def test_a_tensor_larger_than_a_file_gets_one_of_its_own(folder, monkeypatch) -> None:
    model, tokenizer = load_pretrained(folder)
    run = RunConfig.from_saved(json.loads((folder / "config.json").read_text()))
    monkeypatch.setattr(shipped, "MAX_FILE_BYTES", 2_000)  # the embedding has 9,600 bytes
    export_pretrained(model, run, tokenizer, folder)
    sizes = {}
    for path in folder.glob("model-*"):
        weights = load_file(path)
        sizes[tuple(weights)] = sum(tensor.nbytes for tensor in weights.values())
    assert sizes[("embed.weight",)] == 9_600
    assert all(size <= 2_000 for names, size in sizes.items() if len(names) > 1)
    again, _ = load_pretrained(folder)
    assert torch.equal(again.embed.weight, model.embed.weight)
