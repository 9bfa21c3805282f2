"""Configuration of Sphinx, which builds the pages as a site (`make docs`).

The source folder is the root of the repository, so that every link between pages, and
from a page to a file of the code, is the same on the site as on a code host. README.md
is the front page. The navigation is made of the sections of docs/README.md.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README"
# Pages whose lists name the pages below them.
CONTENTS = ("docs/design/README", "docs/guides/README", "benchmarks/reports/README")
GUIDES = "docs/guides/"
PROGRAMS = "recipes/"  # pages that show a file, outside of the navigation

project = "tfdist"
author = "the authors of tfdist"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
source_suffix = {".md": "markdown", ".py": "markdown"}
include_patterns = [
    "*.md",
    "docs/**.md",
    "docs/guides/*.py",
    "benchmarks/**.md",
    "recipes/**.md",
    "recipes/**.py",
    "tests/sim/README.md",
]
exclude_patterns = [".*", "build", "tests/mutants", "**/__pycache__"]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
default_role = "code"  # of docstrings, where names stand between single backticks
autodoc_typehints = "none"
napoleon_use_rtype = False
html_theme = "furo"
html_title = "tfdist"
html_copy_source = False


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """The title of each section of a page, with the links that begin its list items.

    Items and table rows before the first section have the title "".
    """
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    for title, part in zip(["", *parts[1::2]], parts[::2], strict=True):
        links = re.findall(r"^(?:- |\| )\[[^\]]+\]\(([^)]+)\)", part, re.MULTILINE)
        if links:
            yield title, links


def _toctree(links: list[str], *, caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "\n".join(["\n```{toctree}", f":hidden:\n{head}", *links, "```\n"])


def _navigation() -> str:
    """The tables of contents of the front page, one for each section of the index."""
    text = (ROOT / f"{INDEX}.md").read_text(encoding="utf-8")
    trees = [_toctree([f"/{INDEX}.md"])]
    for title, links in sections(text):
        pages = [os.path.normpath(f"/docs/{link}") for link in links]
        trees.append(_toctree(pages, caption=title))
    return "\n".join(trees)


def _guide(text: str) -> str:
    """A guide as Markdown: its prose, and its code in fences."""
    parts = re.split(r'^"""$\n?', text, flags=re.MULTILINE)
    title, about = (
        re.search(rf"^{field}: (.+)$", parts[1], re.MULTILINE)
        for field in ("Title", "Description")
    )
    cells = [f"# {title[1]}\n\n{about[1]}"] if title and about else []
    for number, part in enumerate(parts[2:]):
        if part.strip():
            code = f"```python\n{part.strip()}\n```"
            cells.append(part.strip() if number % 2 else code)
    return "\n\n".join(cells) + "\n"


def _api(text: str) -> str:
    """The table of each module, followed by its docstrings."""

    def section(match: re.Match[str]) -> str:
        module, rest = match[1], match[2]
        rows = re.sub(
            r"^\| `(\w+)` \|",
            rf"| {{py:obj}}`\1 <{module}.\1>` |",
            rest,
            flags=re.MULTILINE,
        )
        lines = [f".. automodule:: {module}", "   :members:", "   :show-inheritance:"]
        return "\n".join([f"## {module}\n{rows}", "```{eval-rst}", *lines, "```\n\n"])

    return re.sub(r"^## (\S+)\n(.*?)(?=^## |\Z)", section, text, flags=re.M | re.S)


def _read(app: Any, name: str, source: list[str]) -> None:
    """Adds to a page what it needs on the site alone."""
    if name == root_doc:
        source[0] += _navigation()
    elif name in CONTENTS:
        pages = [link for _, links in sections(source[0]) for link in links]
        source[0] += _toctree([page for page in pages if page[0] != "."])
    elif name.startswith(GUIDES):
        source[0] = _guide(source[0])
    elif name.startswith(PROGRAMS) and not name.endswith("README"):
        source[0] = (
            f"---\norphan: true\n---\n# {name}.py\n\n````python\n{source[0]}\n````\n"
        )
    elif name == "docs/api":
        source[0] = _api(source[0])


def _finish(app: Any, error: Exception | None) -> None:
    """The front page is found under the name that web servers look for."""
    if error is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True}
