"""Reads, checks and batches examples of ImageNet, and explains their errors.

TensorFlow's own errors do not state which record could not be used; the errors of this
module name the file and record.
"""

from __future__ import annotations

import collections
import fractions
import logging
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

import imagenet_formats
import numpy as np
import tensorflow as tf

import tfdist

# (encoded picture, position, key of the epoch) -> uint8 [s, s, 3]
Picture = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
Example = tuple[tf.Tensor, tf.Tensor]  # picture, one-hot label

LABELS_LOOKED_AT = 1000
BATCHES_AT_ONCE = 2  # so that no thread waits for the last picture of a batch
BATCHES_READY = 3
_log = logging.getLogger("imagenet_data")


class Stored:
    """Examples stored in files.

    Args:
        source: the files.
        classes: number of classes of the network.
        label_offset: the label of the first class in the files.

    Raises:
        ValueError: one of the labels that are checked, up to 1,000, is out of range.
    """

    def __init__(
        self, source: imagenet_formats.Source, classes: int, label_offset: int
    ) -> None:
        self.skipped: collections.Counter[int] = collections.Counter()
        self.failure: str | None = None
        self._source = source
        self.classes = classes
        self._label_offset = label_offset
        if source.labels_in_records:
            self._look_at_labels()

    def __len__(self) -> int:
        return len(self._source.records)

    def locate(self, position: int) -> str:
        """Returns the file, and the number of the record in the file."""
        return self._source.records.locate(position)

    def read(self, position: tf.Tensor) -> tf.Tensor:
        """Returns the unparsed records, as strings in the shape of `position`."""
        return self._source.records.read(position)

    def make(
        self,
        serialized: tf.Tensor,
        position: tf.Tensor,
        key: tf.Tensor,
        picture: Picture,
        image_size: int,
    ) -> Example:
        """Returns an example for the network; raises an error if it is invalid."""
        encoded, label = self._source.parse(serialized, position)
        label -= self._label_offset
        in_range = (label >= 0) & (label < self.classes)
        with tf.control_dependencies([tf.debugging.Assert(in_range, [label])]):
            label = tf.identity(label)
        image = tf.ensure_shape(
            picture(encoded, position, key), [image_size, image_size, 3]
        )
        return image, tf.one_hot(label, self.classes)

    def explain(
        self, position: np.ndarray, key: np.ndarray, picture: Picture, skip: bool
    ) -> np.ndarray:
        """Finds out why `make` failed. Runs outside any graph.

        Args:
            position: int64 scalar.
            key: int64 scalar.
            picture: the function that was passed to `make`.
            skip: whether a damaged example may be skipped; it is counted in `skipped`.

        Returns:
            The position.

        Raises:
            ValueError: the example is damaged and may not be skipped, or its label is
                out of range. `failure` has the same text.
            tensorflow.errors.OpError: any other error, such as a missing file.
        """
        where = self.locate(int(position))
        reason = "it failed twice, but can be used now."
        try:
            serialized = self.read(position)
            encoded, label = self._source.parse(serialized, tf.constant(position))
            self._check_label(int(position), int(label))
            picture(encoded, tf.constant(position), tf.constant(key))
            skip = False
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
            reason = _without_nodes(error.message)
        if not skip:
            self._fail(
                f"{where}: expected a record with a whole picture, found: {reason} "
                "Replace it, or skip such examples with --skip_corrupt."
            )
        self.skipped[int(position)] += 1
        if self.skipped[int(position)] == 1:
            _log.warning("%s: skipped. %s", where, reason)
        return position

    def _check_label(self, position: int, label: int) -> None:
        """Raises ValueError unless a label from the file is in range."""
        first = self._label_offset
        last = first + self.classes - 1
        if first <= label <= last:
            return
        advice = f"Set --classes if there are not {self.classes} classes."
        if (first, label) == (0, self.classes):
            advice = f"Labels that count from 1 need --label_offset=1. {advice}"
        elif (first, label) == (1, 0):
            advice = "Labels that count from 0 need --label_offset=0."
        self._fail(
            f"{self.locate(position)}: expected a label of {first}..{last}, found "
            f"{label}. {advice}"
        )

    def _look_at_labels(self) -> None:
        """Checks some labels, a part on each rank; an error is raised on all ranks."""
        rank, size = 0, 1
        if tfdist.is_initialized():
            rank, size = tfdist.rank(), tfdist.size()
        count = min(len(self), LABELS_LOOKED_AT)
        sample = np.linspace(0, len(self) - 1, count).round().astype(np.int64)
        records, parse = self._source.records, self._source.parse
        labels = (
            tf.data.Dataset.from_tensor_slices(sample[rank::size])
            .map(
                lambda position: (position, parse(records.read(position), position)[1]),
                num_parallel_calls=tf.data.AUTOTUNE,
            )
            .ignore_errors()  # damaged records are reported when they are needed
        )
        try:
            for position, label in labels.as_numpy_iterator():
                self._check_label(int(position), int(label))
        except ValueError:
            pass  # the error is in `failure`
        failures = tfdist.allgather_object(self.failure) if size > 1 else [self.failure]
        for failure in failures:
            if failure is not None:
                self._fail(failure)

    def _fail(self, message: str) -> None:
        self.failure = message
        raise ValueError(message)


