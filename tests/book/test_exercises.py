"""Every exercise of every chapter: stubs fail kindly, right answers pass, known wrong ones are told what is wrong."""

import contextlib
import ctypes
import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
EXERCISES = ROOT / "exercises"
sys.path.insert(0, str(EXERCISES))  # as a notebook in that folder finds `checks`

from checks import registry  # noqa: E402  # needs the path above
from checks.exercise import NOT_WRITTEN, Exercise, Mistake, Trial  # noqa: E402


def can_run(module: Any) -> bool:
    """Whether what the exercises' notebook needs is installed; its metadata names it."""
    notebook = json.loads((EXERCISES / f"{module.NOTEBOOK}.ipynb").read_text(encoding="utf-8"))
    return all(importlib.util.find_spec(name) for name in notebook["metadata"].get("needs", ()))


CHAPTERS = {chapter: module for chapter, module in registry.chapters().items() if can_run(module)}
CASES = [
    pytest.param(module, name, exercise, id=f"{chapter}-{exercise.function}")
    for chapter, module in CHAPTERS.items()
    for name, exercise in registry.exercises(module).items()
]
MISTAKES = [
    pytest.param(exercise, mistake, id=f"{chapter}-{exercise.function}-{mistake.name}")
    for chapter, module in CHAPTERS.items()
    for exercise in registry.exercises(module).values()
    for mistake in exercise.mistakes
]
every_chapter = pytest.mark.parametrize("module", CHAPTERS.values(), ids=CHAPTERS)


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [{**cell, "source": "".join(cell["source"])} for cell in notebook["cells"]]


def is_fill(cell: dict[str, Any]) -> bool:
    return "fill" in cell["metadata"].get("tags", ())


def stub_path(module: Any) -> Path:
    return EXERCISES / f"{module.NOTEBOOK}.ipynb"


def solution_path(module: Any) -> Path:
    return EXERCISES / "solutions" / f"{module.NOTEBOOK}.ipynb"


_run: dict[Path, dict[str, Any]] = {}


def namespace(path: Path) -> dict[str, Any]:
    """What a notebook's code cells leave behind, without the checks; each notebook runs once."""
    if path not in _run:
        names: dict[str, Any] = {}
        for place, cell in enumerate(cells(path)):
            if cell["cell_type"] == "code" and ".check_" not in cell["source"]:
                with contextlib.chdir(path.parent), contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(cell["source"], f"{path.name}[{place}]", "exec"), names)
        _run[path] = names
    return _run[path]


@pytest.mark.parametrize(("module", "name", "exercise"), CASES)
def test_stub_fails_kindly(module: Any, name: str, exercise: Exercise) -> None:
    verdict = exercise.judge(namespace(stub_path(module))[exercise.function])
    assert not verdict.passed
    # not written, or (find the bug) a known slip with its hint
    assert NOT_WRITTEN in verdict.message or verdict.mistake is not None


@pytest.mark.parametrize(("module", "name", "exercise"), CASES)
def test_solution_passes(module: Any, name: str, exercise: Exercise) -> None:
    verdict = exercise.judge(namespace(solution_path(module))[exercise.function])
    assert verdict.passed, verdict.message


@pytest.mark.parametrize(("module", "name", "exercise"), CASES)
def test_answers_written_differently_pass(module: Any, name: str, exercise: Exercise) -> None:
    assert exercise.alternatives
    for alternative in exercise.alternatives:
        verdict = exercise.judge(alternative)
        assert verdict.passed, verdict.message


@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_known_mistake_fails_with_its_hint(exercise: Exercise, mistake: Mistake) -> None:
    verdict = exercise.judge(mistake.answer)
    assert not verdict.passed
    assert verdict.mistake == mistake.name
    assert mistake.hint in verdict.message


