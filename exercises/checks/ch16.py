"""Checks of chapter 16: a key in 128,000 tokens.

Shapes: B batch, T queries, S keys, H query heads, V vocabulary, A answer tokens.
"""

import math

import torch
from torch import Tensor

from gptoss.inference.accuracy import wilson_interval

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "16_passkey"


# 1. Hide a line --------------------------------------------------------------------------------------------------------


def _hide(
    text: Tensor,
    line: Tensor,
    question: Tensor,
    n_answer: int,
    length: int,
    depth: float,
) -> Tensor:
    m = length - len(line) - len(question) - n_answer
    place = round(depth * m)
    return torch.cat((text[:place], line, text[place:m], question))


def _hide_by_loop(
    text: Tensor, line: Tensor, question: Tensor, n_answer: int, length: int, depth: float
) -> Tensor:
    ids = text[: length - n_answer - len(question) - len(line)].tolist()
    place = round(depth * len(ids))
    ids[place:place] = line.tolist()
    return torch.tensor(ids + question.tolist())


def _hide_without_answer(
    text: Tensor, line: Tensor, question: Tensor, n_answer: int, length: int, depth: float
) -> Tensor:
    return _hide(text, line, question, 0, length, depth)


def _hide_by_length(
    text: Tensor, line: Tensor, question: Tensor, n_answer: int, length: int, depth: float
) -> Tensor:
    m = length - len(line) - len(question) - n_answer
    place = min(round(depth * length), m)
    return torch.cat((text[:place], line, text[place:m], question))


def _hide_rounded_down(
    text: Tensor, line: Tensor, question: Tensor, n_answer: int, length: int, depth: float
) -> Tensor:
    m = length - len(line) - len(question) - n_answer
    place = int(depth * m)
    return torch.cat((text[:place], line, text[place:m], question))


def _hide_over_text(
    text: Tensor, line: Tensor, question: Tensor, n_answer: int, length: int, depth: float
) -> Tensor:
    m = length - len(line) - len(question) - n_answer
    place = round(depth * m)
    return torch.cat((text[:place], line, text[place + len(line) : m + len(line)], question))


def _prompt(
    label: str, n: int, line: int, question: int, answer: int, length: int, depth: float
) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor, int, int, float]:
        ids = torch.arange(n), 1000 + torch.arange(line), 2000 + torch.arange(question)
        return *ids, answer, length, depth

    return Trial(label, make)


check_hide_line = Exercise(
    function="hide_line",
    title="Hide a line",
    dots=1,
    minutes=10,
    reference=_hide,
    trials=(
        _prompt("60 tokens, depth 0.5", 100, 5, 4, 3, 60, 0.5),
        _prompt("depth 0: the line comes first", 100, 5, 4, 3, 60, 0.0),
        _prompt("depth 1: the line stands before the question", 100, 5, 4, 3, 60, 1.0),
        _prompt("68 tokens, depth 0.35", 200, 14, 6, 6, 68, 0.35),
        _prompt("no filler at all", 100, 5, 4, 3, 12, 0.5),
    ),
    mistakes=(
        Mistake(
            "answer not counted",
            "the prompt is as long as prompt and answer should be together. The answer's tokens need their place too.",
            _hide_without_answer,
        ),
        Mistake(
            "depth of the whole",
            "depth is a share of the filler, not of the length: at depth 1 all of the filler stands before the line.",
            _hide_by_length,
        ),
        Mistake(
            "filler overwritten",
            "the line was put over the filler, so that some of its tokens are missing. It goes in between.",
            _hide_over_text,
        ),
        Mistake(
            "rounded down",
            "the line stands one token too early: 14.7 tokens of filler before it are 15, and int(14.7) is 14.",
            _hide_rounded_down,
        ),
    ),
    alternatives=(_hide_by_loop,),
    hints=(
        "How many filler tokens fit? All the other pieces have known lengths.",
        "m = length − len(line) − len(question) − n_answer.",
        "torch.cat of four pieces: filler, line, the rest of the m filler tokens, question.",
    ),
)


