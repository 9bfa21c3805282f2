"""Random access to records in files."""

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
    """Records stored in files, which can be read by index, in any order.

    To create an instance, call `Records.from_tfrecords` or `Records.from_files`. The
    records are numbered 0..len(records) - 1, in the order of the files and of the
    records in each file. `read` works in eager mode, in a `tf.function`, and in
    `tf.data.Dataset.map`.

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
        """Initializes the records; without an index, each file is one record."""
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

        Reads the 12-byte header of every record and builds an index of all record
        offsets. With more than one rank, all ranks have to call this method (unless
        `together=False`). Each rank then reads the headers of a part of the files, and
        all ranks get the complete index. An error on one rank is raised on all ranks.

        Args:
            files: file names, in the same order on all ranks. Names on a remote file
                system that TensorFlow supports (`gs://...`) are allowed.
            counts: expected number of records in each file, e.g. the `shard_lengths`
                of tensorflow-datasets. Default: any number, but at least one.
            all_shards: whether the list must contain all files of a split, e.g. all 8
                files if one is named `...-00003-of-00008...`. Default True.
            cache: file (`.npz`) in which rank 0 stores the index for the next run. The
                stored index is used as long as the sizes and modification times of the
                files do not change. The names passed on the other ranks are ignored.
                With `together=False`, each rank uses its own cache file. Default: no
                cache.
            together: whether all ranks have the same files and share the work. If
                False, this rank indexes all its files alone, and its files may differ
                from those of the other ranks. Default True.
            timeout_s: seconds to wait for the slowest rank; default
                `TFDIST_TIMEOUT_S`.

        Returns:
            The records.

        Raises:
            TypeError: `files` is a single name instead of a list, or `cache` is not a
                name.
            FileNotFoundError: a file is missing.
            OSError: a file cannot be read, or `cache` cannot be read or written.
            ValueError: a file is truncated, damaged or not a TFRecord file, its number
                of records differs from `counts`, a file of the split is missing, the
                list is empty or contains a file twice, or `cache` is an existing file
                that is not an index. The message names the file and the expected and
                actual values.
            tfdist.RankFailedError: another rank raised one of these errors.
            tfdist.MismatchError: the ranks have different files or different orders.
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
                    f"Expected {len(paths)} counts, one per file, got {len(counts)}."
                )
            return paths

        paths = ranks.agreed_paths(call, look)
        index = ranks.build(call, paths, counts, cache)
        if len(index.lengths) == 0:
            raise ValueError(
                f"Expected records, found none in {len(paths)} files: {paths[0]}..."
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
        """Uses complete files as records, e.g. a folder of images.

        A file is opened only when its record is read. With more than one rank, all
        ranks have to call this method (unless `together=False`), and their lists of
        files are compared.

        Args:
            files: file names, in the same order on all ranks. If they come from a
                folder, sort them.
            together: whether all ranks have the same files. If False, the lists are
                not compared, and the ranks may have different files. Default True.
            timeout_s: seconds to wait for the slowest rank; default
                `TFDIST_TIMEOUT_S`.

        Returns:
            The records; record i is the content of `files[i]`.

        Raises:
            TypeError: `files` is a single name instead of a list.
            ValueError: the list is empty or contains a file twice.
            tfdist.RankFailedError: another rank raised one of these errors.
            tfdist.MismatchError: the ranks have different files or different orders.
        """
        call = ranks.coordinated_call("data.Records.from_files", together, timeout_s)
        return cls(ranks.agreed_paths(call, lambda: indexing.paths_of(files)), None)

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self._files if self._index is None else self._index.lengths)

    def __repr__(self) -> str:
        """Returns a string with the number of records and the number of files."""
        return f"<Records: {len(self)} in {len(self._files)} files>"

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files."""
        return self._files

    @property
    def counts(self) -> np.ndarray:
        """int64 `[files]`: number of records in each file."""
        if self._index is None:
            return np.ones(len(self._files), np.int64)
        return self._index.counts

    def locate(self, position: int) -> str:
        """Returns the location of a record: `"FILE, record 17"`, or `"FILE"`.

        Args:
            position: index of the record, 0..len(self) - 1.

        Raises:
            IndexError: the position is out of range.
        """
        if not 0 <= position < len(self):
            raise IndexError(
                f"Expected position to be in 0..{len(self) - 1}, got {position}."
            )
        if self._first is None:
            return self._files[position]
        file = int(np.searchsorted(self._first, position, side="right")) - 1
        return f"{self._files[file]}, record {position - self._first[file]}"

    def read(self, positions: tf.Tensor) -> tf.Tensor:
        """Reads records.

        Args:
            positions: indices of the records, 0..len(self) - 1, as an integer tensor
                of any shape `S`.

        Returns:
            The records, as a string tensor of shape `S`.

        Raises:
            TypeError: the positions are not integers.
            tensorflow.errors.DataLossError: the checksum of a record is wrong, or the
                file ends before the record does. The message names the file and the
                record.
            tensorflow.errors.NotFoundError: a file is missing.
            tensorflow.errors.InvalidArgumentError: a position is out of range.
        """
        positions = tf.convert_to_tensor(positions)
        if not positions.dtype.is_integer:
            raise TypeError(f"Expected integer positions, got {positions.dtype.name}.")
        return native_ops().tfdist_read_records(
            **self._tensors,
            positions=tf.cast(positions, tf.int64),
            whole_files=self._index is None,
            keep_open=_keep_open(len(self._files)),
        )

    @functools.cached_property
    def _tensors(self) -> dict[str, tf.Tensor]:
        """The index as tensors, which graphs capture instead of copying them."""
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
    """Returns how many files a kernel may keep open.

    Returns 0 in eager mode: TensorFlow caches the kernels of eager operations forever.
    A cached kernel with an open file would still read the old contents after the file
    has been replaced.
    """
    if tf.executing_eagerly():
        return 0
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return max(1, min(files, limit // 8, 1024))
