"""A file that appears under its name only when it is complete and on disk."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

_PARTIAL = re.compile(r"\.partial-[0-9a-f]{8}-.+")
_ABANDONED_S = 3600.0  # a partial file that nobody has written to for so long


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` make a file, which gets its name only when it is complete.

    After a crash of the process or the machine the name stands for the old content
    or the new one, never for a part. Parts that such a crash has left in the folder
    are removed when they are an hour old.

    Args:
        path: name of the file, or of a link to it; its folder is made if needed.
        write: writes the file to the path it is given.

    Raises:
        OSError: the disk refused; with the name of the file.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    # Keras chooses the format by the ending, so the marks come first.
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
            # A write to a full disk does not say where.
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


def _remove_abandoned(folder: Path) -> None:
    """Removes partial files of processes that were killed; not of another job."""
    for entry in folder.iterdir():
        if _PARTIAL.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # it is whole meanwhile, or not ours
                if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                    entry.unlink()


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