# 2. Read a greedy answer off one pass ----------------------------------------------------------------------------------


def _agreement(logits: Tensor, answer: Tensor) -> Tensor:
    best = logits[:, -answer.shape[1] :].argmax(dim=-1)
    return (best == answer).long().cumprod(dim=1).sum(dim=1)


def _agreement_by_loop(logits: Tensor, answer: Tensor) -> Tensor:
    counts = []
    for row, right in zip(logits[:, -answer.shape[1] :].argmax(-1).tolist(), answer, strict=True):
        n = 0
        for said, token in zip(row, right.tolist(), strict=True):
            if said != token:
                break
            n += 1
        counts.append(n)
    return torch.tensor(counts)


def _agreement_anywhere(logits: Tensor, answer: Tensor) -> Tensor:
    return (logits[:, -answer.shape[1] :].argmax(dim=-1) == answer).long().sum(dim=1)


def _agreement_all_or_none(logits: Tensor, answer: Tensor) -> Tensor:
    A = answer.shape[1]
    return A * (logits[:, -A:].argmax(dim=-1) == answer).all(dim=1).long()


def _agreement_shifted(logits: Tensor, answer: Tensor) -> Tensor:
    A = answer.shape[1]
    best = logits[:, -A - 1 : -1].argmax(dim=-1)
    return (best == answer).long().cumprod(dim=1).sum(dim=1)


def _answers(label: str, wrong: list[list[int]], A: int, T: int, V: int, seed: int) -> Trial:
    """Logits whose argmax is the answer but at the places listed, one list a row."""

    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        answer = torch.randint(0, V, (len(wrong), A), generator=generator)
        logits = torch.randn(len(wrong), T, V, generator=generator)
        said = answer.clone()
        for row, places in enumerate(wrong):
            for place in places:
                said[row, place] = (said[row, place] + 1) % V
        logits[:, -A:].scatter_(2, said[..., None], 20.0)
        return logits, answer

    return Trial(label, make)


check_greedy_agreement = Exercise(
    function="greedy_agreement",
    title="Read a greedy answer off one pass",
    dots=2,
    minutes=15,
    reference=_agreement,
    trials=(
        _answers("one right answer, one with its third token wrong", [[], [2]], 6, 12, 11, 0),
        _answers("wrong at once, right afterwards", [[0], [0, 3], []], 6, 15, 11, 1),
        _answers("only the last token is wrong", [[4], [1, 4]], 5, 9, 7, 2),
        _answers("answers of one token", [[], [0]], 1, 8, 5, 3),
        _answers("a prompt of one token", [[1], []], 4, 4, 9, 4),
    ),
    mistakes=(
        Mistake(
            "counted anywhere",
            "tokens after the first wrong one were counted. Decoding stands before another text there.",
            _agreement_anywhere,
        ),
        Mistake(
            "all or nothing",
            "an answer that goes wrong late was given 0. Count what came before its first wrong token.",
            _agreement_all_or_none,
        ),
        Mistake(
            "shifted",
            "the logits are off by one place. The last position predicts the answer's last token.",
            _agreement_shifted,
        ),
    ),
    alternatives=(_agreement_by_loop,),
    hints=(
        "Which positions of the logits predict the A tokens of the answer?",
        "The last A. Compare their argmax with the answer: (B, A) of True and False.",
        "A running product of 1s and 0s stays 0 after the first 0.",
    ),
)


# 3. The interval -------------------------------------------------------------------------------------------------------


def _interval(right: int, n: int, z: float) -> tuple[float, float]:
    return wilson_interval(right, n, z)


def _interval_from_parabola(right: int, n: int, z: float) -> tuple[float, float]:
    a, b, c = 1 + z * z / n, -(2 * right / n + z * z / n), (right / n) ** 2
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def _interval_textbook(right: int, n: int, z: float) -> tuple[float, float]:
    p = right / n
    half = z * math.sqrt(p * (1 - p) / n)
    return p - half, p + half


