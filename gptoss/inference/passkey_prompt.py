"""One passkey prompt of an exact length: filler, a key line at a chosen depth, distractors, a question (chapter 16).

All lengths are in the model's own tokens. Pieces are encoded apart and joined as ids, as the training examples are, so
that a length is exact and no merge reaches across an edge. The question names the key and never contains its number.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from gptoss.data.retrieval import ANSWER, KEY_DIGITS, KEY_LINE, NAMES, NEAR_MISSES, QUESTION

from .text import Tokenizer, encode_text

# The filler of Mohtashami and Jaggi (2023), section 4.2.
REPEATED_SENTENCE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)


@dataclass(frozen=True)
class PasskeyPrompt:
    """A prompt and what has to follow it.

    `ids` (n,) is what the model reads; `answer_ids` are the tokens of the answer, a space and the digits; prompt and
    answer together have `length` tokens. `depth` is the key line's place in the filler, 0 first and 1 last.
    """

    ids: Int[Tensor, "n"]
    answer_ids: list[int]
    key: str
    name: str
    depth: float
    length: int


def build_passkey_prompt(
    tokenizer: Tokenizer,
    length: int,
    depth: float,
    rng: random.Random,
    *,
    key: str | None = None,
    filler: Int[np.ndarray, "n"] | None = None,
    n_distractors: int = 0,
    n_near_misses: int = 0,
    key_line: str = KEY_LINE,
    question: str = QUESTION,
    answer: str = ANSWER,
) -> PasskeyPrompt:
    """Build one prompt.

    Args:
        tokenizer: the model's.
        length: of prompt and answer together (the model's tokens).
        depth: where in the filler the key line stands, in [0, 1].
        rng: draws the name, the key, the filler's start and the distractors' places.
        key: the number to hide; None draws one of KEY_DIGITS digits.
        filler: (n,) ids of a held-out text of which a stretch is cut; None repeats the classic sentence.
        n_distractors: key lines with other names and other numbers, at random places.
        n_near_misses: lines with the same name, another sentence and another number, at random places.
        key_line, question, answer: templates; `{name}` and `{key}` are filled in.

    Returns:
        The prompt.

    Raises:
        ValueError: depth outside [0, 1], a length too short for the lines, too little filler, more distractors than
            names or more lines than numbers, or a key that is not all digits.

    Source: Mohtashami and Jaggi 2023, section 4.2, without the number in the question; chapter 16.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie in [0, 1], got {depth}; 0 is the beginning")
    if not 0 <= n_distractors < len(NAMES):
        raise ValueError(f"n_distractors must lie in [0, {len(NAMES) - 1}], got {n_distractors}")
    most = 10**KEY_DIGITS - 1 - n_distractors
    if not 0 <= n_near_misses <= most:
        raise ValueError(
            f"n_near_misses must lie in [0, {most}], got {n_near_misses}: each line has its own number"
        )
    names = rng.sample(NAMES, 1 + n_distractors)
    numbers = _distinct_keys(rng, key, 1 + n_distractors + n_near_misses)
    lines = [
        key_line.format(name=n, key=k)
        for n, k in zip(names, numbers[: 1 + n_distractors], strict=True)
    ]
    lines += [
        rng.choice(NEAR_MISSES).format(name=names[0], key=number)
        for number in numbers[1 + n_distractors :]
    ]
    line_ids = [encode_text(tokenizer, line) for line in lines]
    question_ids = encode_text(tokenizer, question.format(name=names[0], key=numbers[0]))
    answer_text = answer[
        : answer.index("{key}") + len("{key}")
    ]  # a closing full stop is not asked for
    answer_ids = encode_text(tokenizer, answer_text.format(name=names[0], key=numbers[0]))

    fixed = sum(map(len, line_ids)) + len(question_ids) + len(answer_ids)
    if length < fixed:
        raise ValueError(
            f"a prompt of {length} tokens is too short for {len(lines)} lines, question and answer; "
            f"they need {fixed}"
        )
    text = _filler(tokenizer, filler, length - fixed, rng)  # (m,)
    places = [round(depth * len(text))] + [rng.randint(0, len(text)) for _ in lines[1:]]
    pieces: list[np.ndarray | list[int]] = []
    start = 0
    for place, ids in sorted(zip(places, line_ids, strict=True), key=lambda line: line[0]):
        pieces += [text[start:place], ids]
        start = place
    pieces += [text[start:], question_ids]
    joined = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    return PasskeyPrompt(torch.from_numpy(joined), answer_ids, numbers[0], names[0], depth, length)


def _distinct_keys(rng: random.Random, key: str | None, count: int) -> list[str]:
    """`count` different numbers, the first of them `key` if it is given."""
    if key is not None and not (key.isascii() and key.isdigit()):
        raise ValueError(f"a passkey is made of digits, got {key!r}")
    keys = {} if key is None else {key: None}  # a dict keeps the order and finds a number at once
    while len(keys) < count:
        keys[f"{rng.randrange(10**KEY_DIGITS):0{KEY_DIGITS}d}"] = None
    return list(keys)


def _filler(
    tokenizer: Tokenizer, corpus: np.ndarray | None, count: int, rng: random.Random
) -> np.ndarray:
    """`count` ids of filler: a random stretch of the corpus, or the repeated sentence."""
    if corpus is None:
        sentence = np.asarray(encode_text(tokenizer, REPEATED_SENTENCE), dtype=np.int64)
        return np.resize(sentence, count)
    if len(corpus) < count:
        raise ValueError(
            f"the filler has {len(corpus)} tokens and {count} are needed; give a longer held-out text"
        )
    start = rng.randint(0, len(corpus) - count)
    return np.asarray(corpus[start : start + count]).astype(np.int64)
