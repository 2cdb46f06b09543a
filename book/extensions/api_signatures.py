"""Sphinx extension: the API pages show signatures as the source writes them, and their types lead to where they are.

Sphinx prints an annotation from the object that Python made of it; `Float[Tensor, "B H T D"]` becomes long and loses its
form. Here the text of the `def` is parsed and handed on. A type in it that the API pages describe becomes a link, by its
last name. A type of another package stays plain text, since its documentation is not on this site. A type of `gptoss`
that no page describes is a warning, so it fails `make book`. Docstrings are prose with `code` between backticks; what
Sphinx would take for other marks in it is kept as it is, and indented formulas keep their lines.
"""

import ast
import inspect
import re
import sys
import textwrap
from typing import Any, ParamSpec, TypeVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Source|Attributes|Example|Examples|Note):")


def written_signature(function: Any) -> tuple[str, str | None] | None:
    """Arguments and result of a function as its source has them, without self and cls; None where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return None
    definition = ast.parse(source).body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    arguments = definition.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in (*every, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = unquoted(argument.annotation)
    first = arguments.posonlyargs or arguments.args
    if first and first[0].arg in ("self", "cls"):
        del first[0]
    returns = unquoted(definition.returns)
    return f"({ast.unparse(arguments)})", returns and ast.unparse(returns)


def unquoted(annotation: ast.expr | None) -> ast.expr | None:
    """An annotation in quotes, as one that only type checkers resolve, without them."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def sign(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, arguments: str, returns: str
) -> tuple[str, str | None] | None:
    if what == "class":
        made = written_signature(vars(thing).get("__init__"))
        return made and (made[0], None)
    return written_signature(thing) if what in ("function", "method") else None


def plain(docstring: list[str]) -> list[str]:
    """A docstring for Sphinx: marks that are none escaped, an indented paragraph before the sections kept line by line."""
    made: list[str] = []
    in_sections = verbatim = False
    for line in docstring:
        indented = line.startswith(" ")
        in_sections = in_sections or bool(SECTION.match(line))
        if indented and not in_sections and not verbatim:
            made += ["", "::", ""]
            verbatim = True
        elif line and not indented and verbatim:
            made.append("")
            verbatim = False
        made.append(line if verbatim else escaped(line))
    return made


def escaped(line: str) -> str:
    """A line in which `*`, `|` and a final `_` outside backticks are characters."""
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    parts[::2] = [re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def prepare_docstring(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """What the directive's own text says is all there is to say of a constant; its type's docstring does not."""
    if what == "data":
        lines.clear()
        return
    text = re.sub(r"\nRaises:\n +As ", "\nRaises: as ", "\n".join(lines))
    lines[:] = plain(text.split("\n"))


def skip_fields(
    app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """A named tuple's fields stand in its signature; "alias for field number 0" says nothing more."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def foreign(name: str) -> bool:
    """Whether this is a thing of another package, or a placeholder for a type, as some module of `gptoss` knows it."""
    first, *rest = name.split(".")
    if first != "gptoss" and first in sys.modules:
        return True
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] != "gptoss" or first not in vars(module):
            continue
        found = vars(module)[first]
        if isinstance(found, TypeVar | ParamSpec):
            return True
        for part in rest:
            found = getattr(found, part, None)
        home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None)
        if found is not None and str(home).split(".")[0] != "gptoss":
            return True
    return False


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Where a type leads that Sphinx did not find under the name that the signature has."""
    if node.get("refdomain") != "py" or node.get("reftype") not in ("class", "obj", "exc", "data"):
        return None
    target = node["reftarget"]
    domain = env.get_domain("py")
    last = target.rsplit(".", 1)[-1]
    homes = [name for name in domain.objects if name.rsplit(".", 1)[-1] == last]  # type: ignore[attr-defined]
    if len(homes) == 1:
        return domain.resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], homes[0], node, text
        )
    return text if foreign(target) else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-signature", sign)
    app.connect(
        "autodoc-process-docstring", prepare_docstring, priority=400
    )  # napoleon runs at 500
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", resolve)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
