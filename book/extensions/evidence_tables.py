"""Sphinx extension: the directive `{evidence}` puts every file of `book/evidence` on the page that it stands on.

First comes an overview, one row a file, with the chapters that read it: they are found by searching the notebooks. Then
each file has a section, labelled `evidence-NAME` with hyphens, with where it comes from, its rows and its columns'
meanings, and the file itself to download. A file that does not follow the format is a warning, so it fails `make book`.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from gptoss.bench.evidence import load_evidence

OPEN_ROWS = 12
"""A table with more rows than this is folded."""
SHOWN_ROWS = 120
"""Rows of a folded table that the page holds; the rest are in the file."""
PROGRAMS = {
    "python": "Python",
    "torch": "PyTorch",
    "triton": "Triton",
    "transformers": "Transformers",
}

logger = logging.getLogger(__name__)


# ---- what the page says


def files_read(cells: Sequence[dict[str, Any]], names: Sequence[str]) -> set[str]:
    """Which evidence files a notebook reads or names.

    It reads `name` where a cell calls `load_evidence("name")`, or calls it with a variable and says "name" itself; it
    names a file where any cell says `name.json`.
    """
    found = set()
    for cell in cells:
        text = "".join(cell["source"])
        calls = (
            re.findall(r"load_evidence\(\s*([^),]*)", text) if cell["cell_type"] == "code" else []
        )
        variable = any(call[:1] not in ("'", '"') for call in calls)
        for name in names:
            quoted = (f'"{name}"', f"'{name}'")
            read = any(call.strip() in quoted for call in calls)
            read = read or (variable and any(form in text for form in quoted))
            if read or re.search(rf"\b{name}\.json\b", text):
                found.add(name)
    return found


def readers(root: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The chapters, as document names in order, that read each evidence file."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for path in sorted((root / "chapters").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for name in files_read(cells, names):
            found[name].append(f"chapters/{path.stem}")
    return found


def written(value: Any) -> str:
    """A value as a table shows it: thousands apart, four digits of a fraction, one line of a text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else " ↵ ".join(str(value).splitlines())


def anchor(name: str) -> str:
    return f"evidence-{name.replace('_', '-')}"


def software(evidence: dict[str, Any]) -> str:
    versions = evidence["software"].items()
    return ", ".join(
        f"{PROGRAMS.get(name, name)} {version}" for name, version in versions if version
    )


# ---- how it says it


def inline(text: str) -> list[nodes.Node]:
    """Text with what stands between backticks as code."""
    parts = re.split(r"`([^`]+)`", text)
    made = [
        nodes.literal(part, part) if i % 2 else nodes.Text(part) for i, part in enumerate(parts)
    ]
    return [node for node in made if node.astext()]


def paragraph(*parts: nodes.Node | str) -> nodes.paragraph:
    made = [node for part in parts for node in (inline(part) if isinstance(part, str) else [part])]
    return nodes.paragraph("", "", *made)


def code(text: str) -> nodes.literal:
    return nodes.literal(text, text)


def field(name: str, body: Sequence[nodes.Node]) -> nodes.field:
    return nodes.field("", nodes.field_name("", name), nodes.field_body("", *body))


def table(
    heads: Sequence[Any], rows: Sequence[Sequence[Any]], classes: Sequence[str]
) -> nodes.table:
    """A table of texts and nodes; numbers, and what stands above them, are set to the right."""

    def row(cells: Sequence[Any], right: Sequence[bool]) -> nodes.row:
        made = nodes.row()
        for cell, aside in zip(cells, right, strict=True):
            content = cell if isinstance(cell, nodes.Node) else paragraph(written(cell))
            made += nodes.entry("", content, classes=["number"] if aside else [])
        return made

    numeric = [
        all(isinstance(cell, int | float | None) and not isinstance(cell, bool) for cell in column)
        for column in zip(*rows, strict=True)
    ]
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=1) for _ in heads]
    group += nodes.thead("", row(heads, numeric))
    group += nodes.tbody("", *(row(cells, numeric) for cells in rows))
    return nodes.table("", group, classes=["evidence", *classes])


def folded(summary: str, *content: nodes.Node) -> list[nodes.Node]:
    """Content behind a line to click; `summary` is plain text."""
    start = f'<details class="evidence"><summary>{summary}</summary>'
    return [
        nodes.raw("", start, format="html"),
        *content,
        nodes.raw("", "</details>", format="html"),
    ]


