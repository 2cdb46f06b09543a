"""Sphinx extension: pages that ask no other host for anything.

MathJax comes from the package `sphinx-mathjax-offline`, cut down to the one script and the fonts that the book's
formulas need (1.7 MB instead of 25). The configuration of Thebe, which names its script's host on every page, is taken
out: the book has no live-code button. Whatever else would make a browser call another host is a warning, so it fails
`make book`; links that a reader may follow are of course allowed.
"""

import importlib.metadata
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

MATHJAX_SCRIPT = "tex-chtml.js"
MATHJAX_FONTS = "output/chtml/fonts/woff-v2"
LOADED_FROM_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*?"
    r"\b(?:src|srcset|href|data)\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)",
    re.IGNORECASE,
)

logger = logging.getLogger(__name__)


def external_loads(html: str) -> list[str]:
    """Addresses on other hosts that a browser would fetch while it shows the page."""
    return sorted(set(LOADED_FROM_ELSEWHERE.findall(html)))


def configure(app: Sphinx, config: Config) -> None:
    config.mathjax_path = f"mathjax/{MATHJAX_SCRIPT}"
    for event in ("env-before-read-docs", "doctree-resolved"):
        for listener in list(app.events.listeners[event]):
            if listener.handler.__module__ == "sphinx_thebe":
                app.disconnect(listener.id)


def copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    package = importlib.metadata.distribution("sphinx-mathjax-offline")
    source = Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))
    target = Path(app.outdir) / "_static" / "mathjax"
    shutil.copytree(source / MATHJAX_FONTS, target / MATHJAX_FONTS, dirs_exist_ok=True)
    shutil.copyfile(source / MATHJAX_SCRIPT, target / MATHJAX_SCRIPT)


def forbid_other_hosts(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    for page in sorted(Path(app.outdir).rglob("*.html")):
        for address in external_loads(page.read_text(encoding="utf-8")):
            logger.warning("%s would load %s", page.relative_to(app.outdir), address)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", configure)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", forbid_other_hosts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
