"""What an exercise is, and how an answer to it is judged.

An answer is a function. It meets the package's own function on inputs that catch shortcuts: same outputs, same
gradients, inputs left alone. An answer that differs is held against answers that are known to be wrong; the one that
it agrees with on every input names the likely mistake.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .margins import with_margins

# Both sides compute in the same dtype with sums in a different order: a few hundred roundings of 6e-8 or 1e-16.
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-8, 1e-10)}
TOO_LARGE = "is far too large."
NOT_WRITTEN = "is not written yet: fill in the cell above, run it, then run this cell again"


@dataclass(frozen=True)
class Trial:
    """One input that an answer is tried on.

    Args:
        label: what is special about it, in words that the reader sees: "6 query heads over 2 kv heads".
        make: returns the arguments, positional as a tuple. Called anew for each function, so it must be
            deterministic. Gradients are compared for each tensor that requires them.
    """

    label: str
    make: Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer.

    Args:
        name: for tests, for instance "LSE detached".
        hint: what is likely wrong, said to the reader; it does not give the solution away.
        answer: a function that makes the mistake.
    """

    name: str
    hint: str
    answer: Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    """What a check found: whether the answer is right, the words for the reader, the mistake that it looks like."""

    passed: bool
    message: str
    mistake: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a function did with one trial: numbers, gradients, or the error that stopped it.

    Args:
        values: its results.
        kind: the type of what it returned.
        line: of the function's own cell or file that the error came through; None when it came through none.
        gradients: of the arguments that require one, by name.
        error: what it raised, in the forward or in the backward pass.
        changed: places of the arguments that it changed.
        accumulated: names of the arguments into whose .grad its backward pass wrote.
    """

    values: tuple[Any, ...] = ()
    kind: type = tuple
    line: int | None = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None
    changed: tuple[int, ...] = ()
    accumulated: tuple[str, ...] = ()

    @property
    def trouble(self) -> tuple[Any, ...]:
        """What went wrong beside the numbers, in a form that two functions can share; empty when nothing did."""
        if self.error is not None:  # its words, without the function's own name in front of them
            return type(self.error), str(self.error).rpartition("() ")[2]
        return self.accumulated


@dataclass(frozen=True)
class Exercise:
    """One exercise of one chapter; calling it with an answer prints the verdict.

    Args:
        function: the name of the function that the reader writes.
        title: a few words.
        dots: difficulty, 1 to 3.
        minutes: an honest guess.
        reference: the package's function, brought to the signature that the exercise asks for.
        trials: inputs; the first is the plain one, the others catch shortcuts.
        mistakes: at least two known wrong answers with their hints.
        alternatives: at least one right answer that is written differently from the solution; tests use it.
        hints: given one at a time, on request, the last nearly says it.
        tolerances: relative and absolute, by dtype.
        margins: whether the answer is a kernel that may write outside its results; then margins lie around them.
    """

    function: str
    title: str
    dots: int
    minutes: int
    reference: Callable[..., Any]
    trials: tuple[Trial, ...]
    mistakes: tuple[Mistake, ...]
    alternatives: tuple[Callable[..., Any], ...]
    hints: tuple[str, ...]
    tolerances: Mapping[torch.dtype, tuple[float, float]] = field(
        default_factory=lambda: TOLERANCES
    )
    margins: bool = False

    def __call__(self, answer: Callable[..., Any], hint: int = 0) -> None:
        """Print whether an answer is right and, if not, what is likely wrong. Never raises.

        Args:
            answer: the reader's function.
            hint: 0 for none, 1 for the first hint, 2 for the second, …
        """
        print(self.judge(answer).message)
        if hint > 0:
            number = min(hint, len(self.hints))
            print(f"Hint {number} of {len(self.hints)}: {self.hints[number - 1]}")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments, as the reference has them."""
        return tuple(inspect.signature(self.reference).parameters)

    def judge(self, answer: Callable[..., Any]) -> Verdict:
        """Hold an answer against the reference on every trial.

        Args:
            answer: the reader's function.

        Returns:
            The verdict; it is the same whenever the answer is the same.
        """
        if not callable(answer):
            return self._fail(f"expects the function itself; got {type(answer).__name__}")
        if self.margins:
            answer = with_margins(answer)
        found = []
        for trial in self.trials:
            got = run(answer, trial, self.arguments)
            # the stub's own error is bare; PyTorch's NotImplementedError says something
            if isinstance(got.error, NotImplementedError) and not str(got.error):
                return self._fail(NOT_WRITTEN)
            difference = self.difference(got, run(self.reference, trial, self.arguments))
            found.append((trial, got, difference))
        wrong = [(trial, got, words) for trial, got, words in found if words]
        if not wrong:
            return Verdict(True, f"✓ {self.function}: right on all {len(self.trials)} inputs.")
        trial, _, words = wrong[0]
        tried = f"wrong on {len(wrong)} of {len(self.trials)} inputs, first on: {trial.label}."
        mistake = self._recognise([(trial, got) for trial, got, _ in found])
        advice = f"Likely: {mistake.hint}" if mistake else "For a hint run this check with hint=1."
        return self._fail(
            f"{tried}\n  {words}\n  {advice}", None if mistake is None else mistake.name
        )

    def difference(self, got: Outcome, want: Outcome) -> str:
        """What an outcome gets wrong, in one sentence; empty when it agrees."""
        if got.error is not None:
            return f"It stopped with {_words(got.error, got.line)}"
        if got.changed:
            return f"It changed its argument number {got.changed[0] + 1} in place; leave the inputs alone."
        if got.accumulated:
            return (
                f"The backward pass wrote into .grad of {got.accumulated[0]}, an argument: "
                "detach the saved tensors."
            )
        if got.kind is type(None):
            return "It returned nothing; is the return missing?"
        if got.kind is list and want.kind not in (list, tuple):
            asked = "tensor" if issubclass(want.kind, Tensor) else "number"
            return f"It returned a list; a {asked} is asked for."
        if len(got.values) != len(want.values):
            results = "result" if len(got.values) == 1 else "results"
            return f"It returned {len(got.values)} {results} instead of {len(want.values)}."
        several = len(want.values) > 1
        for place, (mine, theirs) in enumerate(zip(got.values, want.values, strict=True)):
            name = f"Result {place + 1}" if several else "The result"
            words = self._compare(mine, theirs)
            if words:
                return f"{name} {words}"
        for name, theirs in want.gradients.items():
            mine = got.gradients.get(name)
            words = "is missing." if mine is None else self._compare(mine, theirs)
            if words:
                return f"The result is right, but the gradient of {name} {words}"
        return ""

    def _compare(self, got: Any, want: Any) -> str:
        if isinstance(got, np.generic):
            got = got.item()
        if not isinstance(want, Tensor):
            return _compare_numbers(got, want)
        if want.ndim == 0:  # a number, or a tensor of one, is as good
            if _is_number(got) and want.is_floating_point():
                if isinstance(got, int) and abs(got) > sys.float_info.max:
                    return TOO_LARGE
                got = torch.tensor(got, dtype=want.dtype)
            if isinstance(got, Tensor) and got.shape == (1,):
                got = got[0]
        if not isinstance(got, Tensor):
            return f"is a {type(got).__name__}; a tensor is asked for."
        if got.shape != want.shape:
            return f"has shape {tuple(got.shape)}; expected {tuple(want.shape)}."
        if _is_whole(got) and _is_whole(want):  # int32 is as good as int64: the values count
            got = got.to(want.dtype)
        if got.dtype != want.dtype:
            return f"has dtype {got.dtype}; expected {want.dtype}."
        if got.isnan().any() and not want.isnan().any():
            return f"holds {int(got.isnan().sum())} NaN among its {got.numel()} numbers."
        relative, absolute = self.tolerances.get(want.dtype, (0.0, 0.0))
        if torch.allclose(got, want, rtol=relative, atol=absolute, equal_nan=True):
            return ""
        gap = (got.detach().double() - want.detach().double()).abs()
        index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
        at = f" at {index}" if index else ""
        return f"is off by up to {gap.max():.2g}{at}."

    def _recognise(self, found: list[tuple[Trial, Outcome]]) -> Mistake | None:
        """The first known mistake that agrees with the answer on every trial."""
        for mistake in self.mistakes:
            if all(
                not self.difference(got, run(mistake.answer, trial, self.arguments))
                for trial, got in found
            ):
                return mistake
        for mistake in self.mistakes:  # an error has no numbers to compare: kind and words will do
            outcomes = [(got, run(mistake.answer, trial, self.arguments)) for trial, got in found]
            if all(
                got.trouble == theirs.trouble and (got.trouble or not self.difference(got, theirs))
                for got, theirs in outcomes
            ):
                return mistake
        return None

    def _fail(self, words: str, mistake: str | None = None) -> Verdict:
        return Verdict(False, f"✗ {self.function}: {words}", mistake)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _compare_numbers(got: Any, want: float) -> str:
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if not _is_number(got):
        return f"is a {type(got).__name__}; a number is asked for."
    try:
        close = abs(got - want) <= 1e-6 * abs(want)
        return "" if close else f"is {got:,.6g}, not the right number."
    except OverflowError:  # Python's whole numbers have no end, its floats have
        return TOO_LARGE


