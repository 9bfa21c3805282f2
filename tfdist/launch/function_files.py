"""Files through which `tfdist.run` and `horovod.run` exchange data with their ranks.

The caller creates the folder, which only the caller's user can open.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.core import pickling, term_signal

KEY, CALL = "key", "call"
MAX_BYTES = 1 << 30


class Failure(NamedTuple):
    """An exception that the function has raised on a rank."""

    rank: int
    text: str  # traceback of the exception


def write(path: Path, data: bytes) -> None:
    """Writes, atomically, a file that only this user can read."""
    # Ranks may write at the same time, and a lost rank may leave its part.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    part.rename(path)


def seal(obj: Any, about: str, key: bytes) -> bytes:
    """Pickles an object for a file; `about` is the name of the file."""
    return pickling.seal(obj, about, key, max_bytes=MAX_BYTES)


def results(folder: Path, key: bytes) -> list[Any]:
    """Returns the results of the ranks with which the job has ended, in rank order.

    Raises:
        RuntimeError: a rank left no result, or it cannot be loaded.
    """
    size, first = _result_of(folder, 0, key)
    others = [_result_of(folder, rank, key) for rank in range(1, size)]
    return [first, *(result for _, result in others)]


def _result_of(folder: Path, rank: int, key: bytes) -> tuple[int, Any]:
    name = f"result.{rank}"
    try:
        return pickling.unseal((folder / name).read_bytes(), name, key)
    except (OSError, pickling.NotLoadedError) as error:
        raise RuntimeError(
            f"The result of the function on rank {rank} cannot be read: {error}"
        ) from error


def first_failure(folder: Path) -> Failure | None:
    """Returns the first exception that the function has raised on a rank."""
    found = list(folder.glob("error.*[0-9]"))
    if not found:
        return None
    first = min(found, key=lambda file: file.stat().st_mtime_ns)
    return Failure(int(first.suffix[1:]), first.read_text(encoding="utf-8"))


def call(folder: Path, find_place: Callable[[], tuple[int, int]]) -> None:
    """Calls the function in the folder, and writes its result or its exception there.

    Args:
        folder: the folder.
        find_place: returns the rank of this process and the number of ranks. Called
            when the function has ended, because they change in an elastic job.

    Raises:
        BaseException: the function has raised it. `SystemExit` with code 143 is not
            written: the rank leaves an elastic job, or has saved after SIGTERM.
    """
    key = (folder / KEY).read_bytes()
    function, args, kwargs = pickling.unseal((folder / CALL).read_bytes(), CALL, key)
    try:
        result = function(*args, **kwargs)
        rank, size = find_place()
        name = f"result.{rank}"
        sealed = seal((size, result), name, key)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code == term_signal.EXIT_CODE:
            raise
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, inside)
        text = "".join(lines).encode("utf-8", "replace")
        write(folder / f"error.{find_place()[0]}", text)
        raise
    write(folder / name, sealed)