@pytest.mark.parametrize(("module", "name", "exercise"), CASES)
def test_exercise_is_complete(module: Any, name: str, exercise: Exercise) -> None:
    assert len(exercise.mistakes) >= 2
    assert len({mistake.name for mistake in exercise.mistakes}) == len(exercise.mistakes)
    assert len(exercise.trials) >= 2
    assert exercise.hints
    assert exercise.dots in (1, 2, 3)
    assert 1 <= exercise.minutes <= 120
    for path in (stub_path(module), solution_path(module)):
        sources = [cell["source"] for cell in cells(path)]
        check = f"{module.__name__.split('.')[-1]}.{name}({exercise.function})"
        place = sources.index(check)  # the check stands alone in its cell …
        assert is_fill(cells(path)[place - 1])  # … right below the cell to fill
        dots = "●" * exercise.dots + "○" * (3 - exercise.dots)
        heading = next(text for text in sources[place - 2 :: -1] if exercise.title in text)
        assert f"{dots} · {exercise.minutes} minutes" in heading


@every_chapter
def test_three_to_six_exercises_in_a_chapter(module: Any) -> None:
    assert 3 <= len(registry.exercises(module)) <= 6


@every_chapter
def test_stub_and_solution_differ_only_in_the_cells_to_fill(module: Any) -> None:
    stub, solution = cells(stub_path(module)), cells(solution_path(module))
    assert len(stub) == len(solution)
    filled = 0
    for ours, theirs in zip(stub, solution, strict=True):
        keys = ("id", "cell_type", "metadata")
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]
        if is_fill(ours):
            filled += 1
            assert ours["source"] != theirs["source"]
        else:
            assert ours["source"] == theirs["source"]
    assert filled == len(registry.exercises(module))


@every_chapter
def test_stored_outputs_are_the_checks_own_words(module: Any) -> None:
    for path in (stub_path(module), solution_path(module)):
        for cell in cells(path):
            text = "".join("".join(o.get("text", "")) for o in cell.get("outputs", ()))
            if ".check_" in cell["source"]:
                name = cell["source"].split("(")[0].split(".")[1]
                exercise = registry.exercises(module)[name]
                verdict = exercise.judge(namespace(path)[exercise.function])
                assert text == verdict.message + "\n"
            else:
                assert text == ""


@every_chapter
def test_the_book_shows_the_same_solutions(module: Any) -> None:
    chapter = cells(ROOT / "chapters" / f"{module.NOTEBOOK}.ipynb")
    shown = {cell["source"] for cell in chapter if cell["cell_type"] == "code"}
    for cell in cells(solution_path(module)):
        if is_fill(cell):
            assert cell["source"] in shown


# The framework itself ------------------------------------------------------------------------------------------------


def _pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return (torch.tensor([1.0, -2.0, 3.0], dtype=dtype, requires_grad=True),)