def run(function: Callable[..., Any], trial: Trial, names: tuple[str, ...]) -> Outcome:
    """Call a function on a trial, with gradients of a fixed weighted sum of its floating results. Never raises.

    Args:
        function: an answer or the reference.
        trial: makes the arguments.
        names: of the arguments; gradients are kept by name, and only where there is one.
    """
    arguments, untouched = _own_containers(trial.make()), trial.make()
    leaves = {
        name: argument
        for name, argument in zip(names, arguments, strict=True)
        if isinstance(argument, Tensor) and argument.requires_grad
    }
    try:
        result = function(*arguments)
        values = tuple(result) if isinstance(result, tuple | list) else (result,)
        gradients = _gradients(values, leaves)
    except Exception as error:  # the reader's code may raise anything; the check reports it
        return Outcome(error=error, line=_line(error, function))
    changed = tuple(
        place
        for place, (after, before) in enumerate(zip(arguments, untouched, strict=True))
        if not _unchanged(before, after)
    )
    accumulated = tuple(name for name, leaf in leaves.items() if leaf.grad is not None)
    detached = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
    return Outcome(
        detached, type(result), None, gradients, changed=changed, accumulated=accumulated
    )


def _own_containers(argument: Any) -> Any:
    """The argument with lists and dicts of its own, so that no answer can change those of the trial."""
    if isinstance(argument, dict):
        return {key: _own_containers(value) for key, value in argument.items()}
    if isinstance(argument, tuple | list):
        return type(argument)(_own_containers(part) for part in argument)
    return argument


def _unchanged(before: Any, after: Any) -> bool:
    """Whether an argument holds what it held, at every depth; a NaN that was there may stay."""
    if type(after) is not type(before):
        return False
    if isinstance(before, Tensor):
        return before.shape == after.shape and torch.allclose(
            after, before, rtol=0, atol=0, equal_nan=True
        )
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            _unchanged(before[k], after[k]) for k in before
        )
    if isinstance(before, tuple | list):
        return len(before) == len(after) and all(map(_unchanged, before, after))
    return bool(after == before or before != before or callable(before))


def _gradients(values: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sums = []
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            count = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape)
            sums.append((value * torch.cos(count + 1).to(value.dtype)).sum())
    if not sums or not leaves:
        return {}
    found = torch.autograd.grad(torch.stack(sums).sum(), list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def _line(error: BaseException, function: Callable[..., Any]) -> int | None:
    """The line of the function's own cell or file that the error came through; None when it came through none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if code is not None and f.filename == code.co_filename]
    return lines[0] if lines else None


def _words(error: BaseException, line: int | None) -> str:
    """The error's kind and first line, and the reader's own line where it is known."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return text if line is None else f"{text} (line {line} of your cell)"
