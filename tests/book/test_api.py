"""The API reference: what it must hold, and how its signatures and docstrings come out."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import api_signatures
import pytest

import gptoss

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text() for path in (ROOT / "book/api").glob("*.md")}
ENTRIES = [name for page in PAGES.values() for name in re.findall(r"\.\. auto\w+:: (\S+)", page)]


def thing(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_every_public_name_is_described_once() -> None:
    described = [name.removeprefix("gptoss.") for name in ENTRIES if name.count(".") == 1]
    assert sorted(described) == sorted(gptoss.__all__)


def test_nothing_is_described_under_two_names() -> None:
    assert len(set(ENTRIES)) == len(ENTRIES)
    callables = [name for name in ENTRIES if callable(thing(name))]
    assert len({id(thing(name)) for name in callables}) == len(callables) > 100


def test_the_first_page_leads_to_every_public_name() -> None:
    first = (ROOT / "book/api.md").read_text()
    assert sorted(re.findall(r"{py:obj}`~gptoss\.(\w+)`", first)) == sorted(gptoss.__all__)


def imported_by_chapters() -> set[tuple[str, str]]:
    found = set()
    for path in (ROOT / "chapters").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] != "code":
                continue
            for node in ast.walk(ast.parse("".join(cell["source"]))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gptoss"):
                    found |= {(node.module or "", alias.name) for alias in node.names}
    return found


def test_the_functions_and_classes_that_chapters_import_are_described() -> None:
    """But for the benches, whose tables the evidence page shows, and what Triton must be there for."""
    described = {id(thing(name)) for name in ENTRIES}
    imported = imported_by_chapters()
    assert len(imported) > 80
    missing = set()
    for module, name in imported:
        if module.startswith("gptoss.bench") and module != "gptoss.bench.evidence":
            continue
        if module == "gptoss.kernels.expert_tiles":
            continue
        found = getattr(importlib.import_module(module), name, None)  # a module has no entry
        if isinstance(found, types.FunctionType | type) and id(found) not in described:
            missing.add(f"{module}.{name}")
    assert missing == {"gptoss.data.order.mix"}  # chapter 13 takes the shuffle apart


def test_every_page_is_in_the_table_of_contents() -> None:
    toc = (ROOT / "_toc.yml").read_text()
    assert [
        name for name in PAGES if f"file: book/api/{name.removesuffix('.md')}\n" not in toc
    ] == []


def test_a_signature_is_the_text_of_the_file() -> None:
    assert api_signatures.written_signature(gptoss.repeat_kv) == (
        "(x: Float[Tensor, 'B K T D'], n_rep: int)",
        "Float[Tensor, 'B H T D']",
    )

    def quoted(self: object, a: "int", /, *rest: "Path | None", b: str = "x") -> "Path":
        raise NotImplementedError

    assert api_signatures.written_signature(quoted) == (
        "(a: int, /, *rest: Path | None, b: str='x')",
        "Path",
    )


def test_marks_that_are_none_are_kept_and_code_is_left_alone() -> None:
    assert api_signatures.escaped("a * b, |x|, x_ and `x * y_` x_2i") == (
        r"a \* b, \|x\|, x\_ and `x * y_` x_2i"
    )


def test_an_indented_formula_keeps_its_lines_and_sections_their_form() -> None:
    docstring = ["One:", "", "    y = a*b", "    z", "", "Args:", "    x: more", "        deeper"]
    made = api_signatures.plain(docstring)
    assert made == ["One:", "", "", "::", "", "    y = a*b", "    z", "", "", *docstring[5:]]


def test_only_types_of_other_packages_may_lead_nowhere() -> None:
    importlib.import_module("gptoss.model.rotary")
    assert api_signatures.foreign("Tensor")
    assert api_signatures.foreign("nn.Module")
    assert api_signatures.foreign("pathlib.Path")
    assert not api_signatures.foreign("YaRNRoPE")
    assert not api_signatures.foreign("gptoss.model.rotary.YaRNRoPE")
    assert not api_signatures.foreign("NoSuchType")


@pytest.fixture
def build(tmp_path):
    """Sphinx alone, with the book's own settings for autodoc, on one page."""
    settings = ["extensions = ['sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'api_signatures']"]
    settings += ["autodoc_default_options = {'members': True}", "default_role = 'code'"]

    def run(page: str) -> tuple[str, str]:
        (tmp_path / "conf.py").write_text("\n".join(settings))
        (tmp_path / "index.rst").write_text(f"x\n=\n\n{page}\n")
        command = [sys.executable, "-m", "sphinx", "-qn", "-b", "text", ".", "out"]
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'book/extensions'}", "PATH": ""}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return (tmp_path / "out/index.txt").read_text(), done.stderr

    return run


def test_types_lead_to_their_descriptions_or_fail_the_build(build) -> None:
    described = ".. autofunction:: gptoss.training.plan.plan_batches"
    text, said = build(described + "\n.. autoclass:: gptoss.training.plan.BatchPlan")
    assert "TrainingConfig" in text
    unknown = re.findall(r"target not found: (\S+)", said)
    assert unknown == ["TrainingConfig"]
    text, said = build(
        described + "\n\n.. autoclass:: gptoss.TrainingConfig\n"
        "\n.. autoclass:: gptoss.training.plan.BatchPlan"
    )
    assert said == ""
    assert inspect.getdoc(gptoss.TrainingConfig).split("\n")[0] in " ".join(text.split())
