"""Sphinx extension: a formula in a sentence keeps the punctuation that touches it.

A browser may break a line on either side of an inline formula, so a comma could start a line of its own. A formula and
what hangs on it without a space (brackets, a comma, "'s", "-fold") are put into one element that does not break.
"""

import re
from typing import Any

from sphinx.application import Sphinx

FORMULA = r'<span class="math notranslate nohighlight">\\\((?:[^<]*)\\\)</span>'
TOUCHING = re.compile(rf"([(\[“‘]*)({FORMULA})([,.;:!?)\]”’…–-][^\s<]{{0,12}})?")


def keep_together(body: str) -> str:
    """The page with each formula that something touches, and what touches it, in a `span.unbroken`."""

    def wrap(match: re.Match[str]) -> str:
        before, _, after = match.groups()
        return f'<span class="unbroken">{match[0]}</span>' if before or after else match[0]

    return TOUCHING.sub(wrap, body)


def keep_page_together(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    if "body" in context:
        context["body"] = keep_together(context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", keep_page_together)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
