"""Files through which `horovod.run` exchanges data with the ranks it starts.

The caller creates the folder, and only its user can open it. A rank runs
`python -m tfdist.horovod.runner FOLDER`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tfdist.core import pickling
from tfdist.horovod.runner.common.util.env import get_env_rank_and_size

KEY, CALL = "key", "call"
MAX_BYTES = 1 << 30


def write(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read; writes all of it or nothing."""
    part = path.with_name(f"{path.name}.part")  # result.0 and result.1 at the same time
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    part.rename(path)


def seal(obj: Any, about: str, key: bytes) -> bytes:
    """Returns an object as the bytes of a file."""
    return pickling.seal(obj, about, key, max_bytes=MAX_BYTES)


def result_of(folder: Path, rank: int, key: bytes) -> Any:
    """Returns the result of the function on a rank.

    Raises:
        RuntimeError: the rank left no result, or it cannot be loaded.
    """
    name = f"result.{rank}"
    try:
        return pickling.unseal((folder / name).read_bytes(), name, key)
    except (OSError, pickling.NotLoadedError) as error:
        raise RuntimeError(
            f"horovod.run: the result of rank {rank} cannot be read: {error}"
        ) from error


def main(name: str) -> None:
    """Calls the function in the folder `name`, and writes its result there."""
    folder = Path(name)
    key = (folder / KEY).read_bytes()
    func, args, kwargs = pickling.unseal((folder / CALL).read_bytes(), CALL, key)
    result = func(*args, **kwargs)
    name = f"result.{get_env_rank_and_size()[0]}"
    write(folder / name, seal(result, name, key))
