"""The site, built for real from a specimen chapter: numbers, references, folded solutions, no other host."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from offline_pages import external_loads

ROOT = Path(__file__).resolve().parents[2]
SHOWN_ROWS = 120
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

CHAPTER_7 = r"""(ch-seven)=
# The seventh

{cite:p}`xiao2024streamingllm`, a {term}`logit`, {eq}`eq-seven-gate`, {numref}`fig-seven-plot`, {numref}`tab-seven-x`,
{ref}`ex-seven-try`, {prf:ref}`thm-seven-gate`, {numref}`Section %s <sec-seven-why>`.

(sec-seven-why)=
## Why

$$
o = \sigma(\lse - b)
$$ (eq-seven-gate)

```{prf:theorem} It is a gate
:label: thm-seven-gate

As said.
```

```{list-table} Two numbers
:name: tab-seven-x
:header-rows: 1

* - a
  - b
* - 1
  - 2
```
"""
EXERCISE = """```{exercise-start} Try it
:label: ex-seven-try
```

Do it.

```{exercise-end}
```

```{solution-start} ex-seven-try
:label: sol-seven-try
:class: dropdown
```

Done:
"""
CHAPTER_17 = """# The seventeenth

$$
x
$$ (eq-seventeen-x)

{numref}`Chapter %s <ch-seven>`, {eq}`eq-seven-gate`, {eq}`eq-seventeen-x`.

As `head.json` says.

