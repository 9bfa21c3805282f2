"""Writes docs/config.md from the core's table of variables (`make docs`).

python -m tfdist.tools.config_docs           writes the page
python -m tfdist.tools.config_docs --check   exits with 1 when the page is not current
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfdist.core import native

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"

_HEAD = """\
# Configuration

<!-- Made from tfdist_ops/base/config.cc by `make docs`; do not edit. -->

Each setting has one environment variable, which is read when `tfdist.init()` is
called. All variables are defined in one table, `tfdist_ops/base/config.cc`. The core
and the Python part read no other `TFDIST_*` variables. An unknown variable or an
invalid value raises an error that contains the expected values.

Set them for all ranks with `tfdistrun --env`:

```
tfdistrun -np 4 --env TFDIST_TIMEOUT_S=60 --env TFDIST_LOG_LEVEL=info python train.py
```

*Same on all ranks*: `tfdist.init()` compares the value between the ranks and raises an
error if it differs. Later changes to a program's environment take effect at its next
`tfdist.init()`. `tfdist.core.native.config()` returns the table with the values of the
environment.
"""

_SECTIONS = (
    ("core", "Read by the core"),
    ("python", "Read by the launcher and the start-up"),
)

_MULTIPLES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def _number(value: float, unit: str) -> str:
    """Formats a number with its unit; sizes use the largest binary multiple."""
    if unit == "bytes":
        for factor, name in _MULTIPLES:
            if value and value % factor == 0:
                return f"{int(value) // factor} {name}"
        unit = "byte" if value == 1 else unit
    text = f"{value:.15g}"
    return f"{text} {unit}" if unit else text


def _allowed_values(row: dict[str, Any]) -> str:
    if row["type"] == "string":
        return ", ".join(f"`{choice}`" for choice in row["choices"]) or "text"
    low, high = (_number(row[key], row["unit"]) for key in ("minimum", "maximum"))
    kind = "integer" if row["type"] == "int" else "number"
    text = f"{kind}, {low} to {high}"
    if row.get("multiple_of"):
        text += f", a multiple of {row['multiple_of']}"
    return text


def _default(row: dict[str, Any]) -> str:
    value = row["default"]
    if value is None:
        return "not set"
    if row["type"] == "string":
        return f"`{value}`"
    text = _number(value, row["unit"])
    plain = f"{value:.15g}"
    return f"`{plain}`" if text.startswith(plain) else f"`{plain}` ({text})"


def render(rows: Iterable[dict[str, Any]]) -> str:
    """Renders the page as Markdown.

    Args:
        rows: the rows of `native.config()`; their current values are not used.

    Returns:
        The text of docs/config.md, with a trailing newline.
    """
    rows = list(rows)
    parts = [_HEAD]
    for scope, title in _SECTIONS:
        lines = [
            f"## {title}",
            "",
            "| variable | default | allowed | same on all ranks | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| `{row['name']}` | {_default(row)} | {_allowed_values(row)} "
            f"| {'yes' if row['agreed'] else 'no'} | {row['help']} |"
            for row in rows
            if row["scope"] == scope
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tfdist.tools.config_docs")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    text = render(native.config().values())
    current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else None
    if current == text:
        sys.stdout.write(f"{PAGE} is current\n")
        return 0
    if options.check:
        sys.stderr.write(f"{PAGE} is not up to date. Run: make docs\n")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
