"""Writes docs/arguments.md from the signatures and docs/arguments.yaml (`make docs`).

python .ci/argument_docs.py           writes the page
python .ci/argument_docs.py --check   exits with 1 when the page is not current

An argument without a row, a row without an argument and an empty cell are errors.
"""

import argparse
import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import yaml

import tfdist
from tfdist.launch import options

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "arguments.md"
DATA = ROOT / "docs" / "arguments.yaml"
_HEAD = """\
# Arguments on several ranks

<!-- Made from the signatures and docs/arguments.yaml by `make docs`; do not edit. -->

What each argument does when several ranks train together, and the test in `tests/` that
verifies it. `timeout_s` is everywhere the number of seconds to wait, by default
`TFDIST_TIMEOUT_S`.
"""


def arguments_of(name: str) -> dict[str, str]:
    """The arguments of a function or class, in order, and their defaults as text.

    Args:
        name: "keras.Model.fit", "tfdist.init", or "launcher" for the options of
            tfdistrun.
    """
    if name == "launcher":
        return _options_of_launcher()
    found: Any = {"keras": keras, "tfdist": tfdist}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    return {p.name: _default(p.default) for p in named if p.name != "self"}


def _options_of_launcher() -> dict[str, str]:
    found = {}
    for action in options.parser()._actions:
        if action.help == argparse.SUPPRESS:  # of other launchers, which are refused
            continue
        names = [n for n in action.option_strings if n.startswith("--")]
        short = "-np" if "-np" in action.option_strings else ""
        name = short or (names or action.option_strings or [action.dest])[0]
        found[name] = _default(action.default)
    return found


def _default(value: Any) -> str:
    if value in (inspect.Parameter.empty, argparse.SUPPRESS):
        return "-"
    if isinstance(value, tuple) and value:
        return ", ".join(getattr(one, "name", repr(one)) for one in value)
    return f"`{getattr(value, 'name', value)!s}`" if value != "" else '`""`'


@functools.cache
def test_names(path: Path) -> set[str]:
    """The names of the tests in a file; none if there is no such file."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def problems(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Finds faults of the table; empty if there are none.

    Args:
        sections: content of docs/arguments.yaml.
    """
    found = []
    for title, section in sections.items():
        expected, rows = arguments_of(section["of"]), section["rows"]
        found += [f"{title}: no row for {n}" for n in expected if n not in rows]
        found += [f"{title}: {n} is not an argument" for n in rows if n not in expected]
        for name, row in rows.items():
            cells = [*row, "", ""][:2]
            if len(row) != 2 or not all(str(cell).strip() for cell in cells):
                found.append(f"{title}: {name} has an empty cell")
                continue
            path, _, test = row[1].partition("::")
            if test not in test_names(ROOT / "tests" / path):
                found.append(f"{title}: {name}: there is no test {row[1]}")
    return found


def render(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The page as Markdown.

    Args:
        sections: content of docs/arguments.yaml, without problems.
    """
    parts = [_HEAD]
    for title, section in sections.items():
        lines = [f"## {title}", ""]
        if "note" in section:
            lines += [*textwrap.wrap(section["note"], 100), ""]
        lines += ["| argument | default | effect | test |", "|---|---|---|---|"]
        for name, default in arguments_of(section["of"]).items():
            effect, test = section["rows"][name]
            lines.append(f"| `{name}` | {default} | {effect} | `{test}` |")
        parts.append("\n".join(lines if section["rows"] else lines[:1] + ["", "None."]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def load() -> dict[str, dict[str, Any]]:
    """The content of docs/arguments.yaml."""
    return yaml.safe_load(DATA.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python .ci/argument_docs.py")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    is_check = parser.parse_args(arguments).check
    sections = load()
    if wrong := problems(sections):
        sys.stderr.write("\n".join([f"{DATA}:", *wrong]) + "\n")
        return 1
    text = render(sections)
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
