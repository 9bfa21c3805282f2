"""Takes the datasets of Keras's `..._dataset_from_directory` apart, to shard the files.

Such a dataset shuffles, decodes and batches a list of files and labels. If the complete
dataset were sharded, every rank would decode all files, in an order that depends on the
seed. Instead, the list of files is sharded, and each rank decodes only its own files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_MARK = "class_names"  # attribute that the loaders set on their datasets
_MAPS = ("_MapDataset", "_ParallelMapDataset")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset")


@dataclasses.dataclass
class Loader:
    """The steps of a dataset that a Keras loader has returned.

    Attributes:
        source: dataset of the file names, or of pairs of file name and label.
        paths: the file names, in the order of `source`.
        decode: functions that are applied to each element of `source`, one after
            another.
        shuffles: whether the loader shuffles.
        pads: whether the samples of a batch are padded to the same length.
    """

    source: tf.data.Dataset
    paths: list[bytes]
    decode: list[Callable[..., Any]]
    shuffles: bool
    pads: bool

    def own_files(self, rank: int, size: int) -> tf.data.Dataset:
        """Returns a dataset of the elements of `source` that belong to a rank.

        The files are sharded by their index in the sorted list, because the loader's
        order depends on its seed, which may differ between ranks.
        """
        is_own = np.zeros(len(self.paths), bool)
        by_name = sorted(range(len(self.paths)), key=self.paths.__getitem__)
        is_own[by_name[rank::size]] = True
        belongs = tf.constant(is_own)
        own = self.source.enumerate().filter(lambda i, _: belongs[i])
        own = own.map(lambda _, element: element)
        count = tf.data.experimental.assert_cardinality(int(is_own.sum()))
        return own.apply(count)

    def decode_files(self, files: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset of single samples, decoded from elements of `source`."""
        for function in self.decode:
            files = files.map(function, num_parallel_calls=tf.data.AUTOTUNE)
        return files


def is_of_loader(dataset: tf.data.Dataset) -> bool:
    """Returns whether a Keras loader has returned this dataset object."""
    return hasattr(dataset, _MARK)


def take_apart(dataset: tf.data.Dataset) -> Loader | None:
    """Returns the steps of a Keras loader's dataset; None for any other dataset.

    Also returns None if the structure of the dataset differs from that of a loader's
    dataset, for example because the program has added a step and has set the attribute
    `class_names` of the result.
    """
    if not is_of_loader(dataset):
        return None
    nodes = _chain(dataset)
    node, batch = next(nodes), ""
    while _kind(node) in (*_BATCHES, "_PrefetchDataset"):
        batch = _kind(node) if _kind(node) in _BATCHES else batch
        node = next(nodes)
    pads = batch == "_PaddedBatchDataset" or (
        not batch and _has_varying_shapes(dataset)
    )
    decode: list[Callable[..., Any]] = []
    while _kind(node) in _MAPS:
        decode.insert(0, node._map_func._func)
        node = next(nodes)
    shuffles = _kind(node) == "_ShuffleDataset"
    if shuffles:
        node = next(nodes)
    paths = _paths(node)
    if paths is None or not decode:
        return None
    return Loader(node, paths, decode, shuffles, pads)


def _has_varying_shapes(samples: tf.data.Dataset) -> bool:
    """Returns whether the samples are tensors of different shapes."""
    specs = tf.nest.flatten(samples.element_spec)
    return any(
        isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined()
        for spec in specs
    )


def _kind(node: Any) -> str:
    return type(node).__name__


def _chain(dataset: Any) -> Iterator[Any]:
    """Yields a dataset, its input, the input of that input and so on, then None.

    Stops at a dataset with several inputs.
    """
    node = dataset
    while node is not None:
        yield node
        inputs = node._inputs()
        node = inputs[0] if len(inputs) == 1 else None
    yield None


def _paths(source: Any) -> list[bytes] | None:
    """Returns the strings of a dataset `from_tensor_slices(strings)`; None for others.

    If datasets are zipped, the strings are those of the first one.
    """
    if _kind(source) == "_ZipDataset":
        source = source._inputs()[0]
    if _kind(source) != "_TensorSliceDataset" or len(source._tensors) != 1:
        return None
    [texts] = source._tensors
    if texts.dtype != tf.string or texts.shape.rank != 1:
        return None
    return list(texts.numpy())
