"""Checks of datasets whose samples are distributed to the ranks by position."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.core import runtime
from tfdist.core.registry import WeakRegistry
from tfdist.data._loaders import is_of_loader

_SHARD_THE_LOADER = (
    "It comes from a loader of Keras, whose files tfdist.data.shard deals out if it "
    "gets what the loader returned. Put .map(...) and other steps behind it:\n"
    "    dataset = keras.utils...._dataset_from_directory(...)\n"
    "    dataset = tfdist.data.shard(dataset, batch_size=...).map(...)"
)
_EVALUATE_THE_LOADER = (
    "It comes from a loader of Keras, which shuffles by default. Write shuffle=False "
    "there; but with validation_split this would choose other files, so write\n"
    "    share = tfdist.data.shard(loaded, batch_size=...)  # what it returned\n"
    "    model.evaluate(share, callbacks=[tfdist.callbacks.MetricAverage()])"
)
# Dataset that is one rank's part → number of parts (`mark`).
_part_counts: WeakRegistry[int] = WeakRegistry()


def mark(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Marks a dataset as one rank's part of the samples, if it has no `.shard(...)`.

    Args:
        dataset: the part.
        size: number of ranks that have a part.

    Returns:
        The same dataset.
    """
    _part_counts.set(dataset, size)
    return dataset


def is_part(dataset: tf.data.Dataset, size: int) -> bool:
    """Whether a dataset is known to be the part of one of `size` ranks."""
    return size > 1 and any(_parts(node) == size for node in _upstream(dataset))


def check_order(dataset: tf.data.Dataset, function: str, size: int) -> None:
    """Raises if the samples are not the same, in the same order, on all ranks.

    Distributing samples by position needs that: with a random order, or with a dataset
    that is already a part, ranks would share some samples and miss others.

    Args:
        dataset: dataset to distribute.
        function: the function that distributes it, for messages.
        size: number of ranks.

    Raises:
        ValueError: it is shuffled, sharded already, or not deterministic.
    """
    for node in _upstream(dataset):
        kind = type(node).__name__
        if "Shuffle" in kind or _shuffles_inside(node):
            raise ValueError(
                f"The dataset is shuffled before {function}: each rank would pick from "
                "another order, so some samples would be seen twice and others never. "
                + _instead_of_shuffle(dataset, function)
            )
        _check_cache(node, function, size)
        if _picks_at_random(node, same_iterator=function != "tfdist.data.scatter"):
            raise ValueError(
                f"The dataset picks at random among others before {function} "
                "(sample_from_datasets), so its order differs between ranks. Write "
                "tf.data.Dataset.choose_from_datasets(...), or give "
                "sample_from_datasets a seed and rerandomize_each_iteration=False."
            )
        if _parts(node) == size > 1:
            raise ValueError(
                f"The samples were dealt out among {size} ranks before {function}, "
                "which deals them out itself: of the rank's part each rank would get a "
                "part again, and most samples would be left out. Remove "
                f".shard({size}, ...), tfdist.data.shard or tfdist.data.scatter from "
                "the dataset."
            )
        if getattr(node, "_deterministic", None) in ("false", False):
            raise ValueError(
                f"The dataset has a step ({kind}) with deterministic=False before "
                f"{function}, so its order differs between ranks. Write "
                "deterministic=True there."
            )
    if dataset.options().deterministic is False:
        raise ValueError(
            "The dataset has the option deterministic=False, so its order differs "
            f"between ranks. Set it to True before {function}."
        )


def check_single_samples(dataset: tf.data.Dataset, function: str) -> None:
    """Raises if a dataset is batched that should not be.

    Args:
        dataset: dataset to batch.
        function: the function that batches it, for messages.

    Raises:
        ValueError: it is batched.
    """
    for node in _upstream(dataset):
        kind = type(node).__name__
        if any(name in kind for name in ("Unbatch", "FlatMap", "Interleave")):
            return
        if "Batch" in kind:
            raise ValueError(
                f"The dataset is batched before {function}, which was to deal out "
                "single samples. "
                + (
                    _SHARD_THE_LOADER
                    if _has_loader(dataset)
                    else "Remove .batch(...), or write batch_size=None in the loader "
                    "of Keras that made the dataset, and give batch_size= to "
                    f"{function}; or add .unbatch() before it."
                )
            )


def _instead_of_shuffle(dataset: tf.data.Dataset, function: str) -> str:
    """Returns the advice for a dataset that is shuffled."""
    shards = function == "tfdist.data.shard"
    if _has_loader(dataset):
        return _SHARD_THE_LOADER if shards else _EVALUATE_THE_LOADER
    remove = (
        "Remove .shuffle(...) from the dataset, or write shuffle=False in list_files "
        "or the loader of Keras that made it"
    )
    if not shards:
        return f"{remove}."
    return (
        f"{remove}, and write\n"
        "    dataset = ...  # without .shuffle()\n"
        "    dataset = tfdist.data.shard(dataset, batch_size=..., shuffle=True)"
    )


def _has_loader(dataset: tf.data.Dataset) -> bool:
    return any(map(is_of_loader, _upstream(dataset)))


def _check_cache(node: Any, function: str, size: int) -> None:
    """Raises if several ranks of this host would write a cache to the same file.

    A file that is complete can be read by all of them. Names that differ between ranks
    are known by the number of the rank in the last part of the path.
    """
    if not type(node).__name__.endswith("CacheDataset") or size == 1:
        return
    if not runtime.is_initialized() or runtime.local_size() == 1:
        return
    name = (tf.get_static_value(node._filename) or b"").decode()
    if not name or tf.io.gfile.exists(f"{name}.index"):
        return
    numbers = {int(n) for n in re.findall(r"\d+", name.rpartition("/")[2])}
    if not numbers & {runtime.rank(), runtime.local_rank()}:
        raise ValueError(
            f"Expected .cache(...) before {function} with a file of its own for each "
            f"rank, got {name!r}, which all ranks of this host would write. Put the "
            'rank into the name of the file: .cache(f"...-{tfdist.rank()}"). Or cache '
            "only the rank's own part, what tfdist.data.shard returns, in such a file."
        )


def _upstream(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields the dataset and all its inputs, from the end to the sources."""
    waiting = [dataset]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting.extend(node._inputs())


def _parts(node: Any) -> int | None:
    """Returns the number of parts of which a node is one; None if not known."""
    if type(node).__name__ != "_ShardDataset":
        return _part_counts.get(node)
    count = tf.get_static_value(node._num_shards)
    return None if count is None else int(count)


def _shuffles_inside(node: Any) -> bool:
    """Whether a function of a step, e.g. of `interleave`, shuffles a dataset."""
    for function in node._functions():
        graph = function.function.graph.as_graph_def()
        bodies = [graph.node, *(one.node_def for one in graph.library.function)]
        if any(op.op.startswith("Shuffle") for body in bodies for op in body):
            return True
    return False


def _picks_at_random(node: Any, *, same_iterator: bool) -> bool:
    """Whether a node is `sample_from_datasets` in an order of its own on each rank.

    Args:
        node: node of a dataset.
        same_iterator: the n-th iterators of all ranks are used together, so it is
            enough that a seed was given.
    """
    if type(node).__name__ != "_DirectedInterleaveDataset":
        return False
    for source in _upstream(node._selector_input):
        if type(source).__name__ == "_RandomDataset":
            seeds = [tf.get_static_value(s) for s in (source._seed, source._seed2)]
            if seeds == [0, 0] or (source._rerandomize and not same_iterator):
                return True
    return False
