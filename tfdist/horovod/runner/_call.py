"""Files that `horovod.run` and the ranks it starts exchange through a folder.

The folder is the caller's, and only its user can enter it. A rank is
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
    """Writes a file that only this user can read, whole or not at all."""
    part = path.with_name(f"{path.name}.part")  # result.0 and result.1 at once
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    part.rename(path)


def seal(obj: Any, about: str, key: bytes) -> bytes:
    """An object as bytes of a file."""
    return pickling.seal(obj, about, key, max_bytes=MAX_BYTES)


def result_of(folder: Path, rank: int, key: bytes) -> Any:
    """Returns the result of the function on a rank.

    Raises:
        RuntimeError: it left nothing, or what cannot be loaded here.
    """
    name = f"result.{rank}"
    try:
        return pickling.unseal((folder / name).read_bytes(), name, key)
    except (OSError, pickling.NotLoadedError) as error:
        raise RuntimeError(
            f"horovod.run: the result of rank {rank} cannot be read: {error}"
        ) from error


def main(name: str) -> None:
    """Calls the function of the folder `name`, and leaves its result there."""
    folder = Path(name)
    key = (folder / KEY).read_bytes()
    func, args, kwargs = pickling.unseal((folder / CALL).read_bytes(), CALL, key)
    result = func(*args, **kwargs)
    name = f"result.{get_env_rank_and_size()[0]}"
    write(folder / name, seal(result, name, key))
