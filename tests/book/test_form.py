"""The form of the book's files: what the table of contents lists, and how a notebook is stored."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    path
    for folder in ("chapters", "exercises")
    for path in (ROOT / folder).rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/~-])/(?:home|root|work|tmp|Users|usr|opt|var|mnt|content)/\w|[A-Z]:\\\\?\w"
)
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}|\bobject at 0x")
MATPLOTLIB_RESULT = re.compile(r"matplotlib\.|^Text\(|<Figure ", re.MULTILINE)


def listed_files(toc: dict[str, Any]) -> list[str]:
    files = [toc["root"]]
    for part in toc["parts"]:
        for chapter in part["chapters"]:
            files += [
                chapter["file"],
                *(section["file"] for section in chapter.get("sections", [])),
            ]
    return files


def texts(output: dict[str, Any]) -> list[str]:
    parts = [output.get("text", ""), *output.get("traceback", []), output.get("evalue", "")]
    parts += [value for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return ["".join(part) for part in parts]


def faults(notebook: dict[str, Any], size: int = 0) -> list[str]:
    """What is wrong with a stored notebook, empty when nothing is."""
    found = []
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel is not python3")
    if size >= 1_000_000:
        found.append(f"{size} bytes, 1 MB or more")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if code and not any(cell["outputs"] for cell in code):
        found.append("no stored output")
    for number, cell in enumerate(notebook["cells"]):
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        here = f"cell {number}"
        if ABSOLUTE_PATH.search(source):
            found.append(f"{here}: an absolute path in the source")
        if cell["cell_type"] != "code":
            continue
        if source.strip() and cell["execution_count"] is None:
            found.append(f"{here}: not executed")
        for output in cell["outputs"]:
            if output.get("name") == "stderr":
                found.append(f"{here}: stderr")
            if output["output_type"] == "error" and "raises-exception" not in tags:
                found.append(f"{here}: an error")
            if any("widget" in kind for kind in output.get("data", {})):
                found.append(f"{here}: a widget, which a static page cannot show")
            text = "\n".join(texts(output))
            if ABSOLUTE_PATH.search(text):
                found.append(f"{here}: an absolute path in the output")
            if ADDRESS.search(text):
                found.append(f"{here}: a memory address")
            if output["output_type"] == "execute_result" and MATPLOTLIB_RESULT.search(text):
                found.append(f"{here}: a plotting object as text; end the cell with plt.show()")
    return found


def test_the_table_of_contents_lists_files_that_exist():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    for file in listed_files(toc):
        assert any((ROOT / f"{file}{end}").is_file() for end in (".md", ".ipynb")), file


def test_every_chapter_is_listed_once_in_the_order_of_its_number():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    listed = [file for file in listed_files(toc) if file.startswith("chapters/")]
    assert listed == sorted(f"chapters/{path.stem}" for path in (ROOT / "chapters").glob("*.ipynb"))


def test_the_table_of_contents_globs_nothing():
    assert "glob" not in (ROOT / "_toc.yml").read_text()


def test_notebook_names_carry_their_number():
    for path in NOTEBOOKS:
        assert re.fullmatch(r"\d\d_[a-z_]+", path.stem), path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_notebook_is_stored_in_good_form(path):
    assert faults(json.loads(path.read_text()), path.stat().st_size) == []


GOOD = {
    "metadata": {"kernelspec": {"name": "python3"}},
    "cells": [
        {
            "cell_type": "markdown",
            "metadata": {},
            "source": ["# Title, see gptoss/model/norm.py and a/b"],
        },
        {
            "cell_type": "code",
            "metadata": {"tags": []},
            "source": ["print(1/2)"],
            "execution_count": 1,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": ["0.5\n"]}],
        },
    ],
}


def test_a_good_notebook_has_no_fault():
    assert faults(GOOD, 999_999) == []


def change(where: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(GOOD)
    made["cells"][1][where] = value
    return made


def result(text: str, kind: str = "text/plain") -> list[dict[str, Any]]:
    return [{"output_type": "execute_result", "data": {kind: [text]}}]


@pytest.mark.parametrize(
    ("notebook", "fault"),
    [
        ({**GOOD, "metadata": {"kernelspec": {"name": "my-venv"}}}, "the kernel is not python3"),
        (change("outputs", []), "no stored output"),
        (change("execution_count", None), "cell 1: not executed"),
        (change("source", ["open('/home/me/x')"]), "cell 1: an absolute path in the source"),
        (
            change("outputs", [{"output_type": "stream", "name": "stderr", "text": "50%|#"}]),
            "cell 1: stderr",
        ),
        (
            change("outputs", [{"output_type": "error", "traceback": [], "evalue": "no"}]),
            "cell 1: an error",
        ),
        (
            change("outputs", result("saved to /tmp/abc/x")),
            "cell 1: an absolute path in the output",
        ),
        (change("outputs", result("<object object at 0x7f3a5c0d>")), "cell 1: a memory address"),
        (
            change("outputs", result("Text(0.5, 1.0, 'loss')")),
            "cell 1: a plotting object as text; end the cell with plt.show()",
        ),
        (
            change("outputs", result("{}", "application/vnd.jupyter.widget-view+json")),
            "cell 1: a widget, which a static page cannot show",
        ),
    ],
)
def test_each_fault_is_seen(notebook, fault):
    assert faults(notebook) == [fault]


def test_a_large_notebook_is_seen():
    assert faults(GOOD, 1_000_000) == ["1000000 bytes, 1 MB or more"]


def test_an_error_on_purpose_is_allowed():
    made = change("outputs", [{"output_type": "error", "traceback": [], "evalue": "no"}])
    made["cells"][1]["metadata"] = {"tags": ["raises-exception"]}
    assert faults(made) == []


def test_constraints_pin_everything_exactly_but_triton():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^+\s]+", line) for line in lines)
    pinned = dict(line.lower().split("==") for line in lines)
    assert pinned["torch"] == "2.13.0"
    assert pinned["jupyter-book"] == "1.0.4.post1"
    assert [name for name in pinned if name == "triton" or name.startswith("nvidia")] == []


def test_every_make_target_explains_itself():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z]+):(?!=)(.*)$", makefile, re.MULTILINE)
    assert {"book", "test", "lab", "evidence", "torture", "lint", "clean", "help"} <= {
        t for t, _ in targets
    }
    assert [name for name, rest in targets if " ## " not in rest] == []


def test_the_top_folder_holds_what_a_reader_expects():
    for name in (
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        ".ci/run",
    ):
        assert (ROOT / name).is_file(), name
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert "Apache License" in (ROOT / "LICENSE").read_text()
