"""Retrieval examples: named keys hidden in ordinary text, asked for at the end (chapter 16).

A language model learns to fetch a fact from far back only if its text rewards that. A window of training tokens gets a
few key lines at random places and questions with answers at its end; the length stays. The passkey evaluator asks in
exactly these words, so the templates live here.

Three choices make the skill carry to one key in a far longer text. Several keys stand in each window, so the model has
to match the name and cannot fetch whatever number is near. Keys are spread evenly over the window, so every distance is
trained. Near misses (same name, other sentence) reward a large margin between the right line and all else, which is
what survives when the number of competing positions grows from 4,096 to 131,072.
"""

import re
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from gptoss.data.loader import PretrainDataset
from gptoss.data.order import mix
from gptoss.data.tokenizers import Tokenizer

KEY_LINE = "\n# The passkey of {name} is {key}.\n"
QUESTION = "\nThe passkey of {name} is"
ANSWER = " {key}."
NEAR_MISSES = (
    "\n# The old number of {name} was {key}.\n",
    "\n# The price of {name} is {key}.\n",
    "\n# {name} has {key} lines.\n",
)
KEY_DIGITS = 5
NAMES = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jade"),
    *("karst", "lotus", "maple", "north", "ocean", "pearl", "quartz", "raven", "slate", "tulip"),
    *("umber", "velvet", "willow", "xenon", "yarrow", "zephyr", "acorn", "basil", "coral", "dune"),
    *("falcon", "garnet", "hazel", "indigo", "juniper", "kelp", "lilac", "moss", "nectar", "olive"),
    *("pine", "quill", "ruby", "sage", "thyme", "urchin", "violet", "walnut", "yucca", "zinnia"),
)


