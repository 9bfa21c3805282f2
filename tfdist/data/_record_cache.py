"""Cache file that stores the index of record files for later runs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import uuid
import zipfile
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.data import _record_index as indexing

_FORMAT = 1
_ZIP = b"PK\x03\x04"
_MEMBERS = {
    f"{name}.npy" for name in ("format", "files", "stamps", "counts", "lengths")
}
_logger = logging.getLogger("tfdist")


class Cache:
    """A cache file, which stores the index of record files.

    Args:
        name: path of the cache file.
        paths: the indexed files.
    """

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        self._name = name
        self._paths = paths
        self._stamps: np.ndarray | None = None  # `stamps_of` before indexing

    def read(self) -> indexing.Index | None:
        """Returns the stored index; None if there is none or the files have changed.

        Also returns None, with a warning, if the cache file is damaged.

        Raises:
            FileNotFoundError: one of the indexed files is missing.
            OSError: the cache file cannot be read.
            ValueError: the cache file exists but is not an index.
        """
        self._stamps = stamps_of(self._paths)
        try:
            with tf.io.gfile.GFile(self._name, "rb") as file:
                data = file.read()
        except tf.errors.NotFoundError:
            return None
        except tf.errors.OpError as error:
            raise OSError(f"{self._name}: cannot be read: {error.message}") from None
        if not _is_index(data):
            raise ValueError(
                f"{self._name}: expected an index of records from an earlier run, or "
                "no file, found a different file, which is not overwritten. Pass a "
                "different name as cache=, or remove the file."
            )
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as kept:
                same = (
                    int(kept["format"]) == _FORMAT
                    and str(kept["files"]) == indexing.digest(self._paths)
                    and np.array_equal(kept["stamps"], self._stamps)
                )
                index = indexing.Index(kept["counts"], kept["lengths"])
        except Exception as error:  # a damaged zip file can raise anything
            _logger.warning(
                "%s: expected an index of records, found something else (%s). The "
                "index is created again.",
                self._name,
                error,
            )
            return None
        return index if same and index.fits(self._stamps[:, 0]) else None

    def write(self, index: indexing.Index) -> None:
        """Stores the index atomically.

        Raises:
            OSError: the file cannot be written.
        """
        data = io.BytesIO()
        np.savez(
            data,
            format=np.int64(_FORMAT),
            files=np.array(indexing.digest(self._paths)),
            stamps=self._stamps,
            counts=index.counts,
            lengths=index.lengths,
        )
        new = f"{self._name}.{uuid.uuid4().hex}.tmp"
        try:
            with tf.io.gfile.GFile(new, "wb") as file:
                file.write(data.getvalue())
            tf.io.gfile.rename(new, self._name, overwrite=True)
        except tf.errors.OpError as error:
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(new)
            raise OSError(
                f"{self._name}: the index cannot be written to this file: "
                f"{error.message}. Pass as cache= a file in an existing, writable "
                "folder."
            ) from None


def _is_index(data: bytes) -> bool:
    """Returns whether a file is an index, even a damaged one, and may be replaced."""
    if not data.startswith(_ZIP):
        return not data
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except (
        Exception
    ):  # a damaged zip file raises many kinds of errors: it is probably an index
        return True
    return bool(_MEMBERS.intersection(names))


def stamps_of(paths: Sequence[str]) -> np.ndarray:
    """Returns the size and modification time (ns) of each file; int64 `[files, 2]`.

    Raises:
        FileNotFoundError: a file is missing.
    """

    def stamp(path: str) -> tuple[int, int]:
        try:
            found = tf.io.gfile.stat(path)
        except tf.errors.NotFoundError as error:
            raise FileNotFoundError(f"{path}: {error.message}") from None
        return found.length, found.mtime_nsec

    with concurrent.futures.ThreadPoolExecutor(indexing.THREADS) as executor:
        return np.array(list(executor.map(stamp, paths)), np.int64)
