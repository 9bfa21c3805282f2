"""The tree of the code as a short hash, for records that say what they have tested."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "tfdist", "tfdist_ops", "tests", "recipes", "benchmarks", "docs",
    "setup.py", "pyproject.toml", "README.md",
)  # fmt: skip
RECORDS = "results.json"  # of whatever is recorded: no part of the code


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
    """SHA-256 over names and contents, the first 16 digits."""
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
        digest.update(f"{file} {content}\n".encode())
    return digest.hexdigest()[:16]