class Synthetic:
    """Random pictures and labels, determined by the seed and the position.

    Args:
        examples: number of examples.
        classes: number of classes of the network.
        seed: a non-negative number.
    """

    def __init__(self, examples: int, classes: int, seed: int) -> None:
        self.skipped: collections.Counter[int] = collections.Counter()
        self.failure: str | None = None
        self._examples = examples
        self.classes = classes
        self._seed = seed

    def __len__(self) -> int:
        return self._examples

    def locate(self, position: int) -> str:
        """Returns a name for the example, since it is in no file."""
        return f"synthetic example {position}"

    def read(self, position: tf.Tensor) -> tf.Tensor:
        """Does nothing, because there is nothing to read."""
        return tf.fill(tf.shape(position), "")

    def make(
        self,
        serialized: tf.Tensor,
        position: tf.Tensor,
        key: tf.Tensor,
        picture: Picture,
        image_size: int,
    ) -> Example:
        """Returns a random example, whose pixel values are uniform in 0..255."""
        del serialized, key, picture
        levels = 3 * image_size**2
        seed = tf.stack([tf.constant(self._seed, tf.int64), position])
        words = tf.random.stateless_uniform(
            [1 + -(-levels // 4)], seed, None, None, tf.uint32, alg="philox"
        )
        image = tf.reshape(tf.bitcast(words[1:], tf.uint8), [-1])[:levels]
        label = tf.cast(words[0], tf.int64) % self.classes
        image = tf.reshape(image, [image_size, image_size, 3])
        return image, tf.one_hot(label, self.classes)

    def explain(self, *unused: object) -> np.ndarray:
        """Is never called: these examples cannot be invalid."""
        raise AssertionError("synthetic examples cannot be damaged (this is a bug)")


Examples = Stored | Synthetic


def read_rows(examples: Examples, rows: tf.data.Dataset) -> tf.data.Dataset:
    """Adds the records to each row of positions, to send them to other ranks.

    A record that cannot be read is replaced by "".

    Args:
        examples: the examples of the split.
        rows: (positions int64 `[b]`, key of the epoch int64 scalar).

    Returns:
        A dataset of (positions, key, string `[b]`), in the same order.
    """

    def one(position: tf.Tensor) -> tf.data.Dataset:
        place = tf.data.Dataset.from_tensors(position)
        return _either(place.map(examples.read), tf.data.Dataset.from_tensors(""))

    def read(row: tf.Tensor, key: tf.Tensor) -> tf.data.Dataset:
        quick = tf.data.Dataset.from_tensors(row).map(examples.read)
        slow = tf.data.Dataset.from_tensor_slices(row).flat_map(one)
        slow = slow.batch(tf.size(row, tf.int64))
        return _either(quick, slow).map(lambda serialized: (row, key, serialized))

    return _interleave(rows, read)


def own_threads() -> int:
    """Returns the number of threads for this rank; all ranks must call this function.

    The number is this rank's share of the CPUs that it may use. A CPU that several
    ranks on a machine may use is shared equally between them. It does not matter
    whether a launcher has bound the ranks to CPUs.
    """
    own = [_machine(), *sorted(os.sched_getaffinity(0))]
    users = collections.Counter(
        processor
        for machine, *processors in tfdist.allgather_object(own)
        for processor in processors
        if machine == own[0]
    )
    return max(1, int(sum(fractions.Fraction(1, users[one]) for one in own[1:])))


def _machine() -> str:
    """Returns an id that all containers of a machine share, or else the host name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def batches(
    examples: Examples,
    rows: tf.data.Dataset,
    picture: Picture,
    *,
    image_size: int,
    count: int,
    threads: int,
    skip_corrupt: bool,
) -> tf.data.Dataset:
    """Returns a dataset with one batch for each row, in the same order.

    Each batch is first made by a fast method, as a dataset of its own. If this raises
    an error, a slower method makes the batch again and reports which example is
    invalid. Error reporting therefore does not slow down the reading of valid data.

    Args:
        examples: the examples of the split.
        rows: (positions int64 `[b]`, key of the epoch int64 scalar); may include the
            records, as from `read_rows`.
        picture: function that makes a picture from an encoded picture.
        image_size: height and width of the picture.
        count: number of rows.
        threads: threads that make pictures.
        skip_corrupt: whether damaged examples become black pictures of weight 0.

    Returns:
        A dataset of (images, labels), with `skip_corrupt` (images, labels, weights).
    """

    @tf.function(autograph=False)  # traced once
    def make(position: tf.Tensor, key: tf.Tensor, *record: tf.Tensor):
        (serialized,) = record or (examples.read(position),)
        made = examples.make(serialized, position, key, picture, image_size)
        return (*made, 1.0) if skip_corrupt else made

    def explain(position: tf.Tensor, key: tf.Tensor, *record: tf.Tensor):
        del record  # the careful method reads the record again
        said = tf.numpy_function(
            lambda *place: examples.explain(*place, picture, skip_corrupt),
            [position, key],
            tf.int64,
        )
        with tf.control_dependencies([said]):
            shape = [image_size, image_size, 3]
            black = tf.zeros(shape, tf.uint8), tf.zeros([examples.classes]), 0.0
            return tf.nest.map_structure(
                tf.identity, black if skip_corrupt else black[:2]
            )

    def careful(*place: tf.Tensor) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensors(place)
        return _either(data.map(make), data.map(explain))

    def batch(row: tf.Tensor, key: tf.Tensor, *records: tf.Tensor) -> tf.data.Dataset:
        keys = tf.fill(tf.shape(row), key)
        places = tf.data.Dataset.from_tensor_slices((row, keys, *records))
        quick = places.map(make, num_parallel_calls=threads, deterministic=True)
        full = row.shape[0] is not None
        size = row.shape[0] if full else tf.size(row, tf.int64)
        quick, slow = (
            way.batch(size, drop_remainder=full)  # if full, the shape is static
            for way in (quick, places.flat_map(careful))
        )
        return _either(quick, slow)

    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = threads
    options.threading.max_intra_op_parallelism = 1  # pictures are made in parallel
    options.autotune.enabled = False  # all settings are fixed
    made = _interleave(rows, batch)
    made = made.apply(tf.data.experimental.assert_cardinality(count))
    return made.prefetch(BATCHES_READY).with_options(options)


def _interleave(rows: tf.data.Dataset, function: Callable[..., tf.data.Dataset]):
    """Returns one element of each row, in order; makes a few of them in parallel."""
    return rows.interleave(
        function,
        cycle_length=BATCHES_AT_ONCE,
        num_parallel_calls=BATCHES_AT_ONCE,
        deterministic=True,
    )


def _either(first: tf.data.Dataset, second: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the element of `first`, or of `second` if `first` raises an error."""
    return first.ignore_errors().concatenate(second).take(1)


def _without_nodes(message: str) -> str:
    """Removes the names of nodes and ops from a message of TensorFlow."""
    return re.sub(r"\{\{.*?\}\} *| *\[Op:.*", "", message)
