"""predict: outputs for a data set, with the work split over the ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.collectives._arguments import dtype_of
from tfdist.collectives.all_ranks import CoordinatedCall
from tfdist.collectives.consistency.fingerprint import fingerprints
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet
from tfdist.training.batch_partition import Part
from tfdist.training.evaluate import (
    agree_on_start,
    agree_on_weights,
    bar_of,
    inference_weights,
    start,
)

GATHER = ("all", "root", "none")


def predict(
    model: keras.Model,
    x: Any,
    *,
    batch_size: int | None = None,
    gather: str = "all",
    verbose: str | int = "auto",
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Computes a model's outputs for a data set on all ranks together.

    Equivalent to `model.predict(x, ...)` in one process: the data are split into the
    same batches, each rank computes some of them, and the outputs are concatenated in
    the order of the data. A batch runs the same program as in one process, so the
    outputs are bitwise equal if that program is deterministic.

    All ranks have to call this function with the same data and the same weights. They
    wait for each other only before and after their work, so the number of batches may
    differ between ranks and may be 0.

    Args:
        model: a model, used as it was compiled (`jit_compile`, `run_eagerly`,
            `steps_per_execution`), with its dtype policy.
        x: the whole data, on every rank, as in `tfdist.evaluate`.
        batch_size: samples in a batch, at least 1; default 32 for arrays. If it is
            given, a `tf.data.Dataset` must contain single samples, which are then
            batched. Otherwise the dataset must contain batches.
        gather: which ranks get the outputs. With "all" (default), every rank gets them.
            With "root", the first rank gets them, and the others get None. With "none",
            outputs are not sent, and every rank gets its own part as `(outputs,
            indices)`, with the int64 indices of its samples in the data.
        verbose: as in Keras, for this rank; default "auto": a progress bar on the
            first rank only.
        timeout_s: seconds to wait for the slowest rank after this rank has finished;
            default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part; only these ranks call the function;
            default all.

    Returns:
        The result of `model.predict`: a NumPy array of shape `[samples, ...]`, or a
        structure of arrays, with the model's dtypes. With "all", the result is bitwise
        equal on all ranks.

    Raises:
        TypeError: the data cannot be partitioned, or the outputs are ragged or have a
            dtype that cannot be sent.
        ValueError: the data are empty, shuffled or sharded, an option is invalid, or a
            layer is stateful.
        tfdist.MismatchError: the ranks differ in their data (for arrays, some rows are
            compared), weights, preprocessing layers or shapes of outputs, or a rank has
            joined (`tfdist.join`).
        tfdist.RankFailedError: another rank raised an error or failed.
        tfdist.TimeoutError: a rank did not finish within `timeout_s`.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(3.0)])
        >>> x = np.arange(5.0).reshape(5, 1)
        >>> tfdist.predict(model, x, batch_size=2, verbose=0).tolist()
        [[0.0], [3.0], [6.0], [9.0], [12.0]]
        >>> own, indices = tfdist.predict(
        ...     model, x, batch_size=2, gather="none", verbose=0)
        >>> indices.tolist()  # on one rank; on the first of two: [0, 1]
        [0, 1, 2, 3, 4]
    """
    runtime.check_initialized()
    ranks = CoordinatedCall("predict", timeout_s, process_set)

    def prepare() -> tuple[Part, dict[str, Any]]:
        if gather not in GATHER:
            raise ValueError(
                f"Expected gather to be one of {list(GATHER)}, got {gather!r}."
            )
        part, facts = start(model, ranks, x, None, None, batch_size)
        return part, {**facts, "gather": gather}

    part, told = agree_on_start(model, ranks, prepare)
    ranks.agree(told, "gather", "gather", "Use the same value.")
    shown = bar_of(verbose, ranks)

    def work() -> tuple[Any, dict[str, Any]]:
        if part.inputs is None:  # keeps the structure and shapes, but no rows
            outputs = model.predict(**part.first, verbose=0)
            outputs = keras.tree.map_structure(lambda a: a[:0], outputs)
        else:
            outputs = model.predict(**part.inputs, verbose=shown)
        return outputs, {
            **_facts(outputs, gather),
            "weights": fingerprints(inference_weights(model)),
        }

    outputs, told = ranks.run("after the last batch", work)
    agree_on_weights(model, ranks, told)  # including weights from the first batch
    rows = [facts["rows"] for facts in told]
    if gather == "none":
        own = ranks.ranks.index(runtime.rank())
        begin = sum(rows[:own])
        return outputs, np.arange(begin, begin + rows[own], dtype=np.int64)
    advice = "Return outputs of the same shape for every batch."
    ranks.agree(told, "outputs", "the form of the outputs", advice)
    return _collect(outputs, gather, ranks)


def _facts(outputs: Any, gather: str) -> dict[str, Any]:
    """Returns the facts about this rank's outputs that the other ranks need.

    Raises:
        TypeError: the outputs cannot be sent.
    """
    arrays = keras.tree.flatten(outputs)
    described = []
    for array in arrays if gather != "none" else []:
        if isinstance(array, tf.RaggedTensor):
            raise TypeError(
                "Expected arrays as outputs in tfdist.predict, got a ragged tensor. "
                'Pad it in the model, or pass gather="none" and combine the parts '
                "yourself."
            )
        dtype_of(array.dtype, 'predict (use gather="none" to avoid sending them)')
        described.append(f"{array.dtype.name}{list(array.shape[1:])}")
    numbers = keras.tree.pack_sequence_as(outputs, list(range(len(arrays))))
    return {
        "outputs": f"{numbers!r} {', '.join(described)}",
        "rows": int(arrays[0].shape[0]) if arrays else 0,
    }


def _collect(outputs: Any, gather: str, ranks: CoordinatedCall) -> Any:
    """Gathers the outputs of all ranks, one array after another.

    The ranks' ranges of batches are in rank order, so the result has the order of the
    data.
    """
    first = ranks.ranks[0]
    receives = gather == "all" or runtime.rank() == first
    found: list[Any] = []
    for number, array in enumerate(keras.tree.flatten(outputs)):
        options: dict[str, Any] = {
            "name": f"predict.{number}",
            "timeout_s": ranks.timeout_s,
            "process_set": ranks.process_set,
        }
        if gather == "all":
            rows = collectives.allgather(array, **options)
        else:
            rows = collectives.gather(array, first, **options)
        if receives:
            found.append(rows.numpy())
    return keras.tree.pack_sequence_as(outputs, found) if receives else None
