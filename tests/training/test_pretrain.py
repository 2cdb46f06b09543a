"""The whole run: what it returns, what it leaves on disk, what it refuses before it writes anything."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from gptoss.data.shards import ShardWriter
from gptoss.inference.generate import generate_with_result
from gptoss.model.transformer import GPTOSS
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.distributed import World
from gptoss.training.journal import read_journal
from gptoss.training.pretrain import pretrain
from gptoss.training.restore import load_run
from gptoss.training.run_data import open_run_data


def test_the_result_tells_the_whole_story(text_run):
    run = text_run(total_steps=30, lr=2e-2, save_interval=30, validation_interval=10)
    result = pretrain(run, progress=False)
    assert result.step == len(result.losses) == 30
    assert result.tokens_per_step == 128
    assert [entry.step for entry in result.validation] == [10, 20, 30]
    assert result.validation[-1].loss < 0.8 * result.unigram_baseline
    ratio = result.unigram_bits_per_byte / result.unigram_baseline
    for entry in result.validation:
        assert entry.bits_per_byte == pytest.approx(ratio * entry.loss)
    assert result.tokens_per_second > 0
    assert result.stopped_by is None
    assert result.tokenizer.vocab_size <= 320


def test_the_directory_alone_is_enough_to_generate(text_run):
    run = text_run(rope="yarn")
    result = pretrain(run, progress=False)
    model, tokenizer, loaded = load_run(result.checkpoint_dir)
    assert loaded == run
    assert model.rope_mode == "yarn"
    assert not model.training
    assert model.head.weight is model.embed.weight
    for name, value in result.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    text = generate_with_result(model, "def ", 5, temperature=0.0, tokenizer=tokenizer).texts[0]
    assert isinstance(text, str)


def test_what_a_killed_run_staged_is_cleared_away_by_the_next(text_run, tmp_path):
    pretrain(text_run(), progress=False, max_steps=1)
    names = {path.name for path in (tmp_path / "run").iterdir()} - {"train.lock"}
    assert {"config.json", "tokenizer.json", "metrics.jsonl", "meta_step_1.json"} < names
    for name in names:
        (tmp_path / "run" / f".{name}.123.partial").write_text("half")
    pretrain(text_run(), progress=False, max_steps=1)
    assert not list((tmp_path / "run").glob("*.partial"))


def test_an_earlier_step_can_be_loaded(text_run):
    result = pretrain(text_run(), progress=False)
    early, _, _ = load_run(result.checkpoint_dir, step=5)
    assert not torch.equal(early.norm.weight, result.model.norm.weight)


def test_samples_are_written_where_asked_and_do_not_change_the_run(text_run, tmp_path):
    plain = pretrain(text_run(name="plain"), progress=False)
    sampled = pretrain(text_run(name="sampled", sample_interval=4), progress=False)
    assert [step for step, _ in sampled.samples] == [4, 8]
    assert all(text.startswith("def ") for _, text in sampled.samples)
    assert sampled.losses == plain.losses
    events = [r for r in read_journal(tmp_path / "sampled" / "metrics.jsonl") if r.get("event")]
    assert [e["step"] for e in events if e["event"] == "sample"] == [4, 8]


def test_the_log_has_the_documents_line_and_is_silent_on_request(small_run, capsys):
    pretrain(small_run("loud"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step=")]
    assert len(lines) == 2
    assert lines[0].startswith("step=      5 | loss=")
    assert [part.split("=")[0] for part in lines[0].split(" | ")] == [
        *("step", "loss", "ppl", "lr", "tps", "aux")
    ]
    pretrain(small_run("quiet"), progress=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_the_journal_has_every_step_and_what_was_measured(small_run, tmp_path):
    result = pretrain(small_run(), progress=False)
    records = read_journal(tmp_path / "run" / "metrics.jsonl")
    steps = [r for r in records if "event" not in r]
    assert [r["step"] for r in steps] == list(range(1, 11))
    assert [r["loss"] for r in steps] == result.losses
    assert ["tokens_per_second" in r for r in steps] == [False] * 4 + [True] + [False] * 4 + [True]
    validations = [r for r in records if r.get("event") == "validation"]
    assert [(r["step"], r["loss"]) for r in validations] == [
        (entry.step, entry.loss) for entry in result.validation
    ]


def test_retrieval_examples_are_mixed_in(text_run, prepared):
    data = {"train_data_path": str(prepared), "validation_data_path": None}
    data |= {"retrieval_share": 0.5, "retrieval_keys": 1, "retrieval_questions": 1}
    model = {"vocab_size": 320, "max_seq_len": 128, "eval_max_seq_len": 128}
    run = text_run()
    run = replace(run, data=replace(run.data, **data), model=replace(run.model, **model))
    assert pretrain(run, progress=False, max_steps=1).step == 1


def test_near_misses_stand_among_the_retrieval_lines(text_run, prepared):
    data = {"train_data_path": str(prepared), "validation_data_path": None, "retrieval_share": 1.0}
    data |= {"retrieval_keys": 1, "retrieval_questions": 1, "retrieval_near_misses": 2}
    run = text_run()
    model = replace(run.model, vocab_size=320, max_seq_len=256, eval_max_seq_len=256)
    run = replace(run, data=replace(run.data, **data), model=model)
    opened = open_run_data(run, World(torch.device("cpu")))
    text = opened.tokenizer.decode(opened.source.sequence_at(1, 0).tolist())
    lines = re.findall(r"\n# .*\b\d{5}\b", text)
    assert len(lines) == 3
    assert len([line for line in lines if "The passkey of" in line]) == 1
    shorter = replace(run, model=replace(model, max_seq_len=64))
    with pytest.raises(ValueError, match="1 keys, 2 near misses and 1 questions"):
        open_run_data(shorter, World(torch.device("cpu")))


def test_without_validation_shards_the_end_of_the_training_shards_is_held_out(small_run):
    result = pretrain(small_run(data={"validation_data_path": None}), progress=False, max_steps=1)
    assert len(result.validation) == 1


def test_held_out_windows_are_no_training_text_in_plan_journal_and_baseline(
    small_run, tmp_path, capsys
):
    """40,000 tokens are 1,249 windows of 32; 12 of them are held out, with a token that occurs nowhere else."""
    shards = tmp_path / "shards"
    tokens = np.tile(np.arange(63), 635)[:40_000]
    tokens[1_237 * 32 :] = 63
    with ShardWriter(shards, vocab_size=64, eos_token_id=0) as writer:
        writer.write(tokens)
    data = {"train_data_path": str(shards), "validation_data_path": None}
    result = pretrain(small_run(data=data), max_steps=1)
    assert "39,584 tokens to train on, 384 held out" in capsys.readouterr().out
    begins = read_journal(tmp_path / "run" / "metrics.jsonl")[0]
    assert (begins["training_tokens"], begins["held_out_tokens"]) == (39_584, 384)
    counted = 38 * 1_041  # tokens, in 38 stretches
    assert result.unigram_baseline == pytest.approx(math.log(counted + 64))


def nothing_was_written(tmp_path) -> bool:
    return not any((tmp_path / "run").rglob("*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"train_data_path": "/no/such/place"}}, "/no/such/place"),
        ({"data": {"train_data_path": None, "corpus": None}}, "no data"),
        ({"model": {"vocab_size": 40}}, "model.vocab_size = 40"),
        ({"model": {"max_seq_len": 50_000, "eval_max_seq_len": 50_000}}, "max_seq_len = 50000"),
        ({"compile": True, "compile_mode": "fast"}, "compile_mode = 'fast'"),
        ({"seed": -1}, "seed = -1"),
        ({"model": {"attention_backend": "flex"}}, "no backward pass on cpu"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    small_run, tmp_path, change, message
):
    with pytest.raises((ValueError, OSError), match=message):
        pretrain(small_run(**change), device="cpu", progress=False)
    assert nothing_was_written(tmp_path)


def test_triton_experts_are_refused_where_nothing_runs_them(small_run, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    run = small_run(model={"moe_dispatch": "triton_grouped"})
    with pytest.raises(ValueError, match=r"needs a CUDA device, got cpu: set model.moe_dispatch"):
        pretrain(run, device="cpu", progress=False)
    assert nothing_was_written(tmp_path)
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu"):  # a model from a GPU
        GPTOSS(run.model)(torch.zeros(1, 3, dtype=torch.long))


def test_a_tokenizer_larger_than_the_model_is_refused(small_run, prepared, tmp_path):
    data = {"tokenizer": str(prepared / "tokenizer.json")}
    with pytest.raises(ValueError, match=r"tokenizer.json has a vocabulary of \d+, but .* = 64"):
        pretrain(small_run(data=data), progress=False)
    assert nothing_was_written(tmp_path)


def test_shards_of_another_tokenizer_are_refused(small_run, prepared, tmp_path):
    other = json.loads((prepared / "tokenizer.json").read_text())
    other["model"]["merges"] = other["model"]["merges"][:-1]
    (tmp_path / "other.json").write_text(json.dumps(other))
    data = {"train_data_path": str(prepared), "validation_data_path": None}
    data["tokenizer"] = str(tmp_path / "other.json")
    with pytest.raises(ValueError, match="written with another tokenizer"):
        pretrain(small_run(model={"vocab_size": 320}, data=data), progress=False)


def test_a_save_dir_that_cannot_be_made_is_refused(small_run, tmp_path):
    (tmp_path / "file").write_text("in the way")
    run = small_run()
    run = replace(run, training=replace(run.training, save_dir=str(tmp_path / "file" / "run")))
    with pytest.raises(NotADirectoryError, match="is a file, not a directory"):
        pretrain(run, progress=False)


def test_a_read_only_save_dir_is_refused(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PermissionError, match="cannot be written"):
        pretrain(small_run(), progress=False)


@pytest.mark.parametrize("resume", ["sometimes", 3, True])
def test_a_resume_that_is_not_there_is_refused(small_run, resume):
    with pytest.raises(ValueError, match=r"resume|no complete checkpoint of step 3"):
        pretrain(small_run(), resume=resume, progress=False)


def test_never_refuses_a_directory_that_holds_checkpoints(small_run, tmp_path):
    pretrain(small_run(), progress=False, max_steps=2)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    with pytest.raises(ValueError, match="holds checkpoints up to step 2"):
        pretrain(small_run(), resume="never", progress=False)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before


def test_a_checkpoint_of_another_model_is_refused_and_kept(small_run, tmp_path):
    pretrain(small_run(), progress=False, max_steps=2)
    with pytest.raises(ValueError, match=r"model_step_2\.safetensors"):
        pretrain(small_run(model={"ffn_dim": 24}), progress=False)
    assert CheckpointManager(tmp_path / "run").latest_step() == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["ffn_dim"] == 16


def test_damaged_checkpoints_do_not_start_a_run_anew(small_run, tmp_path):
    pretrain(small_run(), progress=False, max_steps=2)
    for path in (tmp_path / "run").glob("model_step_*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(ValueError, match="is undamaged"):
        pretrain(small_run(), progress=False)


def test_a_run_shorter_than_its_checkpoint_is_refused(small_run):
    pretrain(small_run(), progress=False)
    with pytest.raises(ValueError, match=r"step 10, behind training\.total_steps = 4"):
        pretrain(small_run(total_steps=4), progress=False)


def test_a_journal_that_cannot_go_on_is_refused_before_anything_is_written(small_run, tmp_path):
    pretrain(small_run(), progress=False, max_steps=2)
    folder = tmp_path / "run"
    (folder / "metrics.jsonl").write_text("no json\n{}\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: .* move the file away"):
        pretrain(small_run(lr=5e-4), progress=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
