"""Retrieval examples: what is hidden is what is asked for, and nothing else changes."""

import contextlib
import re
from collections import Counter

import numpy as np
import pytest

from gptoss.data.loader import PretrainDataset
from gptoss.data.retrieval import (
    ANSWER,
    KEY_LINE,
    NAMES,
    QUESTION,
    RetrievalDataset,
    insert_retrieval,
    retrieval_words,
)
from gptoss.data.shards import ShardWriter
from gptoss.data.tokenizers import Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(retrieval_words(20), 600)


@pytest.fixture
def window(tokenizer):
    return np.array(tokenizer.encode("0123456789\n" * 100)[:1025])  # no letter in it


def read(tokenizer, ids):
    text = tokenizer.decode(ids)
    hidden = re.findall(r"\n# The passkey of (\w+) is (\d{5})\.\n", text)
    asked = re.findall(r"\nThe passkey of (\w+) is (\d{5})\.", text)
    return text, hidden, asked


@pytest.mark.parametrize(("n_keys", "n_questions"), [(1, 1), (8, 6), (3, 3), (30, 1)])
def test_each_answer_is_the_value_of_its_key_line(tokenizer, window, n_keys, n_questions):
    for seed in range(10):
        out = insert_retrieval(window, np.random.default_rng(seed), tokenizer, n_keys, n_questions)
        _, hidden, asked = read(tokenizer, out)
        assert out.shape == window.shape
        assert out.dtype == np.int64
        assert len(hidden) == len({name for name, _ in hidden}) == n_keys
        assert len({key for _, key in hidden}) == n_keys
        assert len(asked) == len(set(asked)) == n_questions
        assert all(dict(hidden)[name] == key for name, key in asked)


def test_keys_are_asked_for_in_any_order(tokenizer, window):
    places = Counter()
    for seed in range(100):
        out = insert_retrieval(window, np.random.default_rng(seed), tokenizer, 4, 2)
        _, hidden, asked = read(tokenizer, out)
        places[tuple(hidden.index(one) for one in asked)] += 1
    assert (
        len(places) == 12
    )  # every ordered pair of 4; one is missing with probability 12·(11/12)^100 = 0.002


def test_the_text_between_the_lines_is_the_windows_own(tokenizer, window):
    before = window.copy()
    out = insert_retrieval(window, np.random.default_rng(1), tokenizer, 4, 2)
    text, _, _ = read(tokenizer, out)
    body = re.sub(r"\n# The passkey of \w+ is \d{5}\.\n", "", text)
    body = re.sub(r"\nThe passkey of \w+ is \d{5}\.", "", body)
    assert tokenizer.decode(window).startswith(body)
    assert (window == before).all()


def test_questions_close_the_window(tokenizer, window):
    out = insert_retrieval(window, np.random.default_rng(2), tokenizer, 4, 2)
    question = r"\nThe passkey of \w+ is \d{5}\."
    assert re.search(f"({question}){{2}}$", tokenizer.decode(out))


def test_the_question_does_not_hold_the_answer():
    assert "{key}" not in QUESTION
    assert "{name}" not in ANSWER
    assert not re.search(r"\d", QUESTION + ANSWER + KEY_LINE)


def test_keys_cover_the_whole_window_evenly(tokenizer, window):
    places = []
    for seed in range(200):
        out = insert_retrieval(window, np.random.default_rng(seed), tokenizer, 5, 1)
        stretches = re.split(r"\n# The passkey of \w+ is \d{5}\.\n", tokenizer.decode(out))
        stretches[-1] = re.sub(r"\nThe passkey.*", "", stretches[-1])
        ends = np.cumsum([len(stretch) for stretch in stretches])  # one token a character
        places.append(ends[:-1] / ends[-1])
    fifths = 5 * np.array(places) - np.arange(5)
    assert fifths.min() > -0.05  # the i-th key stands in the i-th fifth, but for rounding
    assert fifths.max() < 1.05
    # uniform there: the mean of 200 has standard deviation 0.02
    assert np.abs(fifths.mean(axis=0) - 0.5).max() < 0.1


def test_every_name_and_digit_is_asked_for(tokenizer, window):
    names, digits = Counter(), Counter()
    for seed in range(200):
        _, _, asked = read(
            tokenizer, insert_retrieval(window, np.random.default_rng(seed), tokenizer, 8, 6)
        )
        for name, key in asked:
            names[name] += 1
            digits.update(key)
    assert set(names) == set(NAMES)
    # 6000 digits: 600 each, standard deviation 23
    assert all(480 < digits[d] < 720 for d in "0123456789")


def test_near_misses_share_the_name_but_not_the_number(tokenizer, window):
    for seed in range(20):
        out = insert_retrieval(window, np.random.default_rng(seed), tokenizer, 1, 1, 3)
        text, hidden, asked = read(tokenizer, out)
        ((name, key),) = hidden
        assert asked == hidden
        misses = [
            m
            for m in re.findall(r"\n# ([^\n]*\d{5}[^\n]*)\n", text)
            if not m.startswith("The passkey")
        ]
        assert len(misses) == 3
        assert all(name in miss and key not in miss for miss in misses)


def test_the_same_chance_gives_the_same_window(tokenizer, window):
    a, b, c = (
        insert_retrieval(window, np.random.default_rng(s), tokenizer, 4, 2) for s in (1, 1, 2)
    )
    assert (a == b).all()
    assert (a != c).any()


