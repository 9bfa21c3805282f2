"""Checksums of checkpoint files, and the newest undamaged checkpoint in a folder.

The checksum of the file NAME is stored next to it, in NAME.sha256. It has the format of
`sha256sum`, so that `sha256sum -c NAME.sha256` checks the file without tfdist.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

SUFFIX = ".sha256"
_logger = logging.getLogger("tfdist")


def newest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Returns the newest undamaged checkpoint in a folder, or matching a pattern.

    A damaged or incomplete file is skipped, and the reason is logged. Files that
    `tfdist.callbacks.Checkpoint` has written are compared with their checksums
    (NAME.sha256). For a ".keras" file without a checksum, the CRC-32 of each member of
    the archive is checked. Other files without a checksum are not checked.

    If the file names differ only in one integer ("step-0000500.keras",
    "step-0001000.keras"), the file with the largest integer is the newest. Otherwise,
    for example if a loss is part of the names, the modification time decides.

    This is not a collective operation: call it on one rank, and broadcast the result.

    Args:
        path: a folder, whose ".keras" files are considered; or a pattern such as
            `run/step-*.keras` or `run/*.weights.h5`; or the name of a single file.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: all files are damaged; the message contains the reasons.

    Example:
        >>> import pathlib, tempfile, tfdist
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> for step in (5, 10):
        ...     _ = (folder / f"step-{step}.weights.h5").write_bytes(b"weights")
        >>> tfdist.newest_checkpoint(folder / "*.weights.h5").name
        'step-10.weights.h5'
    """
    times_ns: dict[str, float] = {}
    for name in _candidates(path):
        try:
            times_ns[name] = os.stat(name).st_mtime_ns
        except FileNotFoundError:  # a running job has removed it meanwhile
            continue
    if not times_ns:
        raise FileNotFoundError(f"There is no checkpoint {os.fspath(path)!r}.")
    reasons = []
    for name in newest_first(times_ns):
        reason = damage(name)
        if reason is None:
            return Path(name)
        reasons.append(f"{name}: {reason}")
        if len(times_ns) > 1:
            _logger.warning("Skipped the checkpoint %s: %s.", name, reason)
    raise ValueError(
        f"Expected an undamaged checkpoint, but found none: {'; '.join(reasons)}. Use "
        "an older checkpoint. If you have replaced a file on purpose, remove its "
        f"{SUFFIX} file."
    )


def is_several(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a folder or a pattern, not the name of a file."""
    name = os.fspath(path)
    return os.path.isdir(name) or (not os.path.exists(name) and glob.has_magic(name))


def damage(path: str | os.PathLike[str]) -> str | None:
    """Describes the damage to a checkpoint; returns None if no damage is found."""
    listed = checksum_file(path)
    try:
        if listed.exists():
            digest = sha256_of(path)
            if digest.encode() in listed.read_bytes().split():
                return None
            return f"its SHA-256 is {digest}, which is not in {listed}"
        if os.fspath(path).endswith(".keras"):
            return _damage_of_archive(path)
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def _damage_of_archive(path: str | os.PathLike[str]) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
    # The class of the error depends on which byte is damaged.
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
        return f"it is not a complete .keras file: {error}"
    except (NotImplementedError, RuntimeError) as error:  # compressed or encrypted
        return f"it is not a .keras file: {error}"
    return None if member is None else f"the CRC-32 of its member {member} is wrong"


def checksum_file(path: str | os.PathLike[str]) -> Path:
    """Returns the path of the file with the checksum; links are followed."""
    return Path(os.path.realpath(path) + SUFFIX)


def checksum_line(digest: str, listed: Path) -> str:
    r"""Returns the line of a checksum file that contains a given digest.

    Args:
        digest: SHA-256 of the checkpoint, in hexadecimal.
        listed: path of the checksum file.

    Example:
        >>> checksum_line("e3b0", Path("run/step-5.keras.sha256"))
        'e3b0  step-5.keras\n'
    """
    return f"{digest}  {listed.name.removesuffix(SUFFIX)}\n"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_first(times: Mapping[str, float]) -> list[str]:
    """Sorts file names from the newest to the oldest.

    Args:
        times: the modification time of each file name, in any unit.

    Returns:
        The names, sorted by number if they differ only in one integer, else by time.

    Example:
        >>> newest_first({"step-9.keras": 2.0, "step-10.keras": 1.0})
        ['step-10.keras', 'step-9.keras']
        >>> newest_first({"best.keras": 2.0, "step-10.keras": 1.0})
        ['best.keras', 'step-10.keras']
    """
    parts = {name: re.split(r"(\d+)", name) for name in times}
    columns = list(zip(*parts.values(), strict=False))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    same_length = len({len(one) for one in parts.values()}) == 1
    place = varying[0] if same_length and len(varying) == 1 else 0
    if place % 2 and not _is_metric([column[0] for column in columns], place):
        return sorted(
            times, key=lambda name: (int(parts[name][place]), name), reverse=True
        )
    return sorted(times, key=lambda name: (times[name], name), reverse=True)


def _is_metric(parts: Sequence[str], place: int) -> bool:
    """Returns whether digits in a file name are part of a decimal such as 0.25 or 2e-5.

    Args:
        parts: the name, split so that the members at odd indices are digits.
        place: index of the digits.
    """
    before = parts[place - 1] if place > 1 else ""
    after = parts[place + 1] if place + 2 < len(parts) else ""
    return any(re.fullmatch(r"\.|e[-+]?", text) for text in (before, after))


def _candidates(path: str | os.PathLike[str]) -> list[str]:
    name = os.fspath(path)
    if os.path.isdir(name):
        name = os.path.join(glob.escape(name), "*.keras")
    elif not is_several(name):
        return [name]
    return [one for one in glob.glob(name) if not one.endswith(SUFFIX)]