SQUARE = Exercise(
    function="square",
    title="Square",
    dots=1,
    minutes=1,
    reference=lambda x: x * x,
    trials=(
        Trial("three numbers", _pair),
        Trial("float64", lambda: _pair(torch.float64)),
    ),
    mistakes=(Mistake("doubled", "twice is not squared.", lambda x: 2 * x),),
    alternatives=(lambda x: x**2,),
    hints=("multiply", "x * x"),
)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x: x + x, "twice is not squared."),  # the known slip, written differently
        (lambda x: x.detach() ** 2, "the gradient of x is missing"),
        (lambda x: (x * x).float(), "dtype torch.float32"),
        (lambda x: (x * x)[None], "shape (1, 3)"),
        (lambda x: x * x / (x - 1) * (x - 1), "NaN"),
        (lambda x: 3.0, "a tensor is asked for"),
        (lambda x: (x, x), "2 results instead of 1"),
        (lambda x: x.data.mul_(x.data) * 1.0, "in place"),
        (lambda x: x @ torch.ones(4), "RuntimeError"),
        (lambda: 1, "TypeError"),
        (lambda x: 1 / 0, "ZeroDivisionError: division by zero (line"),
        (lambda x: x**2 + 1e-3, "hint=1"),  # nothing known: offers a hint
        (None, "expects the function itself"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(answer: Any, words: str) -> None:
    verdict = SQUARE.judge(answer)
    assert not verdict.passed
    assert words in verdict.message


class Squared(torch.autograd.Function):
    """A square whose backward pass runs one of its own; a slip is named by the way the input is copied."""

    @staticmethod
    def forward(ctx: Any, copy: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.copy = copy
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = ctx.copy(x)
        with torch.enable_grad():
            y = x * x
        y.backward(dy)
        return None, x.grad


def test_a_gradient_written_into_an_argument_is_seen() -> None:
    right = SQUARE.judge(lambda x: Squared.apply(lambda t: t.detach().requires_grad_(), x))
    assert right.passed, right.message
    wrong = SQUARE.judge(lambda x: Squared.apply(lambda t: t, x))
    assert not wrong.passed
    assert ".grad of x" in wrong.message
    assert "detach" in wrong.message


def test_an_error_is_the_known_one_only_if_it_says_the_same() -> None:
    def stop(words: str) -> Any:
        def square(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError(words)

        return square

    slip = Mistake("stopped", "there is no tape.", stop("square() needs a tape"))
    exercise = replace(SQUARE, mistakes=(slip,))
    assert exercise.judge(stop("answer() needs a tape")).mistake == "stopped"
    assert exercise.judge(stop("expected 3 gradients, got 2")).mistake is None


def _total(parts: Any) -> Any:
    return parts["all"][0] + parts["all"][1].sum()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda parts: parts["all"][1].mul_(0),
        lambda parts: parts["all"][1].unsqueeze_(0),
        lambda parts: parts["all"].__setitem__(0, 9.0),
        lambda parts: parts["all"].pop(),
        lambda parts: parts.clear(),
    ],
    ids=["a tensor's numbers", "its shape", "a number", "a list", "a dict"],
)
def test_a_change_deep_inside_an_argument_is_seen(spoil: Any) -> None:
    parts = Trial("parts", lambda: ({"all": [1.0, torch.tensor([2.0, torch.nan])]},))
    exercise = replace(SQUARE, reference=_total, trials=(parts,), mistakes=())
    assert exercise.judge(_total).passed
    assert "in place" in exercise.judge(lambda parts: (_total(parts), spoil(parts))[0]).message


def test_a_list_that_a_trial_keeps_is_safe_from_answers() -> None:
    kept = {"all": [1.0, torch.tensor(2.0)]}
    exercise = replace(SQUARE, reference=_total, trials=(Trial("kept", lambda: (kept,)),))
    careless = lambda parts: (_total(parts), parts["all"].clear())[0]  # noqa: E731  # one line says it
    assert "in place" in exercise.judge(careless).message
    assert len(kept["all"]) == 2


def test_a_right_answer_in_other_words_passes() -> None:
    assert SQUARE.judge(lambda x: torch.stack([y * y for y in x])).passed


def test_hints_come_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    def stub(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    SQUARE(stub)
    assert "Hint" not in capsys.readouterr().out
    SQUARE(stub, hint=1)
    assert capsys.readouterr().out.endswith("Hint 1 of 2: multiply\n")
    SQUARE(stub, hint=9)
    assert capsys.readouterr().out.endswith("Hint 2 of 2: x * x\n")


def test_numbers_are_compared_as_numbers() -> None:
    count = Exercise(
        function="count",
        title="Count",
        dots=1,
        minutes=1,
        reference=lambda n: n * (n + 1),
        trials=(Trial("n = 3", lambda: (3,)),),
        mistakes=(),
        alternatives=(),
        hints=("count",),
    )
    assert count.judge(lambda n: n * n + n).passed
    assert count.judge(lambda n: torch.tensor(12)).passed
    assert "is 9, not the right number" in count.judge(lambda n: n * n).message
    assert "a number is asked for" in count.judge(lambda n: "12").message
    assert count.judge(lambda n: np.int64(12)).passed
    assert "is 9, not the right number" in count.judge(lambda n: np.int64(9)).message
    assert "far too large" in count.judge(lambda n: 9**999).message


def test_whole_numbers_are_compared_by_value() -> None:
    exercise = replace(
        SQUARE,
        reference=lambda n: torch.arange(n),
        trials=(Trial("n = 3", lambda: (3,)),),
        mistakes=(),
    )
    assert exercise.judge(lambda n: torch.arange(n, dtype=torch.int32)).passed
    assert "off by up to 1" in exercise.judge(lambda n: torch.arange(n).int() + 1).message
    assert "dtype" in exercise.judge(lambda n: torch.arange(n).float()).message


def test_a_scalar_may_be_a_number_or_a_tensor_of_one() -> None:
    exercise = replace(SQUARE, reference=lambda x: x.detach().sum(), mistakes=())
    assert exercise.judge(lambda x: float(x.detach().sum())).passed
    assert exercise.judge(lambda x: np.float64(x.detach().sum())).passed
    assert exercise.judge(lambda x: x.detach().sum()[None]).passed
    assert "off by up to 1" in exercise.judge(lambda x: 3.0).message
    assert "shape (2,)" in exercise.judge(lambda x: x.detach()[:2]).message
    assert "far too large" in exercise.judge(lambda x: 9**999).message


def test_an_error_of_pytorch_is_not_an_empty_cell() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for this dtype")

    message = SQUARE.judge(answer).message
    assert NOT_WRITTEN not in message
    assert "no kernel for this dtype" in message


def test_an_error_names_a_line_of_the_cell_or_none() -> None:
    exercise = replace(SQUARE, mistakes=())

    def here(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, 3])

    line = here.__code__.co_firstlineno + 1
    assert f"(line {line} of your cell)" in exercise.judge(here).message

    def backward_only(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.mul_(1)  # the tape kept exp's result: the backward pass fails inside PyTorch

    message = exercise.judge(backward_only).message
    assert "It stopped with RuntimeError" in message
    assert "of your cell" not in message


def test_a_forgotten_return_and_a_list_are_called_so() -> None:
    pair = replace(SQUARE, reference=lambda x: (x * x, x), mistakes=())
    for exercise in (SQUARE, pair):
        assert "nothing; is the return missing?" in exercise.judge(lambda x: None).message
    assert "a list; a tensor is asked for" in SQUARE.judge(lambda x: [y * y for y in x]).message
    assert "a list; a tensor is asked for" in SQUARE.judge(lambda x: [x * x]).message
    assert "1 result instead of 2" in pair.judge(lambda x: x * x).message
    assert pair.judge(lambda x: [x * x, x]).passed


def _write_up_to(makes: Any, count: int) -> Any:
    """A square whose store reaches `count` numbers, as a kernel's does; Python alone would refuse to leave a tensor."""

    def square(x: torch.Tensor) -> torch.Tensor:
        out = makes(x.detach())
        address = ctypes.cast(out.data_ptr(), ctypes.POINTER(ctypes.c_float))
        for i in range(count):
            address[i] = float(x[i % 3]) ** 2
        return out

    return square


@pytest.mark.parametrize(
    "makes",
    [
        lambda x: torch.zeros(len(x)),
        lambda x: torch.zeros_like(x),
        lambda x: torch.empty(3, dtype=torch.float32),
        lambda x: torch.empty_like(x),
    ],
    ids=["zeros", "zeros_like", "empty", "empty_like"],
)
def test_a_store_outside_the_result_is_seen(makes: Any) -> None:
    plain = Trial("three numbers", lambda: (torch.tensor([1.0, -2.0, 3.0]),))
    exercise = replace(SQUARE, trials=(plain,), mistakes=(), margins=True)
    before = torch.zeros, torch.zeros_like, torch.empty, torch.empty_like
    inside = exercise.judge(_write_up_to(makes, 3))
    assert inside.passed, inside.message
    outside = exercise.judge(_write_up_to(makes, 4))
    assert "wrote outside the result: is the store masked?" in outside.message
    assert "of your cell" not in outside.message
    assert before == (torch.zeros, torch.zeros_like, torch.empty, torch.empty_like)


def test_margins_keep_strides_and_dtypes() -> None:
    def answer(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x.T)
        assert out.stride() == x.T.stride()
        assert torch.zeros(2, dtype=torch.bool).tolist() == [False, False]
        assert torch.zeros(0).shape == (0,)
        return out.copy_(x.T)

    exercise = replace(
        SQUARE,
        reference=lambda x: x.T,
        trials=(Trial("2 × 3", lambda: (torch.arange(6.0).view(2, 3),)),),
        mistakes=(),
        margins=True,
    )
    verdict = exercise.judge(answer)
    assert verdict.passed, verdict.message


def test_every_notebook_has_its_checks() -> None:
    notebooks = {path.stem for path in EXERCISES.glob("*.ipynb")}
    assert notebooks == {module.NOTEBOOK for module in CHAPTERS.values()}
    assert {path.stem for path in (EXERCISES / "solutions").glob("*.ipynb")} == notebooks
    assert importlib.util.find_spec("checks") is not None