def _interval_around_share(right: int, n: int, z: float) -> tuple[float, float]:
    p = right / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return p - half, p + half


def _interval_not_divided(right: int, n: int, z: float) -> tuple[float, float]:
    p = right / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return p + z * z / (2 * n) - half, p + z * z / (2 * n) + half


def _counts(right: int, n: int, z: float = 1.96) -> Trial:
    return Trial(f"{right} of {n}, z = {z}", lambda: (right, n, z))


check_interval = Exercise(
    function="interval",
    title="The interval",
    dots=1,
    minutes=10,
    reference=_interval,
    trials=(
        _counts(15, 20),
        _counts(20, 20),
        _counts(1, 20),
        _counts(100, 100),
        _counts(1, 1),
        _counts(37, 100, 2.576),
    ),
    mistakes=(
        Mistake(
            "the textbook's",
            "this interval has no width when all answers are right. Leave p under the root and solve for it.",
            _interval_textbook,
        ),
        Mistake(
            "centred on the share",
            "the middle of the interval is not the measured share: it is drawn towards one half.",
            _interval_around_share,
        ),
        Mistake(
            "not divided",
            "the ends reach beyond 1. The parabola's leading coefficient, 1 + z²/n, is missing.",
            _interval_not_divided,
        ),
    ),
    alternatives=(_interval_from_parabola,),
    hints=(
        "The ends are the zeros of a parabola in p.",
        "Its coefficients are 1 + z²/n, −(2·share + z²/n) and share².",
        "Equation (16.5), with both signs of the root.",
    ),
)


# 4. How many questions? ------------------------------------------------------------------------------------------------


def _needed(share: float, wrong: int, z: float) -> int:
    n = wrong + 1
    while wilson_interval(n - wrong, n, z)[0] < share - 1e-12:
        n += 1
    return n


def _needed_by_halving(share: float, wrong: int, z: float) -> int:
    def enough(n: int) -> bool:
        return wilson_interval(n - wrong, n, z)[0] >= share - 1e-12

    low, high = wrong, 2 * wrong + 2  # not enough, enough
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _needed_all_right(share: float, wrong: int, z: float) -> int:
    return _needed(share, 0, z)


def _needed_as_measured(share: float, wrong: int, z: float) -> int:
    n = wrong + 1
    while (n - wrong) / n < share:
        n += 1
    return n


def _needed_textbook(share: float, wrong: int, z: float) -> int:
    n = wrong + 1
    while _interval_textbook(n - wrong, n, z)[0] < share:
        n += 1
    return n


def _needed_one_short(share: float, wrong: int, z: float) -> int:
    return _needed(share, wrong, z) - 1


def _claim(share: float, wrong: int, z: float = 1.96) -> Trial:
    return Trial(f"a share of {share:.0%}, {wrong} wrong, z = {z}", lambda: (share, wrong, z))


check_questions_needed = Exercise(
    function="questions_needed",
    title="How many questions?",
    dots=2,
    minutes=15,
    reference=_needed,
    trials=(
        _claim(0.85, 0),
        _claim(0.85, 1),
        _claim(0.95, 3),
        _claim(0.99, 0),
        _claim(0.5, 2),
        _claim(0.9, 0, 2.576),
    ),
    mistakes=(
        Mistake(
            "wrong answers forgotten",
            "the wrong answers made no difference. With n questions n − wrong are right.",
            _needed_all_right,
        ),
        Mistake(
            "the measured share",
            "the measured share reaches the claim, the interval's lower end does not yet.",
            _needed_as_measured,
        ),
        Mistake(
            "the textbook's interval",
            "one question is enough with an interval that has no width. Use Wilson's.",
            _needed_textbook,
        ),
        Mistake(
            "one short",
            "one question too few: with this n the interval still begins below the claim.",
            _needed_one_short,
        ),
    ),
    alternatives=(_needed_by_halving,),
    hints=(
        "Without wrong answers there is a formula; with them a search is simplest.",
        "The lower end of the interval grows with n when `wrong` stays. Start at wrong + 1.",
        "Your function of exercise 3 gives the lower end.",
    ),
)


