"""Files that `tfdist bench` writes: the whole file or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def try_out(path: Path) -> None:
    """Writes what `whole` would, and removes it.

    Raises:
        OSError: it cannot be written.
    """
    part = _part(path)
    with part.open("ab"):
        pass
    part.unlink(missing_ok=True)  # another rank may be quicker


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Another file to write, which takes the place of `path` once it is complete."""
    part = _part(path)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
