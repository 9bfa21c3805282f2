"""Splits data that every rank has into contiguous ranges of batches.

The batches are the same as in one process, so the result for a batch does not depend on
the rank that processes it. Rank r gets the r-th range.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from tfdist.core import runtime
from tfdist.data import _dataset_checks

_BATCH_SIZE = 32  # the default in Keras
_LOOKED_AT = 16  # number of rows of each array that are compared between ranks


@dataclasses.dataclass
class Part:
    """One rank's part of an evaluation or prediction.

    Attributes:
        inputs: arguments for `evaluate` or `predict` of a Keras model; None if this
            rank has no batches.
        first: such arguments for the first batch of all data, available on every rank.
        fingerprint: text that describes the data; equal on ranks with equal data. For
            arrays it includes a hash of some rows; for other data, only the type and
            number of the batches.
    """

    inputs: dict[str, Any] | None
    first: dict[str, Any]
    fingerprint: str


def contiguous_range(count: int, place: int, size: int) -> tuple[int, int]:
    """Returns the range of batches that one of `size` ranks processes.

    Args:
        count: number of batches.
        place: the rank's index among the ranks that take part, from 0.
        size: number of ranks that take part.

    Returns:
        Start and end (exclusive) of the range. The lengths differ by at most one
        between ranks.

    Example:
        >>> [contiguous_range(5, place, 3) for place in range(3)]
        [(0, 1), (1, 3), (3, 5)]
    """
    return count * place // size, count * (place + 1) // size


def partition(
    function: str,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    place: int,
    size: int,
) -> Part:
    """Returns this rank's part of the data.

    Args:
        function: name of the function that the user called, for messages.
        x: the inputs, as in Keras.
        y: the targets, as in Keras.
        sample_weight: the sample weights, as in Keras.
        batch_size: samples in a batch. None: 32 for arrays; other data are already
            batched.
        place: the rank's index among the ranks that take part, from 0.
        size: number of ranks that take part.

    Raises:
        TypeError: data of this type cannot be partitioned.
        ValueError: the data are empty, shuffled, infinite, of unequal lengths, or
            already sharded; or an argument is not valid for them.
    """
    if batch_size is not None and (
        isinstance(batch_size, bool)
        or not isinstance(batch_size, int)
        or batch_size < 1
    ):
        raise ValueError(
            f"Expected batch_size to be an integer of at least 1, got {batch_size!r}."
        )
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        kind = "tf.data.Dataset"
        if isinstance(x, keras.utils.PyDataset):
            kind = "keras.utils.PyDataset"
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"Expected {name} in the elements of the {kind}, got it as an "
                    f"argument of {function}. Omit {name}."
                )
        if kind == "tf.data.Dataset":
            return _of_dataset(function, x, batch_size, place, size)
        return _of_sequence(function, x, batch_size, place, size)
    arrays = {"x": x, "y": y, "sample_weight": sample_weight}
    given = {name: value for name, value in arrays.items() if value is not None}
    return _of_arrays(function, given, batch_size or _BATCH_SIZE, place, size)


def _of_arrays(
    function: str, given: dict[str, Any], batch_size: int, place: int, size: int
) -> Part:
    total = _rows(function, given)
    begin, end = contiguous_range(math.ceil(total / batch_size), place, size)

    def batches(begin: int, end: int) -> dict[str, Any]:
        found = _as_keras(
            given, slice(begin * batch_size, end * batch_size), batch_size
        )
        if total % batch_size:
            # If all batches are full, Keras knows the batch size statically and weights
            # the losses of several outputs by it. Otherwise it weights all batches
            # equally. So the size has to be known on all ranks or on none.
            other = _as_keras(given, slice(0, 1), 1).take(0)
            found = found.concatenate(other)
        count = tf.data.experimental.assert_cardinality(end - begin)
        return {"x": found.apply(count)}

    listed = _listed(keras.tree.map_structure(lambda a: _in_words(a, total), given))
    return Part(
        batches(begin, end) if begin < end else None,
        batches(0, 1),
        f"arrays of {total} samples in batches of {batch_size}: {listed}",
    )


def _as_keras(given: dict[str, Any], rows: slice, batch_size: int) -> tf.data.Dataset:
    """Returns the batches, with their dtypes, that Keras creates from array rows."""
    part = keras.tree.map_structure(lambda a: _rows_of(a, rows), given)
    adapter = ArrayDataAdapter(**part, batch_size=batch_size, shuffle=False)
    return adapter.get_tf_dataset()


def _rows_of(array: Any, rows: slice) -> Any:
    # A slice of a pandas Series may refer to its labels.
    return None if array is None else getattr(array, "iloc", array)[rows]


def _listed(structure: Any) -> Any:
    """Converts a structure to plain lists, with the entries of dicts sorted by key."""
    if isinstance(structure, dict):
        items = sorted(structure.items(), key=lambda item: str(item[0]))
        return {key: _listed(value) for key, value in items}
    if isinstance(structure, list | tuple):
        return [_listed(value) for value in structure]
    return structure


def _in_words(array: Any, total: int) -> str:
    """Describes an array by dtype, row shape, and a hash of evenly spaced rows.

    The hash depends on the order of the rows.
    """
    if array is None:
        return "none"
    last = _LOOKED_AT - 1
    places = sorted({i * (total - 1) // last for i in range(_LOOKED_AT)})
    digest = hashlib.blake2b(digest_size=8)
    for place in places:
        digest.update(_bytes_of(_rows_of(array, slice(place, place + 1))))
    dtype = getattr(getattr(array, "dtype", None), "name", "mixed")
    return f"{dtype} {list(array.shape)[1:]} with rows {digest.hexdigest()}"


def _bytes_of(rows: Any) -> bytes:
    if isinstance(rows, tf.RaggedTensor):
        return repr(rows.to_list()).encode()
    values = np.asarray(rows)
    if not values.dtype.hasobject:
        return values.tobytes()
    # Only strings: the repr of other objects may differ between ranks.
    return repr([v for v in values.flat if isinstance(v, str | bytes)]).encode()


def _instead_of(array: Any) -> str:
    """Returns the suggested replacement for data that are not arrays."""
    if isinstance(array, tf.SparseTensor):
        return (
            "tf.data.Dataset.from_tensor_slices(...) with all the data, and a "
            "batch_size"
        )
    return (
        "numpy.asarray(...) for a list, tf.data.Dataset.from_generator(...) for a "
        "generator"
    )


def _rows(function: str, given: dict[str, Any]) -> int:
    """Returns the number of samples, which has to be equal in all arrays."""
    lengths: dict[int, str] = {}
    for name, value in given.items():
        arrays = [a for a in keras.tree.flatten(value) if a is not None]
        for array in arrays:
            if not getattr(array, "shape", ()) or not hasattr(array, "__getitem__"):
                raise TypeError(
                    f"Expected {name} in {function} to be a tf.data.Dataset, a "
                    "keras.utils.PyDataset, or arrays with the samples along the first "
                    f"axis, got {type(array).__name__}. Use {_instead_of(array)}."
                )
            lengths[int(array.shape[0])] = name
    if len(lengths) > 1:
        raise ValueError(
            f"Expected arrays with equal first axes in {function}, got lengths "
            f"{', '.join(f'{n} ({name})' for n, name in sorted(lengths.items()))}."
        )
    total = next(iter(lengths), 0)
    if total == 0:
        raise ValueError(_empty(function))
    return total


def _of_dataset(
    function: str,
    dataset: tf.data.Dataset,
    batch_size: int | None,
    place: int,
    size: int,
) -> Part:
    # The data may be sharded over all ranks, not only over those of the process set.
    for among in {size, runtime.size()}:
        _dataset_checks.check_order(dataset, function, among)
    if batch_size is not None:
        _dataset_checks.check_single_samples(dataset, function)
    batched = dataset if batch_size is None else dataset.batch(batch_size)
    count = _counted(function, batched)
    begin, end = contiguous_range(count, place, size)
    if batch_size is None:
        own = dataset.skip(begin).take(end - begin)
    else:  # skip single samples, so that skipped batches are not assembled
        own = dataset.skip(begin * batch_size).take((end - begin) * batch_size)
        own = own.batch(batch_size)
    own = own.apply(tf.data.experimental.assert_cardinality(end - begin))
    return Part(
        {"x": own.prefetch(tf.data.AUTOTUNE)} if begin < end else None,
        {"x": batched.take(1)},
        f"a tf.data.Dataset of {count} batches of {dataset.element_spec}",
    )


def _counted(function: str, batched: tf.data.Dataset) -> int:
    """Returns the number of batches; reads all data if the number is unknown.

    Keras also needs this number. At the end of data of unknown length, Keras runs one
    more step without data. Operations of this step that do not use data still run,
    for example those that count batches for the losses of a model with several outputs.
    """
    count = int(batched.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"Expected finite data in {function}, got an infinite dataset. Remove "
            ".repeat(), or use dataset.take(n)."
        )
    if count == tf.data.UNKNOWN_CARDINALITY:
        count = int(batched.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1))
    if count == 0:
        raise ValueError(_empty(function))
    return count


class _Run(keras.utils.PyDataset):
    """A contiguous range of the batches of a `PyDataset`."""

    def __init__(self, whole: keras.utils.PyDataset, begin: int, end: int) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        self._whole, self._begin, self._end = whole, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, index: int) -> Any:
        return self._whole[self._begin + index]

    def on_epoch_begin(self) -> None:
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._whole.on_epoch_end()


def _of_sequence(
    function: str,
    sequence: keras.utils.PyDataset,
    batch_size: int | None,
    place: int,
    size: int,
) -> Part:
    if batch_size is not None:
        raise ValueError(
            f"Expected no batch_size in {function} with a keras.utils.PyDataset, which "
            f"returns batches, got {batch_size}. Omit batch_size."
        )
    count = sequence.num_batches
    if count is None:
        raise ValueError(
            f"Expected finite data in {function}, got a keras.utils.PyDataset "
            "without a length. Define __len__ to return the number of batches."
        )
    if count == 0:
        raise ValueError(_empty(function))
    begin, end = contiguous_range(count, place, size)
    return Part(
        {"x": _Run(sequence, begin, end)} if begin < end else None,
        {"x": _Run(sequence, 0, 1)},
        f"a {type(sequence).__name__} of {count} batches",
    )


def _empty(function: str) -> str:
    return f"Expected at least one sample in {function}, got none. Check the data."
