"""Runs the Python blocks of a page of the documentation, as a reader would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """The blocks of `docs/<page>`, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_page(
    page: str, names: dict[str, Any] | None = None, *, only: int | None = None
) -> dict[str, Any]:
    """Runs the blocks one after the other; returns all names they have made.

    Args:
        page: file in `docs/`.
        names: what the page takes for granted.
        only: the number of one block, instead of all.
    """
    names = {} if names is None else names
    blocks = blocks_of(page)
    for block in blocks if only is None else [blocks[only]]:
        exec(compile(block, f"docs/{page}", "exec"), names)
    return names


def cells_of(guide: str) -> list[tuple[str, str]]:
    """The cells of `docs/guides/<guide>.py`: ("prose" or "code", text), in order.

    Prose stands between lines of three quotation marks alone, as on keras.io.
    """
    text = (DOCS / "guides" / f"{guide}.py").read_text(encoding="utf-8")
    parts = re.split(r'^"""$\n?', text, flags=re.MULTILINE)
    kinds = [("code", "prose")[number % 2] for number in range(len(parts))]
    cells = zip(kinds, parts, strict=True)
    return [(kind, part) for kind, part in cells if part.strip()]


def run_guide(guide: str) -> dict[str, Any]:
    """Runs a guide as a program does; returns all names it has made."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for kind, text in cells_of(guide):
        if kind == "code":
            run_cell(guide, text, names)
    return names


def run_cell(guide: str, text: str, names: dict[str, Any]) -> None:
    """Runs one cell of code of a guide."""
    exec(compile(text, f"docs/guides/{guide}.py", "exec"), names)
