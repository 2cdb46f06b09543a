"""The passkey evaluation is honest: exact lengths, no answer in the question, and greedy decoding in one prefill."""

import functools
import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gptoss.data.retrieval import KEY_LINE, NAMES, QUESTION
from gptoss.inference import passkey, passkey_prompt
from gptoss.inference.accuracy import PasskeyResult, Trial, wilson_interval
from gptoss.inference.generate import generate
from gptoss.inference.passkey import PasskeyEvaluator
from gptoss.inference.passkey_prompt import PasskeyPrompt, build_passkey_prompt

FILLER = np.frombuffer(b"import os\nfor line in open(path):\n    print(line)\n" * 400, np.uint8)


class TextModel(nn.Module):
    """Answers by a rule on the text so far: `rule(text)` is the next character. It is a model for the evaluator."""

    def __init__(self, rule) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.rule, self.rope_mode = rule, "plain"
        self.cfg = SimpleNamespace(
            vocab_size=1000,
            eval_max_seq_len=100_000,
            yarn_original_max_seq_len=1000,
            n_layers=1,
            n_kv_heads=1,
            head_dim=2,
            window_size=4,
            is_windowed=lambda layer: True,
        )
        self.modes = set()

    def set_rope_mode(self, mode):
        self.rope_mode = mode

    def forward(self, idx, cache=None, key_start=None, last_only=False):
        self.modes.add(self.rope_mode)
        cache.texts = getattr(cache, "texts", [""] * len(idx))
        logits = torch.zeros(*idx.shape, 256)
        for row, ids in enumerate(idx.tolist()):
            for i, token in enumerate(ids):
                cache.texts[row] += chr(token)
                if not last_only:
                    logits[row, i, ord(self.rule(cache.texts[row]))] = 1
        return logits[:, -1:] if last_only else logits, torch.tensor(0.0)


def written(text: str) -> str:
    """What has been written of the answer: a space and digits after the question."""
    return re.search(r"(?: \d*)?$", text).group()


def copies_from_the_question(text: str) -> str:
    """Copies the digits that stand in the last sentence; guesses 7 when there are none."""
    sentence = text[: len(text) - len(written(text))].rsplit("\n", 1)[1]
    answer = " " + "".join(re.findall(r"\d", sentence)).ljust(5, "7")
    return answer[len(written(text))]


def retrieves(text: str) -> str:
    """Finds the key line of the name that is asked for."""
    question = text[: len(text) - len(written(text))].rsplit("\n", 1)[1]
    name = re.fullmatch(r"The passkey of (\w+) is", question).group(1)
    return (" " + re.search(rf"# The passkey of {name} is (\d+)\.", text).group(1))[
        len(written(text))
    ]


def takes_the_first_key(text: str) -> str:
    return (" " + re.search(r"# The passkey of \w+ is (\d+)\.", text).group(1))[len(written(text))]


# The prompt


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(400, 3000),
    depth=st.floats(0, 1),
    n_distractors=st.integers(0, 5),
    n_near_misses=st.integers(0, 3),
    corpus=st.booleans(),
    trial=st.integers(0, 1000),
)
def test_a_prompt_is_exact_and_its_question_says_no_answer(
    plain_tokenizer, length, depth, n_distractors, n_near_misses, corpus, trial
):
    prompt = build_passkey_prompt(
        plain_tokenizer,
        length,
        depth,
        random.Random(trial),
        filler=FILLER if corpus else None,
        n_distractors=n_distractors,
        n_near_misses=n_near_misses,
    )
    assert len(prompt.ids) + len(prompt.answer_ids) == length
    text = plain_tokenizer.decode(prompt.ids.tolist())
    answer = plain_tokenizer.decode(prompt.answer_ids)
    question = QUESTION.format(name=prompt.name)
    assert text.endswith(question)
    assert not re.search(r"\d", question)
    assert answer == f" {prompt.key}"
    assert text.count(prompt.key) == 1  # the key line alone holds it
    assert text.count(KEY_LINE.format(name=prompt.name, key=prompt.key)) == 1
    keys = re.findall(r"# The passkey of (\w+) is (\d{5})\.\n", text)
    assert len({name for name, _ in keys}) == len({key for _, key in keys}) == 1 + n_distractors
    assert len(re.findall(r"\d{5}", text)) == 1 + n_distractors + n_near_misses


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth_is_the_key_lines_place_in_the_filler(plain_tokenizer, depth):
    prompt = build_passkey_prompt(plain_tokenizer, 1000, depth, random.Random(0))
    line = KEY_LINE.format(name=prompt.name, key=prompt.key)
    filler = 1000 - len(line) - len(QUESTION.format(name=prompt.name)) - len(" 12345")
    text = plain_tokenizer.decode(prompt.ids.tolist())
    assert text.index(line) == round(depth * filler)


