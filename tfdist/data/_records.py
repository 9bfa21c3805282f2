"""Random access to the records of files."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives.tf_ops.op_library import native_ops
from tfdist.data import _record_index as indexing
from tfdist.data import _record_ranks as ranks


class Records:
    """Records that are read by their positions, in any order.

    Created by `Records.from_tfrecords` or `Records.from_files`. The records have the
    positions 0..len(records) - 1, in the order of the files and of the records in
    each. `read` works eagerly, in a `tf.function` and in `tf.data`'s `map`:

    Example:
        >>> import tensorflow as tf, tfdist
        >>> with tf.io.TFRecordWriter("a.tfrecord") as writer:
        ...     for text in ("zero", "one", "two"):
        ...         writer.write(text)
        >>> records = tfdist.data.Records.from_tfrecords(["a.tfrecord"])
        >>> records.read([2, 0]).numpy().tolist()
        [b'two', b'zero']
        >>> order = tfdist.data.epoch_order(len(records), seed=4, epoch=0)
        >>> dataset = tf.data.Dataset.from_tensor_slices(order).map(
        ...     records.read, num_parallel_calls=tf.data.AUTOTUNE)
        >>> sorted(dataset.as_numpy_iterator())
        [b'one', b'two', b'zero']
        >>> records.locate(2)
        'a.tfrecord, record 2'
    """

    def __init__(self, files: Sequence[str], index: indexing.Index | None) -> None:
        """Used by `from_tfrecords` and `from_files`; index None: a file is a record."""
        self._files = tuple(files)
        self._index = index
        self._first = None if index is None else index.first

    @classmethod
    def from_tfrecords(
        cls,
        files: Sequence[str | os.PathLike[str]],
        counts: Sequence[int] | None = None,
        *,
        all_shards: bool = True,
        cache: str | os.PathLike[str] | None = None,
        together: bool = True,
        timeout_s: float | None = None,
    ) -> Records:
        """Opens TFRecord files for random access.

        Reads the header of every record, 12 bytes, to find where each begins. With
        several ranks all call it, each reads a part of the files, and all get the
        complete index. An error on one rank is raised on all.

        Args:
            files: names of the files in their order, the same on all ranks; also of a
                remote file system that TensorFlow supports (`gs://...`).
            counts: expected number of records of each file, e.g. the `shard_lengths` of
                tensorflow-datasets; default: unknown, but at least one.
            all_shards: whether all 8 files named `...-00003-of-00008...` have to be in
                the list; False: the list may have a part of them. Default True.
            cache: file (`.npz`) in which rank 0 keeps the index for the next start;
                used as long as the files keep their sizes and modification times.
                Default: none. Names on other ranks are ignored.
            together: False: this rank does all the work, and may have files of its
                own. Default True.
            timeout_s: seconds to wait for the slowest rank; default
                `TFDIST_TIMEOUT_S`.

        Returns:
            The records.

        Raises:
            TypeError: `cache` is not a name.
            FileNotFoundError: a file is missing.
            OSError: a file cannot be read, or `cache` cannot be written.
            ValueError: a file is truncated, damaged or no TFRecord file, its number of
                records differs from `counts`, or a file of its family is missing. The
                message names the file, the expected and the actual value.
            tfdist.RankFailedError: one of these, on another rank.
            tfdist.MismatchError: the ranks have different files.
        """
        call = ranks.coordinated_call(
            "data.Records.from_tfrecords", together, timeout_s
        )

        def look() -> tuple[str, ...]:
            paths = indexing.paths_of(files)
            if all_shards:
                indexing.check_families(paths)
            if counts is not None and len(counts) != len(paths):
                raise ValueError(
                    f"Expected counts of {len(paths)} files, got {len(counts)} counts."
                )
            return paths

        paths = ranks.agreed_paths(call, look)
        index = ranks.build(call, paths, counts, cache)
        if len(index.lengths) == 0:
            raise ValueError(
                f"Expected records, found none in all {len(paths)} files: {paths[0]}..."
            )
        return cls(paths, index)

    @classmethod
    def from_files(
        cls,
        files: Sequence[str | os.PathLike[str]],
        *,
        together: bool = True,
        timeout_s: float | None = None,
    ) -> Records:
        """Uses complete files as records, e.g. a folder of pictures.

        The files are not opened before they are read. With several ranks all call it,
        and their lists are compared.

        Args:
            files: names of the files in their order, the same on all ranks (sort the
                list of a folder).
            together: False: this rank may have files of its own. Default True.
            timeout_s: seconds to wait for the slowest rank; default
                `TFDIST_TIMEOUT_S`.

        Returns:
            The records: position i is the content of `files[i]`.

        Raises:
            TypeError: one name instead of a list.
            ValueError: no file, or one twice.
            tfdist.RankFailedError: one of these, on another rank.
            tfdist.MismatchError: the ranks have different files, or another order.
        """
        call = ranks.coordinated_call("data.Records.from_files", together, timeout_s)
        return cls(ranks.agreed_paths(call, lambda: indexing.paths_of(files)), None)

    def __len__(self) -> int:
        """Number of records."""
        return len(self._files if self._index is None else self._index.lengths)

    def __repr__(self) -> str:
        """Shows the numbers of records and files."""
        return f"<Records: {len(self)} in {len(self._files)} files>"

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files."""
        return self._files

    @property
    def counts(self) -> np.ndarray:
        """int64 `[files]`: records of each file."""
        if self._index is None:
            return np.ones(len(self._files), np.int64)
        return self._index.counts

    def locate(self, position: int) -> str:
        """Describes the place of a record: `"FILE, record 17"`, or `"FILE"`.

        Raises:
            IndexError: no record has that position.
        """
        if not 0 <= position < len(self):
            raise IndexError(
                f"Expected a position of 0..{len(self) - 1}, got {position}."
            )
        if self._first is None:
            return self._files[position]
        file = int(np.searchsorted(self._first, position, side="right")) - 1
        return f"{self._files[file]}, record {position - self._first[file]}"

    def read(self, positions: tf.Tensor) -> tf.Tensor:
        """Reads records.

        Args:
            positions: integer tensor of any shape `S`, each 0..len(self) - 1.

        Returns:
            string tensor of shape `S`: the records.

        Raises:
            TypeError: the positions are no integers.
            tensorflow.errors.DataLossError: the checksum of a record is wrong, or the
                file ends before it; the message names file and record.
            tensorflow.errors.NotFoundError: a file is missing.
            tensorflow.errors.InvalidArgumentError: a position is out of range.
        """
        positions = tf.convert_to_tensor(positions)
        if not positions.dtype.is_integer:
            raise TypeError(
                f"Expected integers as positions, got {positions.dtype.name}."
            )
        return native_ops().tfdist_read_records(
            **self._tensors,
            positions=tf.cast(positions, tf.int64),
            whole_files=self._index is None,
            keep_open=_keep_open(len(self._files)),
        )

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        """The index for the operation: captured by a graph, not copied into it."""
        index = self._index
        none = np.zeros(0, np.int64)
        with tf.init_scope(), tf.device("/CPU:0"):
            return {
                "files": tf.constant(self._files),
                "first": tf.constant(none if index is None else index.first),
                "offsets": tf.constant(none if index is None else index.offsets),
                "lengths": tf.constant(none if index is None else index.lengths),
            }


def _keep_open(files: int) -> int:
    """Returns how many files a kernel may keep open: the process has many others.

    In eager mode 0: TensorFlow keeps the kernels of eager operations forever, and a
    file that was rewritten must not be read from its old copy.
    """
    if tf.executing_eagerly():
        return 0
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return max(1, min(files, limit // 8, 1024))
