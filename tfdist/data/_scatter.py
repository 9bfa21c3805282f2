"""Reads data on a few ranks, which send each of the remaining ranks its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.objects import allgather_object, gather_from_all
from tfdist.core import native, runtime
from tfdist.data import _dataset_checks, _element_codec, _scatter_dataset
from tfdist.data._reader_assignment import reader_of
from tfdist.data._scatter_client import Source
from tfdist.data._scatter_server import ReadingService, Share

_NAME = "tfdist.data.scatter"
_ERROR_CHARACTERS = 2000
_PREFETCH_BYTES = 4 << 20
_MAX_PREFETCHED = 64


def scatter(
    dataset: tf.data.Dataset | Callable[[int], tf.data.Dataset],
    *,
    readers: int = 1,
    buffer_bytes: int = 64 << 20,
) -> tf.data.Dataset:
    """Reads the datasets of all ranks on a few ranks, and sends each rank its elements.

    Use `scatter` if not all ranks can access the data, or if the file system is faster
    with few readers. In every pass, a rank gets what it would get by reading its own
    dataset itself: the same elements in the same order, with the same shapes and types.

    All ranks have to call this function, in the same order relative to collectives. The
    ranks that read are spread over the hosts. Each of them reads its own dataset
    directly, and reads ahead in the datasets of other ranks in separate threads.

    If an iterator is discarded before the end (by `break` or `steps_per_epoch`), the
    reader stops reading for it. The first read from an iterator also discards older
    iterators that have not been read from, except for the newest 16 of them. Reading
    from a discarded iterator raises an error.

    Args:
        dataset: a function that accepts a rank and returns the `tf.data.Dataset` of
            that rank; or a `tf.data.Dataset` that is not shuffled, whose element i
            then belongs to rank i mod `size()`. A function is called only on the rank
            that reads the dataset. All random operations in it need a seed; without
            one, two passes differ even if `scatter` is not used. All ranks also need
            the same global seed (`keras.utils.set_random_seed`), which TensorFlow
            combines with the seed of each operation. Elements are tensors of numbers,
            bool or strings, in dicts and tuples; dimensions may be unknown.
        readers: number of ranks that read, from 1 to `size()`; default 1.
        buffer_bytes: maximum number of bytes that are prefetched for a rank; a single
            element may exceed it. Default 64 MiB.

    Returns:
        The dataset of this rank. Its cardinality is that of the dataset on the reader.

    Raises:
        ValueError: `readers` or `buffer_bytes` is out of range, the dataset is shuffled
            or sharded, or a dataset comes from `tfdist.data.global_batches`.
        TypeError: `dataset` is neither a dataset nor a function that returns one, or
            its elements cannot be sent.
        tfdist.MismatchError: the ranks use different arguments.
        tfdist.RankFailedError: a reader could not create the dataset of a rank. The
            reader itself raises the original error.

    During iteration, errors are raised as TensorFlow errors. `tfdist.errors.from_tf`
    converts them to `RankFailedError` (the reader has failed) or `TimeoutError` (the
    reader has sent no element within `TFDIST_TIMEOUT_S`). An error in a dataset is
    raised on the rank to which the dataset belongs, not on the reader.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> def read(rank):  # only on ranks that read
        ...     data = tf.data.Dataset.range(6).shard(tfdist.size(), rank)
        ...     return data.shuffle(6, seed=rank).batch(4)
        >>> [len(batch) for batch in tfdist.data.scatter(read)]
        [4, 2]
    """
    topology = runtime.check_initialized()
    calls = runtime.get_resource("data/calls", _Calls)
    _check_arguments(dataset, readers, buffer_bytes, calls)
    rank = topology.rank
    reader_of_rank = reader_of(topology.host_of, readers)
    number = calls.next()
    own: dict[str, Any] = {}
    refusal: Exception | None = None
    datasets: dict[int, tf.data.Dataset] = {}
    if reader_of_rank[rank] == rank:
        served = [r for r, reader in enumerate(reader_of_rank) if reader == rank]
        try:
            with errors.translate():
                datasets = _datasets(dataset, served)
                own = _describe_datasets(datasets)
                if len(served) > 1:
                    own |= _serve(number, rank, datasets)
        except Exception as error:
            refusal, own = error, {"error": _short(error)}
    shared = allgather_object(own, name=f"{_NAME} datasets")
    if refusal is not None:
        raise refusal
    for reader, one in enumerate(shared):
        if one and "error" in one:
            raise errors.RankFailedError(
                f"rank {reader}, a reader, could not create a dataset: {one['error']}",
                errors.ErrorRecord(
                    kind="rank_failed", rank=reader, cause=one["error"], tensor=_NAME
                ),
            )
    if reader_of_rank[rank] == rank:
        return datasets[rank]
    return _receive(
        shared[reader_of_rank[rank]],
        reader_of_rank[rank],
        number,
        topology,
        buffer_bytes,
        calls,
    )


class _Calls:
    """Counter of the calls of `scatter` in this world.

    Attributes:
        dropped: numbers of the calls whose datasets this rank has deleted since the
            latest call.
    """

    def __init__(self) -> None:
        self._count = 0
        self.dropped: list[int] = []

    def next(self) -> int:
        """Returns the number of the next call; the first call has number 1."""
        self._count += 1
        return self._count

    def take_dropped(self) -> list[int]:
        """Returns and clears `dropped`, to which any thread may add."""
        taken = self.dropped[:]
        del self.dropped[: len(taken)]
        return taken

    def close(self) -> None:
        """Does nothing, because nothing is open."""


def _check_arguments(
    dataset: Any, readers: Any, buffer_bytes: Any, calls: _Calls
) -> None:
    """Checks and compares the arguments of all ranks; either all ranks raise or none.

    This prevents a rank from waiting for ranks that have raised. The ranks also tell
    their readers which datasets they have deleted.
    """
    if isinstance(dataset, tf.data.Dataset):
        kind = "a tf.data.Dataset"
    else:
        kind = "a function" if callable(dataset) else type(dataset).__name__
    own = {
        "dataset": kind,
        "readers": f"{readers!r:.80}",
        "buffer_bytes": f"{buffer_bytes!r:.80}",
    }
    shared = gather_from_all(
        {**own, "dropped": calls.take_dropped()}, _NAME, name=f"{_NAME} arguments"
    )
    service = runtime.state.resources.get("data/reading")
    if isinstance(service, ReadingService):
        service.remove({(n, r) for r, one in enumerate(shared) for n in one["dropped"]})
    for rank, one in enumerate(shared):
        wrong = [name for name in own if one[name] != shared[0][name]]
        if wrong:
            raise errors.MismatchError(
                f"{_NAME}: the ranks use different arguments; {wrong[0]} is "
                f"{shared[0][wrong[0]]} on rank 0 and {one[wrong[0]]} on rank {rank}",
                errors.ErrorRecord(kind="mismatch", rank=rank, tensor=_NAME),
            )
    if kind not in ("a tf.data.Dataset", "a function"):
        raise TypeError(
            "Expected a tf.data.Dataset, or a function that accepts a rank and returns "
            f"a tf.data.Dataset, got {kind}."
        )
    size = runtime.size()
    if type(readers) is not int or not 1 <= readers <= size:
        raise ValueError(
            f"Expected readers to be from 1 to {size}, the number of ranks, got "
            f"{readers!r}."
        )
    if type(buffer_bytes) is not int or not 1 <= buffer_bytes < 1 << 53:
        raise ValueError(
            "Expected buffer_bytes to be an integer in 1..2**53 - 1, got "
            f"{buffer_bytes!r}."
        )


def _datasets(dataset: Any, ranks: list[int]) -> dict[int, tf.data.Dataset]:
    if isinstance(dataset, tf.data.Dataset):
        size = runtime.size()
        _dataset_checks.check_order(dataset, _NAME, size)
        return {rank: dataset.shard(size, rank) for rank in ranks}
    found = {rank: dataset(rank) for rank in ranks}
    for rank, one in found.items():
        if not isinstance(one, tf.data.Dataset):
            raise TypeError(
                f"Expected a tf.data.Dataset from dataset({rank}), got "
                f"{type(one).__name__}."
            )
        if rank != runtime.rank() and _dataset_checks.follows_ranks(one):
            raise ValueError(
                f"dataset({rank}) comes from tfdist.data.global_batches, which returns "
                f"the samples of rank {runtime.rank()}, the reader. Use "
                "tfdist.data.shard(..., rank=rank, size=tfdist.size()), or samples "
                "from tfdist.data.positions(..., rank=rank)."
            )
    return found


def _describe_datasets(datasets: dict[int, tf.data.Dataset]) -> dict[str, Any]:
    """Describes the datasets for the other ranks; equal specs are listed once."""
    specs: list[Any] = []
    by_rank = {}
    for rank, one in datasets.items():
        spec = _element_codec.describe(one.element_spec)
        if spec not in specs:
            specs.append(spec)
        is_part = _dataset_checks.is_part(one, runtime.size())
        by_rank[rank] = [specs.index(spec), int(one.cardinality()), is_part]
    return {"specs": specs, "datasets": by_rank}


def _serve(
    number: int, rank: int, datasets: dict[int, tf.data.Dataset]
) -> dict[str, Any]:
    credentials, address = runtime.credentials()
    if credentials is None:
        raise RuntimeError(
            "several ranks without credentials (this is a bug in tfdist)"
        )
    service = runtime.get_resource(
        "data/reading", lambda: ReadingService(credentials, address, _timeout_s())
    )
    for other, one in datasets.items():
        if other != rank:
            service.add(number, other, Share(one))
    return {"listening": service.listening}


def _receive(
    shared: dict[str, Any],
    reader: int,
    number: int,
    topology: native.Topology,
    window: int,
    calls: _Calls,
) -> tf.data.Dataset:
    credentials, _ = runtime.credentials()
    if credentials is None:
        raise RuntimeError(
            "several ranks without credentials (this is a bug in tfdist)"
        )
    index, cardinality, is_part = shared["datasets"][topology.rank]
    host, port = shared["listening"]["address"]
    same_host = topology.host_of[reader] == topology.host_of[topology.rank]
    source = Source(
        credentials=credentials,
        reader=reader,
        same_host=same_host and runtime.setting("TFDIST_TRANSPORT") != "tcp",
        address=(str(host), int(port)),
        unix_name=str(shared["listening"]["unix_name"]),
        dataset=number,
        window=window,
        timeout_s=_timeout_s(),
        generation=runtime.generation(),
    )
    spec = _element_codec.restore(shared["specs"][index])
    found = _scatter_dataset.dataset(
        source,
        spec,
        cardinality,
        prefetch=_prefetch(spec),
        on_deleted=lambda: calls.dropped.append(number),
    )
    return _dataset_checks.mark(found, topology.size) if is_part else found


def _prefetch(spec: Any) -> int:
    """Returns how many elements TensorFlow prefetches; fewer if they are large."""
    total = 0
    for one in tf.nest.flatten(spec):
        if not one.shape.is_fully_defined():
            return 2
        total += one.shape.num_elements() * one.dtype.size
    return max(1, min(_MAX_PREFETCHED, _PREFETCH_BYTES // max(1, total)))


def _timeout_s() -> float:
    return float(runtime.setting("TFDIST_TIMEOUT_S"))


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text[:_ERROR_CHARACTERS]
