"""Atomic writing of the files of `tfdist bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def check_writable(path: Path) -> None:
    """Writes a file as `atomic_write` would, and removes it.

    Raises:
        OSError: it cannot be written.
    """
    part = _part(path)
    with part.open("ab"):
        pass
    part.unlink(missing_ok=True)  # another rank may be quicker


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary file, which replaces `path` once it is complete."""
    part = _part(path)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
