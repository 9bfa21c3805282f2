"""Atomic writes of the output files of `tfdist bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def check_writable(path: Path) -> None:
    """Checks that `atomic_write` can write a file, by writing and removing one.

    Raises:
        OSError: the file cannot be written.
    """
    part = _part(path)
    with part.open("ab"):
        pass
    part.unlink(missing_ok=True)  # a different rank may already have removed it


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary file, which replaces `path` once it is complete."""
    part = _part(path)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
