"""Writes docs/api.md: each public name with the first line of its docstring.

    python .ci/api_docs.py [--check]

The whole docstrings, with shapes, errors and examples, are what `help` shows.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
MODULES = {
    "tfdist": "Initialization, collectives, the optimizer and the gradient tape.",
    "tfdist.callbacks": "Callbacks for `model.fit`; pass them on every rank.",
    "tfdist.data": "Each rank's share of the data.",
    "tfdist.elastic": "Training loops that survive the loss of a rank.",
    "tfdist.layers": "Batch normalization and random seeds for several ranks.",
    "tfdist.optimizers": "Optimizers and learning rates for large batches.",
    "tfdist.errors": "Exceptions raised by tfdist.",
}
_HEAD = """<!-- Written by `make docs`; a test compares it with the code. -->
# API

Every name has a docstring with arguments, shapes, errors and an example:
`help(tfdist.callbacks.Checkpoint)`. [Arguments](arguments.md) describes the effect of
each argument on several ranks.
"""


def summary(value: Any) -> str:
    """The first line of the docstring of a public name."""
    if isinstance(value, str):
        return "Version of the package."
    return (inspect.getdoc(value) or "").partition("\n")[0].replace("|", "\\|")


def render() -> str:
    """The page as Markdown."""
    parts = [_HEAD.rstrip()]
    for module, about in MODULES.items():
        found = importlib.import_module(module)
        rows = [
            f"| `{name}` | {summary(getattr(found, name))} |"
            for name in sorted(found.__all__, key=str.lower)
            if not inspect.ismodule(getattr(found, name))
        ]
        head = [f"## {module}", "", about, "", "| name | |", "|---|---|"]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python .ci/api_docs.py")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    is_check = parser.parse_args(arguments).check
    text = render()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        sys.stdout.write(f"{PAGE} is current\n")
        return 0
    if is_check:
        sys.stderr.write(f"{PAGE} is not current. Run: make docs\n")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
