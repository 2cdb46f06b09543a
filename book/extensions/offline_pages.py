"""Sphinx extension: pages that ask no other host for anything.

MathJax comes from the package `sphinx-mathjax-offline`, cut down to the one script and the fonts that the book's
formulas need (1.6 MB instead of 25). The configuration of Thebe, which names its script's host on every page, is taken
out: the book has no live-code button.
"""

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

MATHJAX_SCRIPT = "tex-chtml.js"
MATHJAX_FONTS = "output/chtml/fonts/woff-v2"


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


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", configure)
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
