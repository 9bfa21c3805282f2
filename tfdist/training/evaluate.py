"""evaluate: loss and metrics of a data set, with the work split over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist import errors
from tfdist.collectives.all_ranks import CoordinatedCall
from tfdist.collectives.consistency.fingerprint import fingerprints
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet
from tfdist.layers.synchronized import batch_normalizations, uses_renorm
from tfdist.training.batch_partition import Part, partition
from tfdist.training.metric_states import Snapshot, check_metrics, combine, results_of
from tfdist.training.preprocessing_layers import check_prints, layer_fingerprints


def evaluate(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    sample_weight: Any = None,
    verbose: str | int = "auto",
    return_dict: bool = False,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Computes the loss and metrics of a data set on all ranks together.

    Equivalent to `model.evaluate(x, y, ...)` in one process: the data are split into
    the same batches, each rank evaluates some of them, and the states of the metrics
    are combined exactly. Each sample is therefore used once, with its weight, and a
    metric that is not a mean (AUC, F1, R2) is computed from the whole data. Counts are
    bitwise equal to those in one process; floating-point numbers are summed in a
    different order.

    All ranks have to call this function with the same data and the same weights. They
    wait for each other only before and after their work, so the number of batches may
    differ between ranks and may be 0.

    Args:
        model: a compiled model, used as it was compiled (`jit_compile`, `run_eagerly`,
            `steps_per_execution`), with its dtype policy.
        x: the whole data, on every rank: arrays or a structure of arrays with the
            samples along the first axis; or a `tf.data.Dataset`, not shuffled, of known
            or unknown length; or a `keras.utils.PyDataset` of batches, whose order has
            to be equal on all ranks even after `on_epoch_begin` and `on_epoch_end`.
        y: the targets, if `x` consists of arrays.
        batch_size: samples in a batch, at least 1; default 32 for arrays. If it is
            given, a `tf.data.Dataset` must contain single samples, which are then
            batched. Otherwise the dataset must contain batches.
        sample_weight: a weight for each sample, if `x` consists of arrays; default 1.
        verbose: as in Keras, for this rank; default "auto": a progress bar on the
            first rank only.
        return_dict: whether to return a dict of results by name; default False.
        timeout_s: seconds to wait for the slowest rank after this rank has finished;
            default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part; only these ranks call the function;
            default all.

    Returns:
        The result of `model.evaluate`, which is equal on all ranks: the loss, a list of
        the loss and metrics, or a dict of them. Afterwards, the model's metrics hold
        the states for all the data, bitwise equal on all ranks.

    Raises:
        TypeError: the data cannot be partitioned.
        ValueError: the data are empty, shuffled or sharded, a custom metric does not
            define how its states are combined (see `docs/evaluation.md`), or a layer is
            stateful.
        NotImplementedError: `test_step` returns values that are not metrics.
        tfdist.MismatchError: the ranks differ in their data (for arrays, some rows are
            compared), metrics, weights or preprocessing layers, or a rank has joined
            (`tfdist.join`).
        tfdist.RankFailedError: another rank raised an error or failed.
        tfdist.TimeoutError: a rank did not finish within `timeout_s`.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(
        ...     1, kernel_initializer="ones")])
        >>> model.compile(loss="mse", metrics=["mae"])
        >>> x = np.arange(4.0).reshape(4, 1)
        >>> tfdist.evaluate(
        ...     model, x, x + 2, batch_size=2, return_dict=True, verbose=0)
        {'loss': 4.0, 'mae': 2.0}
    """
    runtime.check_initialized()
    ranks = CoordinatedCall("evaluate", timeout_s, process_set)

    def prepare() -> tuple[Part, dict[str, Any]]:
        started = start(model, ranks, x, y, sample_weight, batch_size)
        model._assert_compile_called("evaluate")
        check_metrics(model)
        return started

    part, _ = agree_on_start(model, ranks, prepare)
    shown = bar_of(verbose, ranks)

    def work() -> tuple[Snapshot, dict[str, Any]]:
        inputs = part.first if part.inputs is None else part.inputs
        logs = model.evaluate(
            **inputs, verbose=0 if part.inputs is None else shown, return_dict=True
        )
        names = sorted(results_of(model))
        if sorted(logs) != names:
            raise NotImplementedError(
                "tfdist.evaluate combines the model's metrics, which are "
                f"{names}, but its test_step returned {sorted(logs)}. Return the "
                "results of metrics: self.get_metrics_result()."
            )
        if part.inputs is None:  # the batch of another rank, run to create the states
            model.reset_metrics()
        now = Snapshot(model)
        weights = fingerprints(inference_weights(model))
        return now, {"metrics": now.describe(), "weights": weights}

    now, told = ranks.run("after the last batch", work)
    ranks.agree(told, "metrics", "the metric list", "Use the same compile arguments.")
    agree_on_weights(model, ranks, told)  # including weights from the first batch
    [total] = combine([now], timeout_s=timeout_s, process_set=process_set)
    now.assign(total)
    results = results_of(model)
    return results if return_dict else model._flatten_metrics_in_order(results)


