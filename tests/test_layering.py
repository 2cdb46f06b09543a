"""Imports in `gptoss` only go down the floors, and inside a room they form a DAG.

floor 5  cli, __main__
floor 4  bench
floor 3  training, inference     neither imports the other, but the trainer may write samples
         pretrained              a model with its tokenizer; training and inference do not know it
floor 2  model
floor 1  kernels, data, figures  each knows nothing of the package but config
floor 0  config
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gptoss"

PRIMITIVES = {"config", "kernels", "data", "figures"}
MAY_IMPORT = {
    "config": set(),
    "kernels": {"config"},
    "data": {"config"},
    "figures": {"config"},
    "model": {"config", "kernels"},
    "training": PRIMITIVES | {"model"},
    "inference": PRIMITIVES | {"model"},
    "pretrained": {"config", "data", "model"},
    "bench": PRIMITIVES | {"model", "training", "inference", "pretrained"},
}
EVERYTHING = set(MAY_IMPORT)
MAY_IMPORT |= {
    "cli": EVERYTHING,
    "__main__": {"cli"},
    "__init__": EVERYTHING,
}

# Single arrows that the floors would forbid, each with its reason.
EXCEPTIONS = {
    ("training.samples", "inference.generate"),  # a sample of text every so many steps
}


def module_name(path: Path, package: Path) -> str:
    """`gptoss/model/norm.py` is "model.norm", `gptoss/model/__init__.py` is "model"."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1])


def imports(path: Path, package: Path, known: set[str]) -> set[str]:
    """The modules of the package that a file imports, at its top or inside a function."""
    here = list(path.relative_to(package).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [package.name, *here[: len(here) - node.level], *filter(None, [base])]
                )
            targets = [(base, [alias.name for alias in node.names])]
        else:
            continue
        for base, names in targets:
            root, _, module = base.partition(".")
            if root != package.name:
                continue
            inner = {f"{module}.{name}".lstrip(".") for name in names}
            submodules = inner & known
            found |= submodules
            if inner - known or not names:
                found.add(module or "__init__")
    return found


def import_graph(package: Path) -> dict[str, set[str]]:
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    return {name: imports(path, package, set(files)) for name, path in files.items()}


def upward_arrows(graph: dict[str, set[str]]) -> list[str]:
    arrows = []
    for name, targets in graph.items():
        room = name.split(".")[0]
        for target in targets:
            target_room = target.split(".")[0]
            allowed = target_room == room or target_room in MAY_IMPORT[room]
            if not allowed and (name, target) not in EXCEPTIONS:
                arrows.append(f"gptoss.{name} imports gptoss.{target}")
    return sorted(arrows)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the import graph, empty when there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph.get(name, ())):
            if loop := visit(target, [*path, name]):
                return loop
        done.add(name)
        return []

    for name in sorted(graph):
        if loop := visit(name, []):
            return loop
    return []


def test_every_room_has_a_floor():
    rooms = {name.split(".")[0] for name in import_graph(PACKAGE)}
    assert rooms <= set(MAY_IMPORT), (
        f"say in tests/test_layering.py what {rooms - set(MAY_IMPORT)} may import"
    )


def test_imports_only_go_down():
    assert upward_arrows(import_graph(PACKAGE)) == []


def test_imports_form_a_dag():
    assert cycle(import_graph(PACKAGE)) == []


@pytest.mark.parametrize(
    ("file", "line", "arrow"),
    [
        (
            "model/norm.py",
            "from gptoss.training.losses import x",
            "model.norm imports gptoss.training.losses",
        ),
        (
            "model/norm.py",
            "from ..training import losses",
            "model.norm imports gptoss.training.losses",
        ),
        (
            "kernels/loop.py",
            "def f():\n    import gptoss.model.norm",
            "kernels.loop imports gptoss.model.norm",
        ),
        (
            "data/loader.py",
            "from gptoss.figures import use_style",
            "data.loader imports gptoss.figures",
        ),
        (
            "training/losses.py",
            "from ..inference.generate import generate",
            "training.losses imports gptoss.inference.generate",
        ),
        (
            "inference/generate.py",
            "from gptoss import GPTOSS",
            "inference.generate imports gptoss.__init__",
        ),
    ],
)
def test_an_arrow_upwards_is_seen(tmp_path, file, line, arrow):
    package = tmp_path / "gptoss"
    for name in (
        "model/norm.py",
        "training/losses.py",
        "kernels/loop.py",
        "data/loader.py",
        "figures/__init__.py",
        "inference/generate.py",
        "__init__.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    assert upward_arrows(import_graph(package)) == []
    (package / file).write_text(line)
    assert upward_arrows(import_graph(package)) == [f"gptoss.{arrow}"]


def test_a_cycle_inside_a_room_is_seen(tmp_path):
    package = tmp_path / "gptoss"
    (package / "model").mkdir(parents=True)
    (package / "model" / "norm.py").write_text("from .rotary import x")
    (package / "model" / "rotary.py").write_text("from gptoss.model.norm import y")
    assert cycle(import_graph(package)) == ["model.norm", "model.rotary", "model.norm"]
