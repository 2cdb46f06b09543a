"""Sphinx extension: a chapter's number is the one in its file name, whichever chapters are missing.

Sphinx numbers the documents of a numbered toctree 1, 2, 3 … in order. This extension keeps that count to itself and
replaces its first digit for `chapters/NN_topic`: sections, figures, tables, equations and exercises of
`chapters/07_sinks` are 7.1, 7.2 … even when it is the only chapter.
"""

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

CHAPTER = re.compile(r"^chapters/(\d\d)_")


def chapter_number(docname: str) -> int | None:
    """The number that a document's name carries, None for a page that is no chapter."""
    match = CHAPTER.match(docname)
    return int(match.group(1)) if match else None


def restore_counts(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Before Sphinx counts: hand back its own numbers, which it compares with to see what changed."""
    if hasattr(env, "counted_numbers"):
        env.toc_secnumbers, env.toc_fignumbers = env.counted_numbers
    return []


def apply_chapter_numbers(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """After Sphinx has counted: put each chapter's own number first."""
    env.counted_numbers = env.toc_secnumbers, env.toc_fignumbers
    env.toc_secnumbers = dict(env.toc_secnumbers)
    env.toc_fignumbers = dict(env.toc_fignumbers)
    for docname in env.toc_secnumbers:
        number = chapter_number(docname)
        if number is None:
            continue
        env.toc_secnumbers[docname] = {
            anchor: (number, *count[1:]) if count else count
            for anchor, count in env.toc_secnumbers[docname].items()
        }
        env.toc_fignumbers[docname] = {
            kind: {label: (number, *count[1:]) for label, count in labels.items()}
            for kind, labels in env.toc_fignumbers.get(docname, {}).items()
        }
        for node in (env.titles[docname], *env.tocs[docname].findall(nodes.reference)):
            if node.get("secnumber"):
                node["secnumber"] = [number, *node["secnumber"][1:]]
    return []


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-get-updated", restore_counts, priority=100)  # Sphinx's own count runs at 500
    app.connect("env-get-updated", apply_chapter_numbers, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
