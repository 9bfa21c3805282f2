"""Atomic writes of files, which appear under their names only when complete."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from tfdist.training.checkpoint_files import checksum_file, checksum_line, sha256_of

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


def write_with_checksum(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file as `atomic_write` does, and its checksum to a second file.

    Even after a crash, NAME.sha256 contains the checksum of the file NAME: while NAME
    is being replaced, NAME.sha256 lists the checksums of the old and the new content.
    If NAME exists without NAME.sha256, the checksum is written after NAME is replaced.

    Args:
        path: path of the file, or of a link to it; its folder is created if needed.
        write: function that writes the file to a given path.

    Raises:
        OSError: the file could not be written. The error contains the file name.
    """
    listed = checksum_file(path)
    line = before = ""

    def write_and_list(partial: Path) -> None:
        nonlocal line, before
        write(partial)
        line = checksum_line(sha256_of(partial), listed)
        before = _text_of(listed) if path.exists() else ""
        if listed.exists() or not path.exists():  # else the old content is not listed
            _write_text(listed, before + line)

    try:
        atomic_write(path, write_and_list)
    except BaseException:
        if not path.exists():
            listed.unlink(missing_ok=True)
        raise
    if before or not listed.exists():
        # A line for the old content does no harm; neither does a missing checksum.
        with contextlib.suppress(OSError):
            _write_text(listed, line)


def remove_with_checksum(path: Path) -> None:
    """Removes a file and its checksum, if they are there."""
    listed = checksum_file(path)
    path.unlink(missing_ok=True)
    listed.unlink(missing_ok=True)


def _text_of(listed: Path) -> str:
    """Returns the lines with checksums; "" if there are none, or they are damaged."""
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return "".join(f"{line}\n" for line in lines)


def _write_text(path: Path, text: str) -> None:
    def write(partial: Path) -> None:
        partial.write_text(text, encoding="utf-8")

    atomic_write(path, write)


def _remove_abandoned(folder: Path) -> None:
    """Removes partial files of killed processes that have not changed for an hour."""
    for entry in folder.iterdir():
        if _PARTIAL.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # renamed meanwhile, or not permitted
                if time.time() - entry.lstat().st_mtime > _ABANDONED_S:
                    entry.unlink()


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
