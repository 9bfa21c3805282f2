"""Checks datasets whose samples are distributed to the ranks by index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.random_seed import DEFAULT_GRAPH_SEED

from tfdist.core import runtime
from tfdist.core.registry import WeakRegistry
from tfdist.data._loaders import is_of_loader

_SHARD_THE_LOADER = (
    "The dataset comes from a Keras loader. Pass the loader's dataset to "
    "tfdist.data.shard, which distributes the files, and add .map(...) and other steps "
    "afterwards:\n"
    "    dataset = keras.utils...._dataset_from_directory(...)\n"
    "    dataset = tfdist.data.shard(dataset, batch_size=...).map(...)"
)
_EVALUATE_THE_LOADER = (
    "The dataset comes from a Keras loader, which shuffles by default. Pass "
    "shuffle=False to the loader. With validation_split, shuffle=False would select "
    "different files, so write instead\n"
    "    loaded = keras.utils...._dataset_from_directory(...)\n"
    "    share = tfdist.data.shard(loaded, batch_size=...)\n"
    "    model.evaluate(share, callbacks=[tfdist.callbacks.MetricAverage()])"
)
# Number of parts of a dataset whose parts always follow the current number of ranks.
CURRENT_SIZE = 0
# Dataset that was marked as one rank's part (`mark`) → number of parts.
_part_counts: WeakRegistry[int] = WeakRegistry()


def mark(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Marks a dataset as one rank's part of the samples, and returns it.

    Needed for datasets that are divided in a different way than with `.shard(...)`.

    Args:
        dataset: the dataset to mark.
        size: number of parts, one for each rank; `CURRENT_SIZE` if this number follows
            the number of ranks, so that it cannot be given in advance.

    Returns:
        The same dataset.
    """
    _part_counts.set(dataset, size)
    return dataset


def is_part(dataset: tf.data.Dataset, size: int) -> bool:
    """Returns whether a dataset is known to be one of `size` parts."""
    return size > 1 and any(_parts(node) == size for node in _upstream(dataset))


def follows_ranks(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is, at any time, the part of the rank that reads it."""
    return any(_parts(node) == CURRENT_SIZE for node in _upstream(dataset))


def check_order(dataset: tf.data.Dataset, function: str, size: int) -> None:
    """Raises if the samples are not the same, in the same order, on all ranks.

    Samples can be distributed by index only if all ranks have the same samples in the
    same order. With a random order, or if the dataset is already sharded, some samples
    would be read by several ranks and some by none.

    Args:
        dataset: dataset to distribute.
        function: name of the function that distributes it, for messages.
        size: number of ranks.

    Raises:
        ValueError: the dataset is shuffled, already sharded, or not deterministic, or
            comes from `tfdist.data.global_batches`.
    """
    if follows_ranks(dataset):
        raise ValueError(
            "The dataset comes from tfdist.data.global_batches, which already gives "
            f"each rank its own samples. {function} would distribute them again, and "
            f"most samples would never be read. {_instead_of_batches(function)}"
        )
    for node in _upstream(dataset):
        kind = type(node).__name__
        if "Shuffle" in kind or _shuffles_inside(node):
            raise ValueError(
                f"The dataset is shuffled before {function}. Each rank would choose "
                "its samples from a different order, so some samples would be read "
                "twice and others never. " + _instead_of_shuffle(dataset, function)
            )
        _check_cache(node, function, size)
        _check_random_choice(node, function, size)
        if _parts(node) == size > 1:
            raise ValueError(
                f"The samples were already distributed to {size} ranks before "
                f"{function}, which distributes them again. Each rank would get a "
                "part of a part, and most samples would never be read. Remove "
                f".shard({size}, ...), tfdist.data.shard or tfdist.data.scatter from "
                "the dataset."
            )
        if getattr(node, "_deterministic", None) in ("false", False):
            raise ValueError(
                f"The dataset has a step ({kind}) with deterministic=False before "
                f"{function}, so its order differs between ranks. Set "
                "deterministic=True in this step."
            )
    if dataset.options().deterministic is False:
        raise ValueError(
            "The dataset has the option deterministic=False, so its order differs "
            f"between ranks. Set the option to True before {function}."
        )


def check_single_samples(dataset: tf.data.Dataset, function: str) -> None:
    """Raises if a dataset is already batched.

    Args:
        dataset: dataset of single samples.
        function: name of the function that batches it, for messages.

    Raises:
        ValueError: the dataset is batched.
    """
    for node in _upstream(dataset):
        kind = type(node).__name__
        if any(name in kind for name in ("Unbatch", "FlatMap", "Interleave")):
            return
        if "Batch" in kind:
            raise ValueError(
                f"The dataset is batched before {function}, which expects single "
                "samples. "
                + (
                    _SHARD_THE_LOADER
                    if _has_loader(dataset)
                    else "Remove .batch(...), or pass batch_size=None to the Keras "
                    "loader that created the dataset, and pass batch_size= to "
                    f"{function}. Or add .unbatch() before {function}."
                )
            )


def _instead_of_shuffle(dataset: tf.data.Dataset, function: str) -> str:
    """Returns advice for the error about a dataset that is shuffled."""
    shards = function == "tfdist.data.shard"
    if _has_loader(dataset):
        return _SHARD_THE_LOADER if shards else _EVALUATE_THE_LOADER
    remove = (
        "Remove .shuffle(...) from the dataset, or pass shuffle=False to list_files or "
        "to the Keras loader that created it"
    )
    if not shards:
        return f"{remove}."
    return (
        f"{remove}, and write\n"
        "    dataset = ...  # without .shuffle()\n"
        "    dataset = tfdist.data.shard(dataset, batch_size=..., shuffle=True)"
    )


def _instead_of_batches(function: str) -> str:
    """Returns advice for the error about a dataset of `global_batches`."""
    if function.startswith("tfdist.data."):
        return f"Pass a dataset of all samples to {function}."
    return (
        "Pass all samples instead, as arrays or as a dataset. Or call the model's "
        "method, with callbacks=[tfdist.callbacks.MetricAverage()] for evaluate."
    )


def _has_loader(dataset: tf.data.Dataset) -> bool:
    return any(map(is_of_loader, _upstream(dataset)))


def _check_cache(node: Any, function: str, size: int) -> None:
    """Raises if several ranks on this host would write a cache to the same file.

    A complete cache file is allowed, because all ranks can read it. A file name is
    assumed to differ between ranks if its last path component contains the number of
    this rank or of the local rank.
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
            f"Expected .cache(...) before {function} with a separate file for each "
            f"rank, got {name!r}, which all ranks on this host would write. Add the "
            'rank to the file name: .cache(f"...-{tfdist.rank()}"). Or cache only this '
            "rank's part, the dataset that tfdist.data.shard returns, in such a file."
        )


