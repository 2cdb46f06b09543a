"""Which outputs a page shows, and when a notebook has to run again. A Sphinx extension and one command.

A notebook's outputs depend on its code, on the package that it imports, on the exercise checks and on the evidence files.
`notebook_key` hashes all of these, so an edit in `gptoss/` makes the chapters that import it stale; the cache of
jupyter-book looks at the notebook's own code alone. What is known of a notebook stands in `_build/outputs/*.json`:

    {"key": …, "stored": …, "outputs": null}        `check` has run it under nbval and its stored outputs were right
    {"key": …, "stored": …, "outputs": [[…], …]}    the site build has run it; these are its outputs, cell by cell

Building the site runs each notebook whose key has no such record and shows what it printed. After a green
`python book/extensions/notebook_outputs.py check`, which `make test` calls, nothing is left to run, and the pages show
the outputs stored in git. The notebooks themselves are never written to.
"""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK_FOLDERS = ("chapters", "exercises")

# A notebook whose code contains the word depends on these files.
DEPENDENCIES = {
    "gptoss": (
        "gptoss/**/*.py",
        "gptoss/**/*.yaml",
        "gptoss/**/*.mplstyle",
        "gptoss/pretrained/**/*",
    ),
    "checks": ("exercises/checks/**/*.py", "gptoss/**/*.py"),
    "evidence": ("book/evidence/*.json", "gptoss/**/*.py"),
}


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def notebook_key(notebook: dict[str, Any], root: Path = ROOT) -> str:
    """Hash of all that decides what a notebook prints: its code and tags, what it imports, and the Python version."""
    cells = code_cells(notebook)
    code = [("".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells]
    text = "\n".join(source for source, _ in code)
    patterns = {p for word, globs in DEPENDENCIES.items() if word in text for p in globs}
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    digest = hashlib.sha256(json.dumps([code, sys.version_info[:2]]).encode())
    for path in sorted(p for p in files | {root / "constraints.txt"} if p.is_file()):
        if "__pycache__" not in path.parts:
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def stored_hash(notebook: dict[str, Any]) -> str:
    """Hash of the outputs that the notebook file itself holds."""
    outputs = [cell["outputs"] for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(outputs, sort_keys=True).encode()).hexdigest()


def missing_modules(notebook: dict[str, Any]) -> list[str]:
    """What a notebook says it needs (`"needs": ["triton"]` in its metadata) and this machine does not have."""
    needs = notebook["metadata"].get("needs", [])
    return [module for module in needs if importlib.util.find_spec(module) is None]


def record_path(name: str, root: Path = ROOT) -> Path:
    return (root / "_build" / "outputs" / name).with_suffix(".json")


def fresh_record(name: str, notebook: dict[str, Any], root: Path = ROOT) -> dict[str, Any] | None:
    """What is known of a notebook as it is now, None when it has to run."""
    path = record_path(name, root)
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    if record["key"] != notebook_key(notebook, root):
        return None
    if record["outputs"] is None and record["stored"] != stored_hash(notebook):
        return None
    return record


def write_record(name: str, record: dict[str, Any], root: Path = ROOT) -> None:
    path = record_path(name, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)


def run_notebook(path: Path, timeout: int) -> list[list[dict[str, Any]]]:
    """Execute a notebook in its own folder and return the outputs of each code cell."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        extra_arguments=[
            "--IPKernelApp.log_level=ERROR"
        ],  # no warning of local TCP on the terminal
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    return [json.loads(json.dumps(cell["outputs"])) for cell in code_cells(notebook)]


def find_notebooks(root: Path = ROOT) -> list[str]:
    """Every notebook of the book, as a path from the root."""
    return sorted(
        path.relative_to(root).as_posix()
        for folder in NOTEBOOK_FOLDERS
        for path in (root / folder).rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts
    )


def check(names: Iterable[str], root: Path = ROOT) -> int:
    """Run notebooks under nbval and record those whose stored outputs were right; returns pytest's exit code."""
    names = list(names) or find_notebooks(root)
    records = {}
    for name in names:
        notebook = json.loads((root / name).read_text())
        if missing := missing_modules(notebook):
            print(f"not run: {name} needs {', '.join(missing)}")
            continue
        key, stored = notebook_key(notebook, root), stored_hash(notebook)
        records[name] = {"key": key, "stored": stored, "outputs": None}
    if not records:
        print("no notebook to check")
        return 0
    options = ["--nbval", "--nbval-current-env", "--durations=8", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *records], cwd=root)
    if done.returncode == 0:
        for name, record in records.items():
            write_record(name, record, root)
    return done.returncode


# ---- the Sphinx side

logger = logging.getLogger(__name__)


def run_stale_notebooks(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Bring every notebook of the site up to date; returns the pages whose outputs are not those last read."""
    shown: dict[str, str] = getattr(env, "shown_outputs", {})
    now: dict[str, str] = {}
    root = Path(app.srcdir)
    for docname in sorted(env.found_docs):
        path = Path(env.doc2path(docname))
        if path.suffix != ".ipynb":
            continue
        name = path.relative_to(root).as_posix()
        notebook = json.loads(path.read_text())
        record = fresh_record(name, notebook, root)
        if record is None and (missing := missing_modules(notebook)):
            logger.info("%s needs %s: shown as stored", name, ", ".join(missing))
            continue
        if record is None:
            logger.info("running %s ...", name, nonl=True)
            start = time.perf_counter()
            try:
                outputs = run_notebook(path, app.config.nb_execution_timeout)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                logger.info("")
                logger.warning("did not run to its end: %s", error, location=docname)
                continue
            logger.info(" %.0f s", time.perf_counter() - start)
            record = {
                "key": notebook_key(notebook, root),
                "stored": stored_hash(notebook),
                "outputs": outputs,
            }
            write_record(name, record, root)
        now[docname] = json.dumps([record["key"], record["stored"], record["outputs"] is None])
    env.shown_outputs = now  # type: ignore[attr-defined]  # kept with Sphinx's environment between builds
    return [docname for docname in now if now[docname] != shown.get(docname)]


def show_fresh_outputs(app: Sphinx, docname: str, source: list[str]) -> None:
    """While Sphinx reads a notebook: put the outputs of the last run in the place of the stored ones."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        return
    notebook = json.loads(source[0])
    record = fresh_record(path.relative_to(app.srcdir).as_posix(), notebook, Path(app.srcdir))
    if record and record["outputs"] is not None:
        for cell, outputs in zip(code_cells(notebook), record["outputs"], strict=True):
            cell["outputs"] = outputs
        source[0] = json.dumps(notebook)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-get-outdated", run_stale_notebooks)
    app.connect("source-read", show_fresh_outputs)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check the outputs that the notebooks store in git."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser(
        "check", help="run notebooks under nbval and remember which were right"
    )
    checking.add_argument("notebooks", nargs="*", help="paths from the root; all when left out")
    return check(parser.parse_args().notebooks)


if __name__ == "__main__":
    sys.exit(main())
