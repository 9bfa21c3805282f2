"""The tree of the code as a short hash, for records that say what they have tested."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "tfdist", "tfdist_ops", "tests", "recipes", "benchmarks", "docs",
    "setup.py", "pyproject.toml", "README.md",
)  # fmt: skip
RECORDS = "results.json"  # of whatever is recorded: no part of the code
# A comment of C++, or a literal or number in which `//` or a quote begins none.
_CPP = re.compile(
    r'R"(?P<mark>[^\s()\\]*)\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|\b\d[\w.']*"
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)",
    re.DOTALL,
)


def tracked_files(code: Iterable[str] = CODE) -> list[Path]:
    """Files of the tree that count, relative to its root, in a fixed order."""
    out = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *code],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    names = sorted(set(out.splitlines()))
    files = [Path(name) for name in names]
    return [f for f in files if (ROOT / f).is_file() and f.name != RECORDS]


def tree_hash(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents, the first 16 digits.

    Comments, docstrings and blank lines of Python and C++ do not count, so that a
    better comment makes no record out of date.
    """
    digest = hashlib.sha256()
    for file in files:
        content = _hash(file.suffix, (ROOT / file).read_bytes())
        digest.update(f"{file} {content}\n".encode())
    return digest.hexdigest()[:16]


@functools.cache  # some ask for the hash of the tree again and again
def _hash(suffix: str, content: bytes) -> str:
    return hashlib.sha256(statements(suffix, content)).hexdigest()


def statements(suffix: str, content: bytes) -> bytes:
    """A source file without comments, docstrings and blank lines.

    Args:
        suffix: Of the file's name. Only Python and C++ files lose anything.
        content: Of the file.
    """
    if suffix == ".py":
        text = _without_docstrings(_without_python_comments(content.decode()))
    elif suffix in {".cc", ".h", ".cu"}:
        text = _CPP.sub(
            lambda found: " " if found["comment"] else found[0], content.decode()
        )
    else:
        return content
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line).encode()


def _without_python_comments(text: str) -> str:
    lines = io.StringIO(text).readlines()
    for token in tokenize.generate_tokens(iter(lines[:]).__next__):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + "\n"
    return "".join(lines)


def _without_docstrings(text: str) -> str:
    """Empties each docstring: it may be the only statement of its block."""
    lines = text.encode().splitlines(keepends=True)  # offsets of `ast` are in bytes
    for node in ast.walk(ast.parse(text)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        doc = node.body[0]
        first, last = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
        begin, end = lines[first][: doc.col_offset], lines[last][doc.end_col_offset :]
        lines[first : last + 1] = [begin + b'""' + end] + [b"\n"] * (last - first)
    return b"".join(lines).decode()
