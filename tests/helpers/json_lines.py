"""Reads the JSON lines that several processes append to a file, and may die in."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def lines(file: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; none if it does not exist."""
    return complete(file.read_text()) if file.exists() else []


def complete(text: str) -> list[dict[str, Any]]:
    """The complete JSON lines of a text that processes append to.

    One that is killed while it writes leaves the beginning of a line, and the next line
    of another one follows on the same line.
    """
    found = []
    for line in text.splitlines():
        for begin in (0, line.rfind('{"')):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line[begin:] if begin >= 0 else ""))
                break
    return found
