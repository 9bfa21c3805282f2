"""MetricAverage: the metrics of all ranks' samples, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _runtime, collectives, errors
from tfdist.callbacks._base import RankCallback
from tfdist.collectives import ReduceOp
from tfdist.objects import allgather_object

_logger = logging.getLogger("tfdist")
_VALIDATION = "val_"


class MetricAverage(RankCallback):
    """Replaces the epoch's metrics by those of all ranks together.

    Exact, also with different numbers of samples: the sums and counts inside the
    metrics are added over the ranks, as each metric declares, and the results
    computed anew. So a mean weights every sample alike, and a metric that is no mean
    (AUC, F1, root mean square) is that of the whole data. This holds for training and
    validation metrics. Other numbers in the logs (a custom `train_step` may return
    any) are averaged with the ranks' numbers of samples as weights.

    `model.evaluate` on a share of the data is local to the rank, unless it is given
    this callback too: `model.evaluate(share, callbacks=[MetricAverage()])` returns the
    metrics of all ranks' samples. It needs data of a known number of steps, as those
    of `tfdist.data.shard` are; and all ranks have to call it.

    Put it before callbacks that look at the metrics: it changes the logs in place, so
    these, the history and the progress bar see equal numbers on all ranks.

    Raises:
        tfdist.MismatchError: at the end of an epoch, if the ranks' logs have
            different names.
        NotImplementedError: in `evaluate`, if the number of steps is unknown, or a
            custom `test_step` returns other numbers than the model's metrics.

    Example:
        >>> import keras, tfdist
        >>> callbacks = [tfdist.callbacks.MetricAverage(),
        ...              keras.callbacks.EarlyStopping(monitor="val_loss")]
    """

    def __init__(self) -> None:
        super().__init__()
        self._training: _Snapshot | None = None
        self._in_epoch = False
        self._combined = False

    def set_model(self, model: keras.Model) -> None:
        """Comes at the start of `fit` and of an `evaluate` outside of it."""
        super().set_model(model)
        self._in_epoch = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forgets the epoch before."""
        super().on_epoch_begin(epoch, logs)
        self._training = None
        self._in_epoch = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keeps the training metrics: validation inside `fit` resets them next."""
        self._combined = False
        if self._in_epoch:
            self._training = self._training or _Snapshot(self.model)
        else:
            _check_can_evaluate(self.params)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """At the last step of `evaluate`: lets the metrics count all ranks' samples.

        When `on_test_end` comes, Keras has read the results that it returns.
        """
        if self._in_epoch or batch + 1 < self.params["steps"]:
            return
        names = {key for key, _ in _flat(self.model.get_metrics_result())}
        if names != set(logs or {}):
            raise NotImplementedError(
                "MetricAverage in model.evaluate averages the model's metrics, which "
                f"are {sorted(names)}, but its test_step returned {sorted(logs or {})}"
                ". Evaluate all the data on each rank instead, without the callback."
            )
        now = _Snapshot(self.model)
        _exchange_logs(logs or {}, {"": now})
        _results(self.model, _sum_over_ranks([now])[0])
        self._combined = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses to let `evaluate` return the numbers of this rank alone."""
        if not self._in_epoch and not self._combined:
            raise NotImplementedError(
                f"MetricAverage: model.evaluate ended before step "
                f"{self.params['steps']}, so the metrics were not averaged. Let every "
                "rank evaluate all its steps."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in `logs`."""
        self._in_epoch = False
        if logs is None:
            return
        now = _Snapshot(self.model)
        parts = {"": now}
        if self._training is not None:
            parts = {"": self._training, _VALIDATION: now}
        shared = _exchange_logs(logs, parts)
        totals = _sum_over_ranks(list(parts.values()))
        results: dict[str, float] = {}
        for prefix, total in zip(parts, totals, strict=True):
            for key, value in _results(self.model, total).items():
                results[prefix + key] = value
        now.restore()
        for key in logs:
            if key in results:
                logs[key] = results[key]
            elif isinstance(logs[key], float):
                logs[key] = _weighted_mean(key, shared)


def _check_can_evaluate(params: dict[str, Any]) -> None:
    _runtime.check_initialized()
    if params.get("steps") is None:
        raise NotImplementedError(
            "Expected data of a known number of steps for MetricAverage in "
            "model.evaluate, got data of unknown length. Write data from "
            "tfdist.data.shard, or pass steps=..., the same on every rank."
        )


class _Snapshot:
    """The values of all variables of a model's metrics at one moment."""

    def __init__(self, model: keras.Model) -> None:
        self.variables = _metric_variables(model)
        self.values = [keras.ops.convert_to_numpy(v) for v in self.variables]
        tracker = getattr(model, "_loss_tracker", None)
        count = getattr(tracker, "count", None)
        self.samples = (
            0.0 if count is None else float(keras.ops.convert_to_numpy(count))
        )

    def vector(self) -> np.ndarray:
        """All values in one float64 vector; zeros where only rank 0's count."""
        parts = [np.zeros(0)]
        for variable, value in zip(self.variables, self.values, strict=True):
            part = np.asarray(value, np.float64).ravel()
            alone = getattr(variable, "aggregation", "sum") not in ("sum", "mean")
            parts.append(part * 0 if alone and _runtime.rank() else part)
        return np.concatenate(parts)

    def restore(self) -> None:
        """Puts the values back."""
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)