def _upstream(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all its direct and indirect inputs, up to the sources."""
    waiting = [dataset]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting.extend(node._inputs())


def _parts(node: Any) -> int | None:
    """Returns the number of parts into which a step of a dataset divides the samples.

    None if the step does not divide them, or if the number is not known.
    """
    if type(node).__name__ != "_ShardDataset":
        return _part_counts.get(node)
    count = tf.get_static_value(node._num_shards)
    return None if count is None else int(count)


def _shuffles_inside(node: Any) -> bool:
    """Returns whether the function of a step, e.g. of `interleave`, shuffles."""
    for function in node._functions():
        graph = function.function.graph.as_graph_def()
        bodies = [graph.node, *(one.node_def for one in graph.library.function)]
        if any(op.op.startswith("Shuffle") for body in bodies for op in body):
            return True
    return False


def _check_random_choice(node: Any, function: str, size: int) -> None:
    """Raises if a step is a `sample_from_datasets` whose order may differ by rank.

    TensorFlow combines the seed of the step with its global seed, which this rank
    cannot compare with those of other ranks. `tfdist.data.scatter`, which documents
    that the global seeds have to be equal, accepts it.
    """
    if type(node).__name__ != "_DirectedInterleaveDataset":
        return
    scatters = function == "tfdist.data.scatter"
    for source in _upstream(node._selector_input):
        if type(source).__name__ != "_RandomDataset":
            continue
        seeds = [tf.get_static_value(s) for s in (source._seed, source._seed2)]
        # The ranks create their iterators at the same time, except with scatter.
        if seeds == [0, 0] or (source._rerandomize and scatters):
            raise ValueError(
                f"The dataset uses sample_from_datasets before {function}, so its "
                "order is random and differs between ranks. Use "
                "tf.data.Dataset.choose_from_datasets(...), or pass a seed and "
                "rerandomize_each_iteration=False to sample_from_datasets."
            )
        if seeds[0] != DEFAULT_GRAPH_SEED and size > 1 and not scatters:
            raise ValueError(
                f"The dataset uses sample_from_datasets before {function}. Its order "
                f"depends on TensorFlow's global seed, here {seeds[0]}, which may "
                "differ between ranks, as with tfdist.data.seed. Call "
                "sample_from_datasets, with a seed, before "
                "keras.utils.set_random_seed(...) or tf.random.set_seed(...). Or use "
                "tf.data.Dataset.choose_from_datasets(...)."
            )


def count_rows(data: Any, expected: str) -> int:
    """Returns the number of samples in an array, or in a tuple or dict of arrays.

    Args:
        data: the arrays, with the samples along the first axis.
        expected: the types that the caller accepts, for messages.

    Raises:
        TypeError: `data` is or contains a list, or something that cannot be sliced.
        ValueError: the arrays have different lengths.
    """
    if _has_list(data):
        raise TypeError(
            "Expected a tuple or dict of arrays, got a list. tf.data would convert it "
            "to a single array with the list as its first axis. Write (a, b) instead "
            "of [a, b], or use numpy.asarray(...) if the list contains the samples of "
            "one array."
        )
    arrays = tf.nest.flatten(data)
    wrong = [a for a in arrays if not _has_rows(a)]
    if wrong or not arrays:
        found = type(data).__name__
        if wrong and wrong[0] is not data:
            found = f"{type(wrong[0]).__name__} in a {found}"
        advice = _advice(wrong[0]) if wrong else ""
        raise TypeError(
            f"Expected {expected} with the samples along the first axis, got {found}."
            f"{advice}"
        )
    lengths = {int(a.shape[0]) for a in arrays}
    if len(lengths) != 1:
        raise ValueError(
            f"Expected arrays with equal first axes, got lengths {sorted(lengths)}."
        )
    return lengths.pop()


def _advice(wrong: Any) -> str:
    if isinstance(wrong, tf.SparseTensor):
        return (
            " Pass tf.data.Dataset.from_tensor_slices(data), a dataset of single rows."
        )
    if hasattr(wrong, "num_batches"):  # a PyDataset of Keras
        return (
            " A PyDataset creates its own batches. Let its __getitem__ return this "
            "rank's batches, with the sizes from tfdist.data.batch_sizes(...)."
        )
    return ""


def _has_rows(array: Any) -> bool:
    """Returns whether the array can be sliced to every n-th row."""
    has_axes = hasattr(array, "shape") and len(array.shape) > 0
    return has_axes and hasattr(array, "__getitem__")


def _has_list(data: Any) -> bool:
    if isinstance(data, dict):
        data = tuple(data.values())
    return isinstance(data, list) or (
        isinstance(data, tuple) and any(map(_has_list, data))
    )
