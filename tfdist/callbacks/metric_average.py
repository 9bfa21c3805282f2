"""MetricAverage: metrics over the samples of all ranks, on every rank."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np

from tfdist import errors
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._callback_list import is_in_fit
from tfdist.collectives.objects import gather_from_all
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.training.metric_states import Snapshot, check_metrics, combine, results_of

_logger = logging.getLogger("tfdist")
_VALIDATION = "val_"


class MetricAverage(RankCallback):
    """Replaces the metrics of an epoch with metrics over the samples of all ranks.

    Results are exact even if ranks have different numbers of samples: the sums and
    counts in the metrics are added over the ranks, and the results are recomputed. A
    mean therefore weights all samples equally, and a metric that is not a mean (AUC,
    F1, R2) is computed from the data of all ranks. This applies to training and
    validation metrics. It works for all Keras metrics; a custom metric needs an
    attribute `tfdist_merge` (`docs/evaluation.md`). Other numbers in the logs (e.g.
    from a custom `train_step` or an earlier callback) are averaged, weighted by the
    ranks' numbers of samples. A number that is equal on all ranks stays unchanged.

    Outside of `fit` use `tfdist.evaluate`, which splits the data itself.
    `model.evaluate` on sharded data returns the metrics of this rank's samples. With
    this callback, `model.evaluate(share, callbacks=[MetricAverage()])` returns the
    metrics over the samples of all ranks. The data then need a known number of steps,
    as from `tfdist.data.shard`, and all ranks have to call `model.evaluate`.

    Put it before callbacks that use metrics: it changes the logs in place, so these
    callbacks, the history and the progress bar get equal numbers on all ranks. An
    earlier callback that evaluates the model at the end of an epoch overwrites the
    metrics. `MetricAverage` then raises a `ValueError`, unless the epoch has a
    validation, or the number of steps is known (as with `tfdist.data.shard`) and all
    steps were taken.

    Raises:
        ValueError: at the start: a metric does not define how its states are combined.
            At the end of an epoch, on all ranks: an earlier callback has changed the
            metrics or the logs, and the old values are lost.
        tfdist.MismatchError: at the end of an epoch: the ranks' logs have different
            names.
        NotImplementedError: in `evaluate`: the number of steps is unknown, or a custom
            `test_step` returns values that are not metrics.

    Example:
        >>> import keras, tfdist
        >>> callbacks = [tfdist.callbacks.MetricAverage(),
        ...              keras.callbacks.EarlyStopping(monitor="val_loss")]
    """

    def __init__(self) -> None:
        super().__init__()
        self._training: Snapshot | None = None
        self._validation: Snapshot | None = None
        self._combines_states = True
        self._in_epoch = False
        self._has_steps = False
        self._combined = False
        self._warned: set[str] = set()

    def set_model(self, model: keras.Model) -> None:
        """Stores the model at the start of `fit`, or of `evaluate` outside of `fit`."""
        super().set_model(model)
        self._in_epoch = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raises if a metric cannot be combined."""
        super().on_train_begin(logs)
        check_metrics(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Clears the state of the previous epoch."""
        super().on_epoch_begin(epoch, logs)
        self._training = self._validation = None
        self._in_epoch = True
        self._has_steps = False

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Saves the training metrics at the last step, before they may be reset."""
        super().on_train_batch_end(batch, logs)
        self._has_steps = True
        steps = (self.params or {}).get("steps")
        is_last = steps is not None and batch + 1 >= steps
        self._training = self._kept() if is_last else None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the training metrics, because validation in `fit` resets them."""
        self._combined = False
        if self._in_epoch:
            self._training = self._training or self._kept()
        else:
            _check_can_evaluate(self.params)
            check_metrics(self.model)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Combines the metrics over the ranks at the last step of `evaluate`.

        `on_test_end` would be too late, because Keras has already read the results.
        """
        if self._in_epoch or batch + 1 < self.params["steps"]:
            return
        names = set(results_of(self.model))
        if names != set(logs or {}):
            raise NotImplementedError(
                "MetricAverage in model.evaluate averages the model's metrics "
                f"{sorted(names)}, but test_step returned {sorted(logs or {})}. "
                "Evaluate all the data on each rank instead, without the callback."
            )
        now = Snapshot(self.model)
        exchange_logs(logs or {}, {"": now}, self._ranks)
        [total] = combine([now], process_set=self._ranks)
        now.assign(total)
        self._combined = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves validation metrics; raises if `evaluate` would return local metrics."""
        if self._in_epoch:
            self._validation = self._kept()
        elif not self._combined:
            raise NotImplementedError(
                f"MetricAverage: model.evaluate ended before step "
                f"{self.params['steps']}, so the metrics were not averaged. Evaluate "
                "all steps on every rank."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in `logs`."""
        self._in_epoch = False
        if logs is None:
            return
        now = Snapshot(self.model)
        parts = {"": self._training or now}
        if self._validation is not None:
            parts[_VALIDATION] = self._validation
        changed = [] if self._training is not None else self._changed(logs)
        unused = _unused(self.model, parts)
        now.restore()
        shared = exchange_logs(logs, parts, self._ranks, changed, unused)
        # A custom step may return numbers with the names of metrics that no rank uses.
        unused = set.intersection(*(set(other["unused"]) for other in shared))
        totals = combine(list(parts.values()), process_set=self._ranks)
        results: dict[str, Any] = {}
        for (prefix, part), total in zip(parts.items(), totals, strict=True):
            part.assign(total)
            for key, value in results_of(self.model).items():
                results[prefix + key] = value
        now.restore()
        for key in logs:
            if key in results and key not in unused:
                logs[key] = results[key]
            elif as_number(logs[key]) is not None:
                logs[key] = self._weighted_mean(key, logs[key], shared)

    @property
    def has_training_metrics(self) -> bool:
        """Returns whether the training metrics of this epoch were saved."""
        return self._training is not None

    def set_training_metrics(self, metrics: Snapshot) -> None:
        """Replaces this rank's training metrics of the current epoch."""
        self._training = metrics

    def set_validation_metrics(self, metrics: Snapshot) -> None:
        """Replaces this rank's validation metrics of the current epoch."""
        self._validation = metrics

    def _kept(self) -> Snapshot | None:
        return Snapshot(self.model) if self._combines_states else None

    def _changed(self, logs: dict[str, Any]) -> list[str]:
        """Returns the metrics that have changed since Keras put them into `logs`.

        The list is empty with a custom `train_step` or loop, which may not put metrics
        into `logs`, and on a rank without steps, whose logs come from another rank.
        """
        own_step = type(self.model).train_step is not keras.Model.train_step
        if own_step or not self._has_steps or not is_in_fit(self.model):
            return []
        return [
            key
            for key, value in results_of(self.model).items()
            if not np.allclose(value, logs.get(key, value), atol=0, equal_nan=True)
        ]

    def _weighted_mean(self, key: str, value: Any, shared: list[dict[str, Any]]) -> Any:
        """Returns the mean, or this rank's `value` unchanged if all ranks have it."""
        values = [other["numbers"].get(key, float("nan")) for other in shared]
        if len(set(values)) == 1:
            return value  # an integer stays one, for `range` or "{step:04d}"
        prefix = _VALIDATION if key.startswith(_VALIDATION) else ""
        samples = [other["samples"].get(prefix, 0.0) for other in shared]
        if sum(samples) <= 0:  # a single rank may have no data
            first = members_of(self._ranks)[0]
            if key not in self._warned and runtime.rank() == first:
                _logger.warning(
                    "The number of samples for %r is unknown, so all ranks have equal "
                    "weight. Return the value from a keras.metrics.Metric of the "
                    "model.",
                    key,
                )
            self._warned.add(key)
            samples = [1.0] * len(values)
        return float(np.average(values, weights=samples))


def as_number(value: Any) -> float | None:
    """Returns a real scalar of Python, NumPy or TensorFlow as a float, others as None.

    Example:
        >>> as_number(np.float32(0.5)), as_number(True), as_number(np.zeros(2))
        (0.5, None, None)
    """
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(value) if is_number else None


def _unused(model: keras.Model, parts: dict[str, Snapshot]) -> set[str]:
    """Returns the names, as in the logs, of metrics that have seen no sample.

    Resets the metrics of the model.
    """
    model.reset_metrics()
    reset = {id(state.variable): value for state, value in Snapshot(model).pairs()}
    found: set[str] = set()
    for prefix, part in parts.items():
        changed = {
            id(state.variable)
            for state, value in part.pairs()
            if not np.array_equal(value, reset.get(id(state.variable), value))
        }
        for metric in model.metrics:
            if metric.variables and changed.isdisjoint(map(id, metric.variables)):
                result = metric.result()
                names = result if isinstance(result, dict) else [metric.name]
                found |= {prefix + name for name in names}
    return found


def _check_can_evaluate(params: dict[str, Any]) -> None:
    runtime.check_initialized()
    if params.get("steps") is None:
        raise NotImplementedError(
            "Expected data with a known number of steps for MetricAverage in "
            "model.evaluate, got data of unknown length. Use tfdist.data.shard, or "
            "pass the same steps=... on every rank."
        )


def exchange_logs(
    logs: dict[str, Any],
    parts: dict[str, Snapshot],
    process_set: ProcessSet | None,
    changed: Sequence[str] = (),
    unused: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Gathers names, numbers and sample counts of all ranks; checks the names.

    Without this check, a rank with an additional name in its logs would wait for the
    other ranks forever, or take part in an operation with a different shape.

    Args:
        logs: the logs of the epoch on this rank.
        parts: the metric states, by prefix of their names in the logs: "" or "val_".
        process_set: the ranks that take part; None for all.
        changed: metrics that no longer match the logs.
        unused: names in the logs of metrics that have seen no sample on this rank.

    Raises:
        tfdist.MismatchError: the names or the states differ. All ranks raise it.
        ValueError: `changed` is not empty on any rank. All ranks raise it.
    """
    own_numbers = {key: as_number(value) for key, value in logs.items()}
    own = {
        "names": sorted(logs),
        "states": [part.describe() for part in parts.values()],
        "numbers": {k: v for k, v in own_numbers.items() if v is not None},
        "samples": {prefix: part.samples for prefix, part in parts.items()},
        "changed": list(changed),
        "unused": sorted(unused),
    }
    shared = gather_from_all(
        own,
        "MetricAverage",
        name="MetricAverage at the end of an epoch",
        process_set=process_set,
    )
    ranks = members_of(process_set)
    for rank, other in zip(ranks, shared, strict=True):
        for what in ("names", "states"):
            if other[what] != shared[0][what]:
                raise errors.MismatchError(
                    f"The metrics differ between ranks: their {what} are "
                    f"{shared[0][what]} on rank {ranks[0]} and {other[what]} on rank "
                    f"{rank}. "
                    "Compile the model with the same metrics on every rank, and "
                    "validate on all ranks or on none."
                )
        if other["changed"]:
            raise ValueError(
                "MetricAverage expected the metrics as the epoch computed them, but "
                f"the values of {other['changed']} on rank {rank} have changed since. "
                "An earlier callback has evaluated the model, reset its metrics or "
                "changed the logs in on_epoch_end. Put MetricAverage before it in the "
                "list of callbacks."
            )
    return shared