@pytest.mark.parametrize(
    ("n_keys", "n_questions", "n_near_misses"), [(0, 0, 0), (2, 3, 0), (51, 1, 0), (2, 1, -1)]
)
def test_counts_out_of_range_are_refused(tokenizer, window, n_keys, n_questions, n_near_misses):
    with pytest.raises(ValueError, match=r"n_keys|n_near_misses"):
        insert_retrieval(
            window, np.random.default_rng(0), tokenizer, n_keys, n_questions, n_near_misses
        )


def test_a_window_too_short_for_its_lines_is_refused(tokenizer, window):
    with pytest.raises(ValueError, match="a window of 100 tokens is too short for 8 keys"):
        insert_retrieval(window[:100], np.random.default_rng(0), tokenizer, 8, 6)


def test_the_tokenizers_sample_text_makes_each_name_one_token():
    tokenizer = train_tokenizer([*retrieval_words(), "def f(x):\n    return x\n" * 50], 1024)
    for name in NAMES:
        assert len(tokenizer.encode(f" {name}")) == 1
    # so every key line, question and answer is as long as every other
    assert len({len(tokenizer.encode(QUESTION.format(name=name))) for name in NAMES}) == 1
    assert len(tokenizer.encode(ANSWER.format(key="01234"))) == 7  # space, five digits, full stop


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("shards")
    with ShardWriter(
        directory, vocab_size=600, eos_token_id=0, tokenizer_sha256=tokenizer.sha256
    ) as writer:
        writer.write(tokenizer.encode("0123456789\n" * 2000))
    return PretrainDataset(directory, 500)


def test_the_share_of_windows_is_the_one_asked_for(dataset, tokenizer):
    mixed = RetrievalDataset(dataset, tokenizer, 0.25, 2, 1)
    filled = [(mixed.sequence_at(3, p) != dataset.sequence_at(3, p)).any() for p in range(400)]
    # binomial(400, 1/4): mean 100, standard deviation 8.7
    assert 65 < sum(filled) < 135


def test_share_zero_is_the_dataset_and_share_one_is_all(dataset, tokenizer):
    none, every = (RetrievalDataset(dataset, tokenizer, share, 2, 1) for share in (0.0, 1.0))
    for p in range(10):
        assert (none.sequence_at(3, p) == dataset.sequence_at(3, p)).all()
        assert (every.sequence_at(3, p) != dataset.sequence_at(3, p)).any()


def test_a_window_that_comes_back_has_fresh_keys(dataset, tokenizer):
    alone = PretrainDataset(dataset.data_path, dataset.manifest.total_tokens - 1)
    assert len(alone) == 1
    every = RetrievalDataset(alone, tokenizer, 1.0, 2, 1)
    epochs = [read(tokenizer, every.sequence_at(3, p))[1] for p in range(5)]
    assert len({tuple(hidden) for hidden in epochs}) == 5
    assert read(tokenizer, every.sequence_at(3, 2))[1] == epochs[2]


def test_a_tokenizer_that_did_not_write_the_shards_is_refused(dataset):
    with pytest.raises(ValueError, match="was written with another tokenizer"):
        RetrievalDataset(dataset, train_tokenizer(["other text"], 300), 0.5)


class Pieces:
    """A tokenizer whose tokens are the matches of a pattern."""

    sha256 = ""

    def __init__(self, pattern):
        self.pattern = re.compile(pattern, re.DOTALL)

    def encode(self, text):
        return [ord(piece[0]) for piece in self.pattern.findall(text)]


def shortest_accepted(directory, tokenizer):
    """RetrievalDataset with 4 keys, 3 questions and 2 near misses in a window without a token to spare."""
    with ShardWriter(directory, vocab_size=256, eos_token_id=0) as writer:
        writer.write([1] * 5000)
    for length in range(50, 900):
        with contextlib.suppress(ValueError):
            return RetrievalDataset(PretrainDataset(directory, length), tokenizer, 1.0, 4, 3, 2)
    raise AssertionError("no window was long enough")


@pytest.mark.parametrize("pattern", [r"[a-m]+|.", r"[a-m]+|[0-7]+|."])
def test_a_window_that_is_accepted_holds_every_draw(tmp_path, pattern):
    """Names differ in tokens, and so do numbers where one token may hold several digits."""
    mixed = shortest_accepted(tmp_path, Pieces(pattern))
    for position in range(1000):
        assert mixed.sequence_at(0, position).shape == (mixed.max_seq_len + 1,)


def test_no_window_is_refused_that_would_hold_every_draw(tmp_path):
    """Each line takes 1 + 5 + 1 tokens, each question 1: 4·7 + 2·7 + 3·(1 + 7), and a token of text a key make 70."""
    assert shortest_accepted(tmp_path, Pieces(r"\d|\D+")).max_seq_len + 1 == 70


def test_windows_too_short_are_refused_before_training(dataset, tokenizer, tmp_path):
    short = PretrainDataset(dataset.data_path, 60)
    with pytest.raises(ValueError, match="too short for 8 keys"):
        RetrievalDataset(short, tokenizer, 0.1)
    with pytest.raises(ValueError, match=r"share = 1\.5"):
        RetrievalDataset(dataset, tokenizer, 1.5)