def test_the_corpus_is_read_from_different_places(plain_tokenizer):
    corpus = np.arange(10_000, dtype=np.uint16)
    starts = {
        int(build_passkey_prompt(plain_tokenizer, 300, 1.0, random.Random(i), filler=corpus).ids[0])
        for i in range(20)
    }
    assert len(starts) > 15
    assert max(starts) > 256  # ids are taken as they are


def test_a_trial_is_the_same_whatever_is_asked_beside_it(make_model, plain_tokenizer):
    ask = PasskeyEvaluator(
        make_model(), plain_tokenizer, filler=FILLER, n_distractors=2
    ).build_prompt
    one, again, other = ask(500, 0.5, trial=3), ask(500, 0.5, trial=3), ask(500, 0.5, trial=4)
    assert torch.equal(one.ids, again.ids)
    assert (one.key, one.name) == (again.key, again.name) != (other.key, other.name)
    assert ask(500, 0.5, key="00042").key == "00042"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 1.1}, "depth must lie in .0, 1., got 1.1"),
        ({"length": 40}, "a prompt of 40 tokens is too short"),
        ({"n_distractors": len(NAMES)}, "n_distractors must lie in"),
        ({"n_near_misses": -1}, r"n_near_misses must lie in \[0, 99999\], got -1"),
        (
            {"n_near_misses": 99_998, "n_distractors": 2},
            r"n_near_misses must lie in \[0, 99997\], got 99998: each line has its own number",
        ),
        ({"filler": FILLER[:100]}, "the filler has 100 tokens and"),
        ({"key": "12a45"}, "a passkey is made of digits"),
    ],
)
def test_a_prompt_that_cannot_be_built_is_refused(plain_tokenizer, change, message):
    arguments = {"length": 500, "depth": 0.5, "rng": random.Random(0)} | change
    with pytest.raises(ValueError, match=message):
        build_passkey_prompt(plain_tokenizer, **arguments)


@pytest.mark.parametrize("key", [None, "7", "123"])
def test_as_many_numbers_as_there_are_can_be_asked_for(plain_tokenizer, monkeypatch, key):
    monkeypatch.setattr(passkey_prompt, "KEY_DIGITS", 1)
    arguments = {"length": 900, "depth": 0.5, "rng": random.Random(0), "key": key}
    prompt = build_passkey_prompt(plain_tokenizer, **arguments, n_distractors=4, n_near_misses=5)
    numbers = re.findall(r"\d+", plain_tokenizer.decode(prompt.ids.tolist()))
    assert len(set(numbers)) == len(numbers) == 10
    with pytest.raises(ValueError, match=r"n_near_misses must lie in \[0, 5\], got 6"):
        build_passkey_prompt(plain_tokenizer, **arguments, n_distractors=4, n_near_misses=6)


# The evaluation


def test_a_model_that_copies_from_its_question_scores_at_chance(plain_tokenizer, monkeypatch):
    ask = PasskeyEvaluator(TextModel(copies_from_the_question), plain_tokenizer, filler=FILLER)
    # Chance is 1 in 100,000 a trial, so 40 trials give none.
    assert ask.evaluate([400], n_trials=40) == {400: 0.0}
    # The same model under the documents' kind of question: it scores without any retrieval.
    leaking = functools.partial(
        build_passkey_prompt, question="\nThe passkey is {key}. The passkey of {name} is"
    )
    monkeypatch.setattr(passkey, "build_passkey_prompt", leaking)
    assert ask.evaluate([400], n_trials=40) == {400: 1.0}


