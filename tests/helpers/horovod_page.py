"""Writes docs/horovod-names.md from the tables of Horovod's and Keras 2's names.

    cd tests && python -m helpers.horovod_page            writes the page
    cd tests && python -m helpers.horovod_page --check    exits with 1 when it is stale

`make docs` does the first; a test compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import keras
from helpers import horovod_interface, keras2_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "horovod-names.md"
_HEAD = """\
# Names of Horovod and of Keras 2

<!-- Made from the signatures of both by `make docs`; do not edit. -->

The effect of each public name and parameter under `tfdistrun --horovod`, and the test
file that checks it. Names with the same effect share a row. The page
[From Horovod](from-horovod.md) says what the mode does and why some things differ.
"""
_HOROVOD = """\
## Horovod 0.28.1

Names are those below `horovod`, with the module before the colon. A function of several
modules is listed under the first. All parameters and defaults are Horovod's.
"""
_KERAS = """\
## Keras 2.15

Names are those below `keras` and `tf.keras`. What is not listed is the same in Keras 3.
An old spelling that works gives one warning with the new spelling; errors name it too.
`<name>` is the last part of the old name. The table was made with Keras {version}.
"""
_COLUMNS = "| name or parameter | effect | test |\n|---|---|---|\n"


def render() -> str:
    """The text of the page."""
    horovod = _lines(horovod_interface.table(), ":")
    names = _lines(keras2_table.table(), ".")
    head = _KERAS.format(version=keras.__version__)
    parts = (_HEAD, _HOROVOD, _COLUMNS + horovod, head, _COLUMNS + names)
    return "\n".join(parts)


def _lines(rows: Iterable[tuple[str, str, str]], before_name: str) -> str:
    """Rows of a Markdown table: one for each effect.

    Raises:
        ValueError: a cell is empty.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, effect, test in rows:
        if not (name and effect and test):
            raise ValueError(f"empty cell: {(name, effect, test)}")
        called, separator, parameter = name.partition("(")
        last = called.rpartition(before_name)[2]
        if before_name == ".":
            effect = effect.replace(f".{last}`", ".<name>`")
            effect = effect.replace(f"write {last}(", "write <name>(")
        groups.setdefault((effect, test), []).append(name)
    lines = []
    for (effect, test), names in groups.items():
        cells = (", ".join(f"`{name}`" for name in names), effect, f"`{test}`")
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |\n")
    return "".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m helpers.horovod_page")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    text = render()
    if options.check:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        sys.stderr.write("" if is_current else f"{PAGE} is stale. Run: make docs\n")
        return 0 if is_current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