class EvidenceDirective(SphinxDirective):
    """Every evidence file, in the order of their names."""

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        folder = root / "book" / "evidence"
        self.env.note_reread()  # a file may come or go, a chapter may read another one
        names = sorted(path.stem for path in folder.glob("*.json"))
        read_by = readers(root, names)
        known = {}
        for name in names:
            try:
                known[name] = load_evidence(name, folder)
            except (ValueError, TypeError) as error:
                logger.warning("book/evidence/%s.json: %s", name, error)
        sections = [self.section(evidence, read_by[name]) for name, evidence in known.items()]
        return [self.overview(known, read_by), *sections]

    def overview(
        self, known: dict[str, dict[str, Any]], read_by: dict[str, list[str]]
    ) -> nodes.table:
        heads = ("file", "what it holds", "chapters", "command", "machine", "software", "date", "commit")  # fmt: skip
        rows = []
        for name, evidence in known.items():
            link = nodes.reference("", "", code(name), internal=True, refid=anchor(name))
            command = shorten(evidence["command"], 44, placeholder=" …")
            rows.append(
                [
                    paragraph(link),
                    evidence["title"],
                    paragraph(*self.chapters(read_by[name])),
                    paragraph(code(command)),
                    evidence["machine"],
                    software(evidence),
                    evidence["date"],
                    paragraph(code(evidence["commit"])),
                ]
            )
        return table(heads, rows, ["overview"])

    def chapters(self, docnames: Sequence[str]) -> list[nodes.Node]:
        """The numbers of chapters, each a link where the site has the chapter."""
        made: list[nodes.Node] = []
        for docname in docnames:
            number = str(int(docname.split("/")[1][:2]))
            made += [nodes.Text(", ")] if made else []
            if docname in self.env.found_docs:
                where = {"refdomain": "std", "reftype": "doc", "reftarget": f"/{docname}"}
                shown = nodes.inline("", number)
                made.append(
                    addnodes.pending_xref("", shown, refexplicit=True, refwarn=True, **where)
                )
            else:
                made.append(nodes.Text(number))
        return made or [nodes.Text("none")]

    def section(self, evidence: dict[str, Any], read_by: Sequence[str]) -> nodes.section:
        name, chapters = evidence["name"], self.chapters(read_by)
        section = nodes.section(ids=[anchor(name)], names=[anchor(name)])
        self.state.document.note_explicit_target(section)
        section += nodes.title("", evidence["title"])
        section += nodes.literal_block("", evidence["command"], language="bash")
        facts = {
            "Measured on": [paragraph(f"{evidence['machine']}, {evidence['date']}")],
            "With": [paragraph(f"{software(evidence)}, commit `{evidence['commit']}`")],
            "Chapters": [paragraph(*chapters)],
            "Convention": [paragraph(evidence["convention"])] if evidence["convention"] else [],
            "Notes": [paragraph(note) for note in evidence["notes"]],
            "File": [paragraph(self.download(name))],
        }
        section += nodes.field_list(
            "", *(field(*fact) for fact in facts.items() if fact[1]), classes=["evidence"]
        )
        section += self.rows(evidence)
        meanings = [[paragraph(code(key)), text] for key, text in evidence["columns"].items()]
        section += folded(
            "What the columns mean", table(("column", "meaning"), meanings, ["meanings"])
        )
        return section

    def download(self, name: str) -> nodes.Node:
        target = {"refdomain": "", "reftarget": f"/book/evidence/{name}.json"}
        return addnodes.download_reference(
            "", "", code(f"{name}.json"), refdoc=self.env.docname, **target
        )

    def rows(self, evidence: dict[str, Any]) -> list[nodes.Node]:
        """The table, folded when it is long, cut when it is very long."""
        rows = evidence["rows"]
        keys = [key for key in evidence["columns"] if any(row.get(key) is not None for row in rows)]
        heads = [paragraph(code(key)) for key in keys]
        made = table(heads, [[row.get(key) for key in keys] for row in rows[:SHOWN_ROWS]], [])
        if len(rows) <= OPEN_ROWS:
            return [made]
        cut = len(rows) > SHOWN_ROWS
        summary = f"The first {SHOWN_ROWS} of {len(rows)} rows" if cut else f"The {len(rows)} rows"
        return folded(summary, made)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("evidence", EvidenceDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