def test_a_model_that_retrieves_scores_fully_among_distractors(plain_tokenizer):
    model = TextModel(retrieves)
    ask = PasskeyEvaluator(
        model, plain_tokenizer, filler=FILLER, n_distractors=5, n_near_misses=3, prefill_chunk=128
    )
    result = ask.evaluate_grid([600, 1100], n_trials=7, depths=[0.1, 0.5, 0.9])
    assert result.accuracy() == {600: 1.0, 1100: 1.0}
    assert result.count(600, 0.1) == (3, 3)
    assert result.count(600, 0.9) == (2, 2)
    assert result.settings["rope_mode"] == {"600": "plain", "1100": "yarn"}  # trained to 1000
    assert model.rope_mode == "plain"
    assert model.modes == {"plain", "yarn"}


def test_a_model_that_takes_any_key_is_found_out_by_distractors(plain_tokenizer):
    model = TextModel(takes_the_first_key)
    alone = PasskeyEvaluator(model, plain_tokenizer, filler=FILLER)
    among = PasskeyEvaluator(model, plain_tokenizer, filler=FILLER, n_distractors=9)
    assert alone.evaluate([700], 20, depths=[0.5]) == {700: 1.0}
    assert among.evaluate([900], 20, depths=[0.9])[900] <= 0.2


def greedy_prompt(model, ids: torch.Tensor, n_answer: int) -> PasskeyPrompt:
    """A prompt whose answer is what the model itself says."""
    said = generate(model, ids[None], n_answer, temperature=0, rope="plain")[0, len(ids) :].tolist()
    return PasskeyPrompt(ids, said, "0", "amber", 0.5, len(ids) + n_answer)


@settings(deadline=None, max_examples=20)
@given(length=st.integers(1, 20), n_answer=st.integers(1, 6), seed=st.integers(0, 99))
def test_one_prefill_says_right_exactly_when_step_by_step_decoding_does(
    make_model, plain_tokenizer, length, n_answer, seed
):
    model = make_model(window=4, n_layers=2, seed=seed % 3)
    model.set_rope_mode("plain")
    ids = torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed))
    ask = PasskeyEvaluator(model, plain_tokenizer, prefill_chunk=5)
    prompt = greedy_prompt(model, ids, n_answer)
    assert ask.ask([prompt])[0].right
    for place in range(n_answer):  # any other answer is wrong, wherever it differs
        wrong = list(prompt.answer_ids)
        wrong[place] = (wrong[place] + 1) % 61
        assert not ask.ask([PasskeyPrompt(ids, wrong, "0", "amber", 0.5, prompt.length)])[0].right


def test_prompts_read_together_answer_as_alone(make_model, plain_tokenizer):
    model = make_model(window=4)
    model.set_rope_mode("plain")
    # equal lengths of prompt + answer, unequal answers
    prompts = [greedy_prompt(model, torch.arange(20 + i) % 61, 8 - i) for i in range(4)]
    prompts.append(
        PasskeyPrompt(prompts[0].ids, [*prompts[0].answer_ids[:-1], 60], "0", "birch", 0.5, 28)
    )
    ask = PasskeyEvaluator(model, plain_tokenizer, prefill_chunk=7)
    together = ask.ask(prompts)
    assert [t.right for t in together] == [True] * 4 + [False]
    for prompt, trial in zip(prompts, together, strict=True):
        alone = ask.ask([prompt])[0]
        assert alone.said == trial.said
        assert alone.answer_loss == pytest.approx(trial.answer_loss, rel=1e-5)


def test_the_result_does_not_depend_on_batches_and_chunks(make_model, plain_tokenizer):
    model = make_model(vocab_size=256, window=4, eval_max_seq_len=512)
    results = [
        PasskeyEvaluator(
            model, plain_tokenizer, filler=FILLER, batch_tokens=tokens, prefill_chunk=chunk
        ).evaluate_grid([200, 300], n_trials=3, depths=[0.2, 0.8])
        for tokens, chunk in ((1, 50), (700, 4096), (700, None), (700, 1))
    ]
    for one, *others in zip(*(r.trials for r in results), strict=True):
        for other in others:
            assert (one.length, one.depth, one.key, one.said) == (
                *(other.length, other.depth, other.key, other.said),
            )
            assert one.answer_loss == pytest.approx(other.answer_loss, rel=1e-5)