class Encoder(Protocol):
    """The one method of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


def insert_retrieval(
    tokens: np.ndarray,
    rng: np.random.Generator,
    tokenizer: Encoder,
    n_keys: int = 8,
    n_questions: int = 6,
    n_near_misses: int = 0,
) -> np.ndarray:
    """Hide key lines in a window and ask for some of them at its end.

    The text part of the window is cut to make room, divided into n_keys equal stretches, and one key line goes to a
    random place of each; near misses go anywhere. Questions come last, in random order, each with its answer.

    Args:
        tokens: (T+1,) integers, a window of ordinary text; not changed.
        rng: the only source of chance.
        tokenizer: encodes the lines; question and answer are encoded apart, as the evaluator's prompt is.
        n_keys: keys with different names and different values.
        n_questions: how many of them are asked for.
        n_near_misses: lines that name a hidden key's name in another sentence with another number.

    Returns:
        (T+1,) int64.

    Raises:
        ValueError: counts out of range, or a window too short for its lines.

    Source: Mohtashami and Jaggi 2023, section 4.2, with named keys; chapter 16.
    """
    _check_counts(n_keys, n_questions, n_near_misses)
    names = [NAMES[i] for i in rng.choice(len(NAMES), size=n_keys, replace=False)]
    values = rng.choice(10**KEY_DIGITS, size=n_keys + n_near_misses, replace=False)
    keys = [f"{int(value):0{KEY_DIGITS}d}" for value in values]

    lines = [
        tokenizer.encode(KEY_LINE.format(name=name, key=key))
        for name, key in zip(names, keys, strict=False)
    ]
    for key in keys[n_keys:]:
        template = NEAR_MISSES[int(rng.integers(len(NEAR_MISSES)))]
        name = names[int(rng.integers(n_keys))]
        lines.append(tokenizer.encode(template.format(name=name, key=key)))
    questions: list[int] = []
    for i in rng.permutation(n_keys)[:n_questions]:
        questions += tokenizer.encode(QUESTION.format(name=names[i]))
        questions += tokenizer.encode(ANSWER.format(key=keys[i]))

    taken = sum(map(len, lines)) + len(questions)
    _check_room(len(tokens), taken, n_keys, n_questions, n_near_misses)
    body = len(tokens) - taken
    places = (np.arange(n_keys) + rng.random(n_keys)) * body / n_keys
    places = np.concatenate([places, rng.random(n_near_misses) * body]).astype(np.int64)
    pieces: list[np.ndarray | list[int]] = []
    at = 0
    for i in np.argsort(places, kind="stable"):
        pieces += [tokens[at : places[i]], lines[i]]
        at = int(places[i])
    pieces += [tokens[at:body], questions]
    return np.concatenate(pieces).astype(np.int64, copy=False)


def longest_insertion(
    tokenizer: Encoder, n_keys: int = 8, n_questions: int = 6, n_near_misses: int = 0
) -> int:
    """The most tokens that the lines and questions of one window can take, whatever names and numbers are drawn.

    A line is as long as with one digit, and each further digit adds a token at most.

    Args:
        tokenizer, n_keys, n_questions, n_near_misses: as `insert_retrieval`.

    Raises:
        ValueError: counts out of range.

    Source: chapter 16.
    """
    _check_counts(n_keys, n_questions, n_near_misses)

    def longest(template: str, name: str = "") -> int:
        encoded = (
            tokenizer.encode(template.format(name=name, key=digit)) for digit in "0123456789"
        )
        return max(map(len, encoded)) + KEY_DIGITS - 1

    key_lines = sorted(longest(KEY_LINE, name) for name in NAMES)
    near_misses = max(longest(template, name) for template in NEAR_MISSES for name in NAMES)
    questions = sorted(len(tokenizer.encode(QUESTION.format(name=name))) for name in NAMES)
    return (
        sum(key_lines[-n_keys:])
        + n_near_misses * near_misses
        + sum(questions[-n_questions:])
        + n_questions * longest(ANSWER)
    )


def _check_counts(n_keys: int, n_questions: int, n_near_misses: int) -> None:
    if not 1 <= n_questions <= n_keys <= len(NAMES):
        raise ValueError(
            f"n_keys = {n_keys}, n_questions = {n_questions}: expected 1 <= n_questions <= n_keys <= {len(NAMES)}"
        )
    if not 0 <= n_near_misses <= 10**KEY_DIGITS - n_keys:
        raise ValueError(
            f"n_near_misses = {n_near_misses}: must lie in [0, {10**KEY_DIGITS - n_keys}], each has its own number"
        )


def _check_room(window: int, taken: int, n_keys: int, n_questions: int, n_near_misses: int) -> None:
    if window - taken < n_keys:
        raise ValueError(
            f"a window of {window} tokens is too short for {n_keys} keys, {n_near_misses} near misses and "
            f"{n_questions} questions ({taken} tokens); lower retrieval_keys or lengthen max_seq_len"
        )


class RetrievalDataset:
    """A dataset whose share of windows carry retrieval examples, chosen and filled by (seed, position).

    The position counts over epochs, so a window that comes back has other keys, or none.

    Args:
        dataset: the ordinary windows.
        tokenizer: the one that the shards were written with.
        share: of the windows, in [0, 1].
        n_keys, n_questions, n_near_misses: as `insert_retrieval`.

    Raises:
        ValueError: share outside [0, 1], counts out of range, windows too short for the longest lines that can be drawn,
            or a tokenizer that is not the shards' own.

    Source: chapter 16.
    """

    def __init__(
        self,
        dataset: PretrainDataset,
        tokenizer: Tokenizer,
        share: float,
        n_keys: int = 8,
        n_questions: int = 6,
        n_near_misses: int = 0,
    ):
        if not 0 <= share <= 1:
            raise ValueError(f"share = {share}: must lie in [0, 1]")
        written_with = dataset.manifest.tokenizer_sha256
        if written_with and written_with != tokenizer.sha256:
            raise ValueError(
                f"{dataset.data_path} was written with another tokenizer (sha256 {written_with[:12]}...) than the "
                f"given one ({tokenizer.sha256[:12]}...); give the tokenizer.json beside the shards"
            )
        self.dataset, self.tokenizer, self.share = dataset, tokenizer, share
        self.n_keys, self.n_questions, self.n_near_misses = n_keys, n_questions, n_near_misses
        self.max_seq_len = dataset.max_seq_len
        if share > 0:  # a window that is too short shows now, not in a worker later
            counts = n_keys, n_questions, n_near_misses
            _check_room(self.max_seq_len + 1, longest_insertion(tokenizer, *counts), *counts)

    def __len__(self) -> int:
        return len(self.dataset)

    def sequence_at(self, seed: int, position: int) -> np.ndarray:
        """The (T+1,) int64 tokens that a run with this seed reads at a position."""
        tokens = self.dataset.sequence_at(seed, position)
        rng = np.random.default_rng(mix(mix(seed) + position))
        if rng.random() >= self.share:
            return tokens
        counts = self.n_keys, self.n_questions, self.n_near_misses
        return insert_retrieval(tokens, rng, self.tokenizer, *counts)


def retrieval_words(repeats: int = 4000) -> Iterator[str]:
    """Text for a tokenizer's training in which the lines' words are frequent, so that each becomes one token.

    A name of one token is matched by one head; a name in pieces first has to be put together. At rank 4,096 of the
    merges a pair occurs some hundred times in 64 MiB of code, so 4,000 are enough.
    """
    for word in (*NAMES, *re.findall(r"[a-z]{3,}", KEY_LINE.format(name="", key=""))):
        yield f" {word}" * repeats
