"""The shipped model: offline at once, small enough, and it finds its keys on a CPU as its evidence says."""

import json
from pathlib import Path

import pytest
import torch

import gptoss
from gptoss.bench.passkey import BEST, HELD_OUT, RECIPES, read_as
from gptoss.config import load_config
from gptoss.inference.filler import read_filler
from gptoss.inference.generate import generate_with_result
from gptoss.inference.passkey import PasskeyEvaluator
from gptoss.pretrained import list_pretrained, load_pretrained

FOLDER = Path(gptoss.__file__).parent / "pretrained" / "nano"


def test_it_is_listed_and_small() -> None:
    assert "nano" in list_pretrained()
    files = list(FOLDER.glob("model-*.safetensors"))
    assert sum(f.stat().st_size for f in files) <= 30 * 2**20
    assert all(f.stat().st_size <= 16 * 2**20 for f in files)


def test_its_configuration_is_the_committed_one() -> None:
    shipped = json.loads((FOLDER / "config.json").read_text())
    assert shipped["model"] == load_config("nano").to_dict()["model"]


def test_its_card_says_what_it_is() -> None:
    card = (FOLDER / "README.md").read_text()
    model, _ = load_pretrained("nano")
    assert f"{model.num_parameters():,} parameters" in card
    assert f"{model.num_active_parameters():,}" in card
    for word in ("bad at", "licence", "gptoss pretrain --config nano", "NVIDIA H200"):
        assert word in card


@pytest.mark.parametrize(("length", "trials"), [(4096, 4), (8192, 2), (16_384, 1)])
def test_it_finds_keys_beyond_its_training_length(length: int, trials: int) -> None:
    # book/evidence/passkey.json: ten of ten at each length; a chance answer is right once in 100,000.
    model, tokenizer = load_pretrained("nano")
    filler = read_filler(tokenizer, HELD_OUT, length)
    evaluator = PasskeyEvaluator(model, tokenizer, filler=filler, batch_tokens=4096)
    assert evaluator.evaluate([length], trials, depths=(0.05, 0.35, 0.65, 0.95)) == {length: 1.0}


def test_recipes_change_only_the_rotary_setting_and_go_back() -> None:
    model, _ = load_pretrained("nano")
    positions = torch.tensor([5000])
    before = model.rotary_tables(positions, torch.float32)
    tables = {}
    for name, recipe in RECIPES.items():
        with read_as(model, recipe) as mode:
            model.set_rope_mode(mode)
            tables[name] = [
                t for kind in model.rotary_tables(positions, torch.float32) for t in kind
            ]
            model.set_rope_mode("plain")
    for kind, again in zip(before, model.rotary_tables(positions, torch.float32), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kind, again, strict=True))
    windowed_plain = tables["plain"][0]
    assert torch.equal(tables[BEST][0], windowed_plain)
    assert not torch.equal(tables["YaRN in all layers"][0], windowed_plain)
    assert (tables["YaRN in global layers"][2][:, :16] == 1).all()
    assert (tables[BEST][2][:, :16] > 1.3).all()


def test_it_writes_python() -> None:
    model, tokenizer = load_pretrained("nano")
    prompt = "class Tree:\n    def __init__(self, value):\n"
    result = generate_with_result(
        model, prompt, 40, temperature=0.7, top_p=0.95, seed=2, tokenizer=tokenizer
    )
    text = tokenizer.decode(result.new_tokens[0])
    assert "self" in text
    assert "    " in text
