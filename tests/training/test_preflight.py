"""What a run asks for beside training is seen to before anything is written."""

import sys

import pytest

from gptoss.training.pretrain import pretrain

LONG = " ".join(f"word{number}" for number in range(80))  # 80 tokens at least


def test_a_sample_prompt_longer_than_the_model_holds_is_refused(text_run, tmp_path):
    run = text_run(sample_interval=3, sample_prompt=LONG)
    with pytest.raises(
        ValueError, match=r"sample_prompt is \d+ tokens long, .*eval_max_seq_len = 64"
    ):
        pretrain(run, progress=False)
    assert not any((tmp_path / "run").rglob("*"))


def test_a_long_sample_prompt_is_no_fault_where_no_sample_is_written(text_run, small_run):
    assert pretrain(text_run(sample_prompt=LONG), progress=False, max_steps=1).step == 1
    without_tokenizer = small_run("ids", sample_interval=1, sample_prompt=LONG)
    assert pretrain(without_tokenizer, progress=False, max_steps=1).samples == []


def test_a_missing_tensorboard_is_found_before_anything_is_written(
    small_run, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        pretrain(small_run(tensorboard=True), progress=False)
    assert not any((tmp_path / "run").rglob("*"))