## Second
"""

READS_MOE = """from gptoss.bench.evidence import load_evidence
unread = "decode"
print(len(load_evidence("moe")["rows"]))
"""


def write_notebook(path: Path, cells: list) -> None:
    for index, cell in enumerate(cells):
        cell["id"] = f"c{index}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), str(path))


def build_site(root: Path) -> subprocess.CompletedProcess:
    start = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", start, "build", ".", "-W", "-n", "--keep-going"]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "_config.yml", root)
    for name in ("runbook", "api"):  # they refer to chapters that this site does not have
        (root / f"book/{name}.md").write_text(f"({name})=\n# The {name}\n")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nparts:\n"
        "  - {caption: Two, numbered: true, chapters: [{file: chapters/07_seven}]}\n"
        "  - {caption: Five, numbered: true, chapters: [{file: chapters/17_seventeen}]}\n"
        "  - {caption: Rest, chapters: [{file: book/notation}, {file: book/glossary}, {file: book/bibliography}, "
        "{file: book/evidence}, {file: book/runbook}, {file: book/api}]}\n"
    )
    png = new_output("display_data", data={"image/png": DOT, "text/plain": "<Figure>"})
    figure = {
        "name": "fig-seven-plot",
        "caption": "A dot, and {eq}`eq-seven-gate`.",
    }
    plot = new_code_cell(
        f"from base64 import b64decode\nfrom IPython.display import Image\nImage(b64decode('{DOT}'))",
        outputs=[png],
        metadata={"mystnb": {"figure": figure, "image": {"alt": "a dot"}}},
    )
    cells = [CHAPTER_7, EXERCISE, "```{solution-end}\n```"]
    seven, exercise, end = (new_markdown_cell(cell) for cell in cells)
    answer = new_code_cell(
        "print('the answer')", outputs=[new_output("stream", text="the answer\n")]
    )
    write_notebook(root / "chapters/07_seven.ipynb", [seven, plot, exercise, answer, end])
    reading = new_code_cell(READS_MOE, outputs=[new_output("stream", text="18\n")])
    write_notebook(root / "chapters/17_seventeen.ipynb", [new_markdown_cell(CHAPTER_17), reading])
    done = build_site(root)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return root


def page(site: Path, name: str) -> str:
    return (site / "_build" / "html" / f"{name}.html").read_text()


def text(html: str) -> str:
    article = html[html.index("<article") : html.index("</article>")]
    return " ".join(re.sub(r"<[^>]+>", "", article).split())


def test_numbers_are_those_of_the_file_names(site):
    seven, seventeen = (
        text(page(site, "chapters/07_seven")),
        text(page(site, "chapters/17_seventeen")),
    )
    for number in (
        "7. The seventh",
        "7.1. Why",
        "(7.1)",
        "Fig. 7.1",
        "Table 7.1",
        "Exercise 7.1",
        "Theorem 7.1",
    ):
        assert number in seven
    assert "17. The seventeenth" in seventeen
    assert "17.1. Second" in seventeen
    assert "Chapter 7, (7.1), (17.1)." in seventeen


def test_every_kind_of_reference_resolves(site):
    seven = text(page(site, "chapters/07_seven"))
    assert (
        "[Xiao et al., 2024], a logit, (7.1), Fig. 7.1, Table 7.1, Exercise 7.1, Theorem 7.1, Section 7.1."
        in seven
    )


def test_the_sidebar_carries_the_same_numbers(site):
    html = page(site, "book/notation")
    assert re.search(r">\s*7\. The seventh", html)
    assert re.search(r">\s*17\. The seventeenth", html)


def test_a_rebuild_keeps_the_numbers(site):
    chapter = site / "chapters/17_seventeen.ipynb"
    chapter.write_text(chapter.read_text().replace("## Second", "## Changed"))
    assert build_site(site).returncode == 0
    assert "17.1. Changed" in text(page(site, "chapters/17_seventeen"))
    assert "7.1. Why" in text(page(site, "chapters/07_seven"))


def test_a_solution_is_folded_and_holds_its_cells(site):
    html = page(site, "chapters/07_seven")
    solution = html[html.index('class="solution dropdown admonition"') :]
    assert "the answer" in solution


def test_a_plot_has_its_text_for_those_who_cannot_see_it(site):
    assert 'alt="a dot"' in page(site, "chapters/07_seven")


def test_maths_is_shipped_and_trimmed(site):
    mathjax = site / "_build/html/_static/mathjax"
    assert "_static/mathjax/tex-chtml.js" in page(site, "chapters/07_seven")
    assert (mathjax / "output/chtml/fonts/woff-v2/MathJax_Main-Regular.woff").is_file()
    assert sum(f.stat().st_size for f in mathjax.rglob("*") if f.is_file()) < 2_500_000


def test_no_page_loads_from_another_host(site):
    pages = list((site / "_build/html").rglob("*.html"))
    assert len(pages) > 5
    for path in pages:
        html = path.read_text()
        loads = re.findall(
            r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"'](?:https?:)?//[^\"']+", html
        )
        assert loads == [], path
        assert "unpkg.com" not in html, path


def test_every_checked_reference_is_in_the_bibliography(site):
    entries = re.findall(r"^@\w+{", (ROOT / "book/references.bib").read_text(), re.MULTILINE)
    assert page(site, "book/bibliography").count('role="doc-biblioentry"') == len(entries)


def test_every_evidence_file_has_its_section_its_rows_and_a_download(site):
    html = page(site, "book/evidence")
    files = sorted((ROOT / "book/evidence").glob("*.json"))
    assert len(files) > 10
    for path in files:
        evidence = json.loads(path.read_text())
        start = html.index(f'<section id="evidence-{path.stem.replace("_", "-")}">')
        section = html[start : html.index("</section>", start)]
        assert evidence["commit"] in section, path.name
        rows = section[section.index("<tbody>") : section.index("</tbody>")]
        shown = min(len(evidence["rows"]), SHOWN_ROWS)
        assert rows.count("<tr") == shown, path.name
        meanings = section[section.rindex("<tbody>") :]
        assert meanings.count("<tr") == len(evidence["columns"]), path.name
        link = re.search(r'href="\.\./(_downloads/\w+/(\w+\.json))"', section)
        assert link[2] == path.name
        assert (site / "_build/html" / link[1]).read_bytes() == path.read_bytes()


def test_the_evidence_page_knows_which_chapter_reads_a_file(site):
    overview = page(site, "book/evidence").split("<section id=")[0]
    rows = {row.split("#evidence-")[1].split('"')[0]: row for row in overview.split("<tr")[2:]}
    seventeen = 'href="../chapters/17_seventeen.html"'
    assert {name for name, row in rows.items() if seventeen in row} == {"moe", "head"}


def test_evidence_that_cannot_be_read_fails_the_build_with_one_line(site):
    broken = site / "book/evidence/broken.json"
    moe = json.loads((ROOT / "book/evidence/moe.json").read_text())
    nameless = site / "book/evidence/nameless.json"
    broken.write_text('{"name": ')
    nameless.write_text(json.dumps({**moe, "name": "nameless", "commit": None}))
    try:
        done = build_site(site)
    finally:
        broken.unlink()
        nameless.unlink()
    assert done.returncode != 0
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "WARNING" in line]
    assert len(lines) == 2
    assert "broken.json: not JSON" in lines[0]
    assert "evidence nameless: 'commit' must be there, as str" in lines[1]


@pytest.mark.parametrize(
    ("html", "loaded"),
    [
        ("<img src='a.png' srcset='b.png 1x, https://a.org/c.png 2x'>", ["https://a.org/c.png"]),
        ("<video poster=//a.org/p.png></video>", ["//a.org/p.png"]),
        ("<svg><image xlink:href='https://a.org/i.png'/></svg>", ["https://a.org/i.png"]),
        ("<link rel='stylesheet' href='https://a.org/s.css'>", ["https://a.org/s.css"]),
        ("<style>b { background: url(https://a.org/y.png) }</style>", ["https://a.org/y.png"]),
        ("<p style='background: url(//a.org/z)'>x</p>", ["//a.org/z"]),
        ("<link rel='canonical' href='https://a.org'><a href='https://a.org'>x</a>", []),
        ("<img src='data:image/svg+xml,http://www.w3.org'> url(https://a.org)", []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(html, loaded):
    assert external_loads(html) == loaded


def test_what_does_not_resolve_or_loads_from_elsewhere_fails_the_build(site):
    faults = {
        "See {numref}`fig-none`.": "undefined label: 'fig-none'",
        "See {cite:p}`nobody1900`.": 'could not find bibtex key "nobody1900"',
        "See {term}`nothing of the kind`.": "term not in glossary: 'nothing of the kind'",
        "<script src='https://example.org/x.js'></script>": "would load https://example.org/x.js",
        "![x](https://example.org/x.png)": "would load https://example.org/x.png",
    }
    chapter = site / "chapters/17_seventeen.ipynb"
    before = chapter.read_text()
    write_notebook(chapter, [new_markdown_cell("\n\n".join((CHAPTER_17, *faults)))])
    try:
        done = build_site(site)
    finally:
        chapter.write_text(before)
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert [complaint for complaint in faults.values() if complaint not in said] == []
