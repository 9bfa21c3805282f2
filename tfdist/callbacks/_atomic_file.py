"""Atomic writes of files, which appear under their names only when complete."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

_PARTIAL = re.compile(r"\.partial-[0-9a-f]{8}-.+")
_ABANDONED_S = 3600.0  # age at which an unchanged partial file is removed


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file under a temporary name and renames it when it is complete.

    After a crash of the process or the machine, the file has either its old or its new
    content. Partial files that a crash left in the folder are removed when they are an
    hour old.

    Args:
        path: path of the file, or of a link to it; its folder is created if needed.
        write: function that writes the file to a given path.

    Raises:
        OSError: the file could not be written. The error contains the file name.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    # Keras chooses the format by the suffix, so the temporary name adds a prefix.
    partial = target.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        write(partial)
        _sync(partial)
        os.replace(partial, target)
        _sync(target.parent)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno and error.filename is None:
            # The error of a write to a full disk has no file name.
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _remove_abandoned(folder: Path) -> None:
    """Removes partial files of killed processes that have not changed for an hour."""
    for entry in folder.iterdir():
        if _PARTIAL.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # renamed meanwhile, or not ours
                if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                    entry.unlink()


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
