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