def start(
    model: keras.Model,
    ranks: CoordinatedCall,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
) -> tuple[Part, dict[str, Any]]:
    """Returns this rank's part of the data, and facts that all ranks compare.

    Raises:
        TypeError: `model` is not a Keras model, or the data cannot be partitioned.
        ValueError: the data are empty, or the model is stateful.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a Keras model in tfdist.{ranks.function}, got "
            f"{type(model).__name__}: {model!r}."
        )
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise ValueError(
                f"The layer {layer.name!r} is stateful: its outputs for a batch "
                "depend on earlier batches, which are on other ranks. Call "
                f"model.{ranks.function} on one rank instead."
            )
    place = ranks.ranks.index(runtime.rank())
    function = f"tfdist.{ranks.function}"
    part = partition(function, x, y, sample_weight, batch_size, place, len(ranks.ranks))
    weights = fingerprints(inference_weights(model))
    facts = {"data": part.fingerprint, "weights": weights}
    return part, {**facts, "adapted": layer_fingerprints(model)}


def inference_weights(model: keras.Model) -> list[Any]:
    """Returns the weights of a model, except statistics that only training uses.

    Those of batch renormalization differ between ranks if the layer is not
    synchronized.
    """
    unused = {
        id(variable)
        for layer in batch_normalizations(model)
        if layer.built and uses_renorm(layer)
        for variable in (layer.renorm_mean, layer.renorm_stddev)
    }
    return [v for v in model.weights if id(v) not in unused]


def agree_on_start(
    model: keras.Model,
    ranks: CoordinatedCall,
    prepare: Callable[[], tuple[Part, dict[str, Any]]],
) -> tuple[Part, list[dict[str, Any]]]:
    """Checks that all ranks have the same data, weights and preprocessing layers.

    Args:
        model: the model.
        ranks: the call that all ranks make.
        prepare: function that returns this rank's part of the data and its facts.

    Returns:
        This rank's part, and the facts of all ranks in rank order.

    Raises:
        tfdist.MismatchError: the facts differ.
    """
    part, told = ranks.run("before the first batch", prepare)
    ranks.agree(told, "data", "the data", "Pass the whole data on all ranks.")
    agree_on_weights(model, ranks, told)
    adapted = [facts["adapted"] for facts in told]
    check_prints(adapted, f"tfdist.{ranks.function}", ranks.ranks)
    return part, told


def bar_of(verbose: str | int, ranks: CoordinatedCall) -> str | int:
    """Returns `verbose` for this rank; by default, only the first rank shows a bar."""
    if verbose != "auto" or runtime.rank() == ranks.ranks[0]:
        return verbose
    return 0


def agree_on_weights(
    model: keras.Model, ranks: CoordinatedCall, told: list[dict[str, Any]]
) -> None:
    """Checks that all ranks have the same weights.

    Raises:
        tfdist.MismatchError: a weight differs; raised on all ranks.
    """
    first = told[0]["weights"]
    for rank, other in zip(ranks.ranks, told, strict=True):
        prints = other["weights"]
        if prints == first:
            continue
        what = (
            f"there are {len(prints)} weights, but {len(first)} on rank "
            f"{ranks.ranks[0]}"
        )
        advice = "Build the same model on all ranks."
        if len(prints) == len(first):
            index = next(i for i, p in enumerate(prints) if p != first[i])
            path = inference_weights(model)[index].path
            what = f"the weight {path!r} differs from rank {ranks.ranks[0]}"
            advice = "Call tfdist.broadcast_variables(model.weights) first."
            if path.rpartition("/")[2].startswith("moving_"):
                advice = "Call tfdist.layers.combine_moving_statistics(model) first."
        raise errors.MismatchError(
            f"The models differ in tfdist.{ranks.function}: on rank {rank} {what}. "
            f"{advice}"
        )