def test_nothing_is_printed_when_nobody_watches(plain_tokenizer, capfd):
    ask = PasskeyEvaluator(TextModel(retrieves), plain_tokenizer)
    ask.evaluate([300], 2)
    assert capfd.readouterr() == ("", "")
    ask.evaluate([300], 2, progress=True)
    assert "300 tokens" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([513],), "length 513 exceeds eval_max_seq_len = 512"),
        (([],), "at least one length"),
        (([300], 0), "one trial"),
        (([300], 1, []), "one depth"),
    ],
)
def test_an_evaluation_without_sense_is_refused(make_model, plain_tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        PasskeyEvaluator(make_model(), plain_tokenizer).evaluate(*arguments)


def test_filler_must_be_token_ids(make_model, plain_tokenizer):
    for filler in (np.zeros((2, 3), np.int64), np.zeros(5), torch.zeros(4)):
        with pytest.raises(ValueError, match="expected filler as"):
            PasskeyEvaluator(make_model(), plain_tokenizer, filler=filler)


@pytest.mark.parametrize("wrong", [-1, 256])
def test_filler_of_another_vocabulary_is_refused(make_model, plain_tokenizer, wrong):
    """On a GPU such an id would end the process's use of the device."""
    filler = FILLER.astype(np.int64)
    filler[7] = wrong
    model = make_model(vocab_size=256, eval_max_seq_len=512)
    with pytest.raises(ValueError, match=r"filler holds ids .* the model knows 0 to 255"):
        PasskeyEvaluator(model, plain_tokenizer, filler=filler).evaluate([300], 1)


def test_prompts_of_different_lengths_or_none_are_refused(make_model, plain_tokenizer):
    evaluator = PasskeyEvaluator(make_model(vocab_size=256), plain_tokenizer)
    prompts = [evaluator.build_prompt(length) for length in (300, 301)]
    with pytest.raises(ValueError, match=r"one length, got 2 of \[300, 301\]"):
        evaluator.ask(prompts)
    with pytest.raises(ValueError, match="got 0"):
        evaluator.ask([])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (" 12345.", "12345"),
        ("the key is 00042, I think; not 99999", "00042"),
        ("123456", None),
        ("1234", None),
        ("", None),
        ("number 1 or 54321", "54321"),
        ("١٢٣٤٥", None),  # digits, but none that a passkey has
    ],
)
def test_the_first_five_digit_number_is_the_passkey(text, key):
    assert PasskeyEvaluator.extract_passkey_from_output(text) == key


# The figures


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # z² / (n + z²) = 3.8415 / 13.8415
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (95, 100, 0.8882, 0.9785),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_intervals(right, asked, low, high):
    assert wilson_interval(right, asked) == pytest.approx((low, high), abs=5e-5)


def test_more_right_answers_than_questions_are_refused():
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson_interval(3, 2)


def test_the_grid_and_the_json_say_the_same(tmp_path):
    trials = [
        Trial(length, depth, "12345", " 12345", right, 0.5)
        for length, depth, right in (
            (100, 0.1, True),
            (100, 0.9, False),
            (200, 0.1, True),
            (200, 0.9, True),
            (100, 0.1, True),
        )
    ]
    result = PasskeyResult(trials, {"seed": 1})
    assert result.accuracy() == {100: pytest.approx(2 / 3), 200: 1.0}
    assert result.grid() == [[1.0, 1.0], [0.0, 1.0]]  # depths down, lengths across
    result.save(tmp_path / "passkey.json")
    saved = json.loads((tmp_path / "passkey.json").read_text())
    assert saved["rows"][0]["trials"] == 3
    assert saved["rows"][0]["low95"] == pytest.approx(result.intervals()[100][0])
    assert [(c["length"], c["depth"], c["right"]) for c in saved["cells"]] == [
        (100, 0.1, 2),
        (100, 0.9, 0),
        (200, 0.1, 1),
        (200, 0.9, 1),
    ]
    assert len(saved["trials"]) == 5