def _metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of all metrics, each once, in the model's order."""
    unique = {id(v): v for metric in model.metrics for v in metric.variables}
    return list(unique.values())


def _exchange_logs(
    logs: dict[str, Any], parts: dict[str, _Snapshot]
) -> list[dict[str, Any]]:
    """All ranks' names, numbers and sample counts; an error if the names differ.

    Without this a rank whose logs have one name more would wait for the others in an
    operation of another shape, or for ever.
    """
    own = {
        "names": sorted(logs),
        "shapes": [[list(np.shape(v)) for v in part.values] for part in parts.values()],
        "numbers": {k: v for k, v in logs.items() if isinstance(v, float)},
        "samples": {prefix: part.samples for prefix, part in parts.items()},
    }
    shared = allgather_object(own, name="metric_average.logs")
    for rank, other in enumerate(shared):
        for what in ("names", "shapes"):
            if other[what] != shared[0][what]:
                raise errors.MismatchError(
                    f"The metrics differ between ranks: their {what} are "
                    f"{shared[0][what]} on rank 0 and {other[what]} on rank {rank}. "
                    "Compile the model with the same metrics on every rank, and "
                    "validate on all ranks or on none."
                )
    return shared


def _sum_over_ranks(parts: list[_Snapshot]) -> list[list[np.ndarray]]:
    """The parts' values, combined over the ranks as each variable declares."""
    vectors = [part.vector() for part in parts]
    summed = collectives.allreduce(
        tf.constant(np.concatenate(vectors)),
        op=ReduceOp.SUM,
        name="metric_average.sums",
    ).numpy()
    totals = []
    position = 0
    for part in parts:
        total = []
        for variable, value in zip(part.variables, part.values, strict=True):
            piece = summed[position : position + value.size].reshape(value.shape)
            position += value.size
            if getattr(variable, "aggregation", "sum") == "mean":
                piece = piece / _runtime.size()
            total.append(piece.astype(value.dtype))
        totals.append(total)
    return totals


def _results(model: keras.Model, values: list[np.ndarray]) -> dict[str, float]:
    """The metrics' results if their variables had these values."""
    for variable, value in zip(_metric_variables(model), values, strict=True):
        variable.assign(value)
    results: dict[str, float] = {}
    for key, value in _flat(model.get_metrics_result()):
        array = keras.ops.convert_to_numpy(value)
        if array.ndim == 0:
            results[key] = float(array)
    return results


def _flat(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a dict and of the dicts in it, as Keras flattens its logs."""
    for key, value in results.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


def _weighted_mean(key: str, shared: list[dict[str, Any]]) -> float:
    numbers = [other["numbers"].get(key, float("nan")) for other in shared]
    if len(set(numbers)) == 1:
        return numbers[0]
    prefix = _VALIDATION if key.startswith(_VALIDATION) else ""
    samples = [other["samples"].get(prefix, 0.0) for other in shared]
    if min(samples) <= 0:
        _logger.warning(
            "Cannot tell how many samples are behind %r; the ranks are weighted "
            "alike. Return it from a keras.metrics.Metric of the model.",
            key,
        )
        samples = [1.0] * len(numbers)
    return float(np.average(numbers, weights=samples))
