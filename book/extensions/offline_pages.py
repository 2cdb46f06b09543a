"""Sphinx extension: pages that ask no other host for anything.

MathJax comes from the package `sphinx-mathjax-offline`, cut down to the one script and the fonts that the book's
formulas need (1.7 MB instead of 25). The configuration of Thebe, which names its script's host on every page, is taken
out: the book has no live-code button. Whatever else would make a browser call another host is a warning, so it fails
`make book`; links that a reader may follow are of course allowed.
"""

import importlib.metadata
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

MATHJAX_SCRIPT = "tex-chtml.js"
MATHJAX_FONTS = "output/chtml/fonts/woff-v2"
LOADING_ATTRIBUTES = {
    **dict.fromkeys(("script", "iframe", "audio", "embed", "track", "input"), ("src",)),
    **dict.fromkeys(("img", "source"), ("src", "srcset")),
    "video": ("src", "poster"),
    "object": ("data",),
    "link": ("href",),
    **dict.fromkeys(("image", "use"), ("href", "xlink:href")),  # of SVG
}
LINKS_THAT_LOAD_NOTHING = {"canonical", "alternate", "author", "license", "next", "prev", "search"}
LOADED_BY_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
OTHER_HOST = re.compile(r"(?:https?:)?//", re.IGNORECASE)

logger = logging.getLogger(__name__)


class _Loads(HTMLParser):
    """Collects the addresses that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.found += LOADED_BY_STYLE.findall(given.get("style", ""))
        if tag == "link" and set(given.get("rel", "").split()) <= LINKS_THAT_LOAD_NOTHING:
            return
        for name in LOADING_ATTRIBUTES.get(tag, ()):
            for candidate in given.get(name, "").split("," if name == "srcset" else None):
                self.found += candidate.split()[:1]

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.found += LOADED_BY_STYLE.findall(data)


def external_loads(html: str) -> list[str]:
    """Addresses on other hosts that a browser would fetch while it shows the page; what scripts fetch is not seen."""
    page = _Loads()
    page.feed(html)
    return sorted({address for address in page.found if OTHER_HOST.match(address)})


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
    finders = {".html": external_loads, ".css": LOADED_BY_STYLE.findall}
    for page in sorted(Path(app.outdir).rglob("*")):
        if find := finders.get(page.suffix):
            for address in find(page.read_text(encoding="utf-8")):
                logger.warning("%s would load %s", page.relative_to(app.outdir), address)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", configure)
    app.connect("build-finished", copy_mathjax)
    app.connect("build-finished", forbid_other_hosts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