# 5. A crowd without a longer text --------------------------------------------------------------------------------------


def _crowded(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    scores = scores + torch.where(filler, math.log(crowd), 0.0)
    total = torch.logaddexp(scores.logsumexp(dim=-1), b)
    return torch.exp(scores[:, ~filler] - total[:, None]).sum(dim=-1)


def _crowded_by_copies(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    copies = scores[:, filler].repeat(1, int(crowd))  # (H, crowd · filler)
    logits = torch.cat((scores[:, ~filler], copies, b[:, None]), dim=-1)
    return torch.softmax(logits, dim=-1)[:, : int((~filler).sum())].sum(dim=-1)


def _crowded_times(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    scores = scores * torch.where(filler, float(crowd), 1.0)
    total = torch.logaddexp(scores.logsumexp(dim=-1), b)
    return torch.exp(scores[:, ~filler] - total[:, None]).sum(dim=-1)


def _crowded_keys(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    scores = scores + math.log(crowd)
    total = torch.logaddexp(scores.logsumexp(dim=-1), b)
    return torch.exp(scores[:, ~filler] - total[:, None]).sum(dim=-1)


def _crowded_without_sink(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    return _crowded(scores, filler, crowd, torch.full_like(b, -torch.inf))


def _crowded_sink_too(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    return _crowded(scores, filler, crowd, b + math.log(crowd))


def _crowded_no_maximum(scores: Tensor, filler: Tensor, crowd: float, b: Tensor) -> Tensor:
    e = torch.exp(scores) * torch.where(filler, float(crowd), 1.0)
    return e[:, ~filler].sum(dim=-1) / (e.sum(dim=-1) + b.exp())


def _crowd(label: str, H: int, S: int, line: slice, crowd: int, shift: float, seed: int) -> Trial:
    def make() -> tuple[Tensor, Tensor, int, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(H, S, generator=generator) + shift
        filler = torch.ones(S, dtype=torch.bool)
        filler[line] = False
        scores[:, line] += 2
        b = torch.randn(H, generator=generator) + shift + 1
        return scores, filler, crowd, b

    return Trial(label, make)


check_share_in_crowd = Exercise(
    function="share_in_crowd",
    title="A crowd without a longer text",
    dots=3,
    minutes=20,
    reference=_crowded,
    trials=(
        _crowd("3 heads, 20 keys, 4 of a line, 8 times the filler", 3, 20, slice(5, 9), 8, 0.0, 0),
        _crowd("the line comes last", 2, 15, slice(12, 15), 32, 0.0, 1),
        _crowd("scores near 300", 2, 12, slice(0, 3), 4, 300.0, 2),
        _crowd("scores near −300", 2, 12, slice(4, 6), 4, -300.0, 3),
        _crowd("a crowd of 1", 1, 9, slice(3, 4), 1, 0.0, 4),
    ),
    mistakes=(
        Mistake(
            "scores multiplied",
            "the scores were multiplied. Copies multiply e^s, not s.",
            _crowded_times,
        ),
        Mistake(
            "the line copied too",
            "every key was copied, the line's as well. Only filler is.",
            _crowded_keys,
        ),
        Mistake(
            "no sink",
            "the sink takes no part. It is one more term of the denominator.",
            _crowded_without_sink,
        ),
        Mistake(
            "the sink copied too",
            "the sink was copied with the filler. It has one place, however long the text.",
            _crowded_sink_too,
        ),
        Mistake(
            "no maximum",
            "e^300 does not fit into float32. Stay with logarithms until the last step.",
            _crowded_no_maximum,
        ),
    ),
    alternatives=(_crowded_by_copies,),
    hints=(
        "A key that stands there c times contributes c·e^s to the denominator.",
        "c·e^s = e^(s + ln c).",
        "logsumexp over the changed scores, logaddexp with the sink, then exp of the difference.",
    ),
)
