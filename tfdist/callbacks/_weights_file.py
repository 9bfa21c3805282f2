"""Saves the weights of a model to a file, through a buffer in memory."""

from __future__ import annotations

from pathlib import Path

import keras
from keras.src.saving import saving_lib


def save_weights(model: keras.Model, path: Path) -> None:
    """Saves what `model.save_weights` saves.

    After a failed write to a full disk, HDF5 crashes the process when it closes the
    file or opens the next one. Therefore HDF5 writes to a buffer in memory, as for a
    ".keras" file, and the content of the buffer is then written to the disk.

    Args:
        model: a built model.
        path: path of a new file.

    Raises:
        OSError: the file could not be written.
    """
    archive = _FileOfOneMember(path)
    store = saving_lib.H5IOStore(path.name, archive=archive, mode="w")
    try:
        saving_lib._save_state(
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
        )
    except BaseException:
        store.archive = None  # write nothing
        raise
    finally:
        store.close()


class _FileOfOneMember:
    """Stands in for a `zipfile.ZipFile`, and writes its only member to a plain file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def writestr(self, name: str, content: bytes) -> None:
        """Writes the content of the member to the file."""
        self._path.write_bytes(content)
