"""When a notebook has to run again, and which outputs its page shows."""

import importlib.util
import io
import json
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from sphinx.testing.util import SphinxTestApp

EXTENSIONS = Path(__file__).resolve().parents[2] / "book" / "extensions"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXTENSIONS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notebook_outputs = load("notebook_outputs")
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def notebook(*sources: str, outputs: list | None = None) -> dict:
    """A notebook as JSON: a title, then one code cell a source."""
    cells = [new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)]
    for cell, output in zip(cells, outputs or [], strict=False):
        cell["outputs"] = [new_output("stream", name="stdout", text=output)]
        cell["execution_count"] = 1
    made = new_notebook(cells=[new_markdown_cell("# Title", id="title"), *cells], metadata=KERNEL)
    return json.loads(nbformat.writes(made))


@pytest.fixture
def root(tmp_path):
    for name, text in {
        "gptoss/model/norm.py": "VALUE = 1\n",
        "gptoss/configs/tiny.yaml": "a: 1\n",
        "exercises/checks/norm.py": "CHECK = 1\n",
        "book/evidence/step.json": "{}",
        "constraints.txt": "torch==2.13.0\n",
        "README.md": "read me\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


PLAIN = notebook("print(1)")
IMPORTING = notebook("from gptoss.model.norm import VALUE")
CHECKING = notebook("from checks.norm import CHECK")
READING = notebook("evidence = read('step')")


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("gptoss/model/norm.py", [IMPORTING, CHECKING, READING]),
        ("gptoss/configs/tiny.yaml", [IMPORTING]),
        ("gptoss/model/new_file.py", [IMPORTING, CHECKING, READING]),
        ("exercises/checks/norm.py", [CHECKING]),
        ("book/evidence/step.json", [READING]),
        ("constraints.txt", [PLAIN, IMPORTING, CHECKING, READING]),
        ("README.md", []),
        ("gptoss/model/__pycache__/norm.py", []),
    ],
)
def test_a_changed_file_makes_exactly_its_readers_stale(root, changed, stale):
    every = [PLAIN, IMPORTING, CHECKING, READING]
    before = [notebook_outputs.notebook_key(n, root) for n in every]
    (root / changed).parent.mkdir(exist_ok=True)
    (root / changed).write_text("something = 'else'\n")
    after = [notebook_outputs.notebook_key(n, root) for n in every]
    assert [n for n, a, b in zip(every, before, after, strict=True) if a != b] == stale


def test_the_key_follows_the_code_and_not_the_prose(root):
    key = notebook_outputs.notebook_key(PLAIN, root)
    prose = json.loads(json.dumps(PLAIN))
    prose["cells"][0]["source"] = "# Another title"
    assert notebook_outputs.notebook_key(prose, root) == key
    assert notebook_outputs.notebook_key(notebook("print(2)"), root) != key


def test_a_check_vouches_only_for_the_outputs_that_it_saw(root):
    seen = notebook("print(1)", outputs=["1\n"])
    record = {
        "key": notebook_outputs.notebook_key(seen, root),
        "stored": notebook_outputs.stored_hash(seen),
        "outputs": None,
    }
    notebook_outputs.write_record("chapters/01_a.ipynb", record, root)
    assert notebook_outputs.fresh_record("chapters/01_a.ipynb", seen, root) == record
    edited = notebook("print(1)", outputs=["2\n"])
    assert notebook_outputs.fresh_record("chapters/01_a.ipynb", edited, root) is None


def test_no_record_no_claim(root):
    assert notebook_outputs.fresh_record("chapters/01_a.ipynb", PLAIN, root) is None


@pytest.mark.parametrize(("stored", "code"), [("3\n", 0), ("4\n", 1)])
def test_check_records_a_notebook_only_when_nbval_agrees(root, stored, code):
    made = notebook("print(1 + 2)", outputs=[stored])
    (root / "chapters").mkdir()
    (root / "chapters" / "01_a.ipynb").write_text(json.dumps(made))
    assert notebook_outputs.check([], root) == code
    assert (notebook_outputs.fresh_record("chapters/01_a.ipynb", made, root) is None) == bool(code)


def test_a_notebook_whose_needs_are_missing_is_not_run(root, capsys):
    made = notebook("import no_such_module", outputs=["stored\n"])
    made["metadata"]["needs"] = ["json", "no_such_module"]
    assert notebook_outputs.missing_modules(made) == ["no_such_module"]
    (root / "chapters").mkdir()
    (root / "chapters" / "01_a.ipynb").write_text(json.dumps(made))
    assert notebook_outputs.check([], root) == 0
    assert "chapters/01_a.ipynb needs no_such_module" in capsys.readouterr().out
    assert notebook_outputs.fresh_record("chapters/01_a.ipynb", made, root) is None


def build(root: Path) -> tuple[str, str]:
    """Build the site in `root` as jupyter-book would; returns what it logged and its warnings."""
    status, warning = io.StringIO(), io.StringIO()
    app = SphinxTestApp(
        srcdir=root, status=status, warning=warning, builddir=root / "_build" / "site"
    )
    app.build()
    app.cleanup()
    return status.getvalue(), warning.getvalue()


def test_a_changed_package_reruns_its_chapters_and_the_page_shows_it(root, monkeypatch):
    (root / "conf.py").write_text(
        f"import sys; sys.path.insert(0, {str(EXTENSIONS)!r})\n"
        "extensions = ['myst_nb', 'notebook_outputs']\nnb_execution_mode = 'off'\nmaster_doc = 'index'\n"
        "exclude_patterns = ['_build', 'README.md']\n"
    )
    (root / "index.md").write_text(
        "# Book\n\n```{toctree}\nchapters/01_uses\nchapters/02_plain\n```\n"
    )
    (root / "gptoss" / "__init__.py").write_text("")
    (root / "gptoss" / "model" / "__init__.py").write_text("")
    (root / "chapters").mkdir()
    uses = notebook(
        "import sys\nsys.path.insert(0, '..')\nfrom gptoss.model.norm import VALUE\nprint('value', VALUE)",
        outputs=["value stored\n"],
    )
    (root / "chapters" / "01_uses.ipynb").write_text(json.dumps(uses))
    (root / "chapters" / "02_plain.ipynb").write_text(json.dumps(notebook("print('plain')")))
    page = root / "_build" / "site" / "html" / "chapters" / "01_uses.html"
    before = (root / "chapters" / "01_uses.ipynb").read_bytes()

    log, warnings = build(root)
    assert "running chapters/01_uses.ipynb" in log
    assert "running chapters/02_plain.ipynb" in log
    assert warnings == ""
    assert "value 1" in page.read_text()
    assert (root / "chapters" / "01_uses.ipynb").read_bytes() == before

    log, _ = build(root)
    assert "running" not in log

    (root / "gptoss" / "model" / "norm.py").write_text("VALUE = 2\n")
    log, _ = build(root)
    assert "running chapters/01_uses.ipynb" in log
    assert "02_plain" not in log.split("running")[1].split("reading sources")[0]
    assert "value 2" in page.read_text()

    (root / "gptoss" / "model" / "norm.py").write_text("VALUE = undefined\n")
    _, warnings = build(root)
    assert "did not run to its end" in warnings
    assert "NameError" in warnings
