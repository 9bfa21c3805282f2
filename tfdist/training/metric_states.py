"""Exact combination of a model's metric states over all ranks.

A Keras metric accumulates state variables over the batches (sums, counts, confusion
matrices) and computes its result from them. If batches are only ever added to these
variables, their sums over the ranks are the states for the samples of all ranks, and
the result computed from the sums equals that of one process. This holds for every class
in `keras.metrics`; a custom metric has to define how its states are combined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.collectives import ReduceOp
from tfdist.core.process_sets import ProcessSet, members_of

_OPERATIONS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
# Kind of NumPy dtype → the dtype in which its values are combined; default float64.
_WIDE = {"b": "int64", "i": "int64", "u": "uint64"}
RULES = tuple(_OPERATIONS)
ATTRIBUTE = "tfdist_merge"
_CONFUSION = (
    "true_positives",
    "false_positives",
    "true_negatives",
    "false_negatives",
)
# Keras class → its states that are sums over batches. All of keras.metrics and most
# custom metrics derive from these.
_SUMS: dict[type, tuple[str, ...]] = {
    keras.metrics.Mean: ("total", "count"),
    keras.metrics.Sum: ("total",),
    keras.metrics.TruePositives: ("accumulator",),
    keras.metrics.FalsePositives: ("accumulator",),
    keras.metrics.TrueNegatives: ("accumulator",),
    keras.metrics.FalseNegatives: ("accumulator",),
    keras.metrics.Precision: _CONFUSION,
    keras.metrics.Recall: _CONFUSION,
    keras.metrics.SensitivityAtSpecificity: _CONFUSION,
    keras.metrics.SpecificityAtSensitivity: _CONFUSION,
    keras.metrics.PrecisionAtRecall: _CONFUSION,
    keras.metrics.RecallAtPrecision: _CONFUSION,
    keras.metrics.AUC: _CONFUSION,
    keras.metrics.FBetaScore: (*_CONFUSION, "intermediate_weights"),
    keras.metrics.IoU: ("total_cm",),
    keras.metrics.R2Score: (
        *("num_samples", "squared_sum", "sum", "total_mse", "count"),
    ),
}


class State(NamedTuple):
    """One variable of a metric.

    Attributes:
        variable: the Keras variable.
        name: names of the metric and the variable, for messages.
        rule: operation that combines the ranks' values: "sum", "max" or "min".
    """

    variable: Any
    name: str
    rule: str


def check_metrics(model: keras.Model) -> None:
    """Raises if a metric of a model cannot be combined.

    The check includes metrics passed to `compile` that Keras has not built yet.

    Raises:
        ValueError: a metric does not define how its states are combined.
    """
    compiled = getattr(model, "_compile_metrics", None)
    given = [
        getattr(compiled, name, None)
        for name in ("_user_metrics", "_user_weighted_metrics")
    ]
    for metric in [*keras.tree.flatten(given), *model.metrics]:
        if isinstance(metric, keras.metrics.Metric):
            list(_states_of_metric(metric))


def states_of(model: keras.Model) -> list[State]:
    """Returns the states of all metrics, in the model's order without duplicates.

    Raises:
        ValueError: a metric does not define how its states are combined.
    """
    unique: dict[int, State] = {}
    for metric in model.metrics:
        for state in _states_of_metric(metric):
            unique.setdefault(id(state.variable), state)
    return list(unique.values())


def _states_of_metric(metric: keras.metrics.Metric) -> Iterator[State]:
    inner = _parts(metric)
    rules = _rules(metric)
    own = {id(v) for part in inner for v in part.variables}
    for part in inner:
        yield from _states_of_metric(part)
    variables = [v for v in metric.variables if id(v) not in own]
    known = inner or rules or _is_container(metric) or _keras_class(metric)
    if not variables and not known:
        raise ValueError(_refusal(metric, "its states, which do not exist yet,"))
    for variable in variables:
        name = f"{metric.name}/{variable.name}"
        rule = rules.get(id(variable), rules.get("all"))
        if rule is None:
            raise ValueError(_refusal(metric, f"its state {variable.name!r}"))
        yield State(variable, name, rule)


def _parts(metric: keras.metrics.Metric) -> list[keras.metrics.Metric]:
    """Returns the metrics that a metric consists of."""
    # The container of the metrics passed to compile has its own list, `metrics`.
    inner = metric.metrics if _is_container(metric) else metric._metrics
    return [part for part in inner if part is not metric]


def _is_container(metric: keras.metrics.Metric) -> bool:
    return hasattr(metric, "_user_metrics")


def _keras_class(metric: keras.metrics.Metric) -> type | None:
    return next((cls for cls in _SUMS if isinstance(metric, cls)), None)


def _rules(metric: keras.metrics.Metric) -> dict[Any, str]:
    """Returns the rule of each variable by id; the key "all" is for other variables.

    An attribute named in `tfdist_merge` may hold a list or a dict of variables.
    """
    cls = _keras_class(metric)
    names = _SUMS[cls] if cls else ()
    found: dict[Any, str] = {id(getattr(metric, name, None)): "sum" for name in names}
    declared = getattr(metric, ATTRIBUTE, None)
    if declared is None:
        return found
    by_name = declared if isinstance(declared, dict) else {"": declared}
    for name, rule in by_name.items():
        if rule not in RULES:
            raise ValueError(
                f"Expected {ATTRIBUTE} of the metric {metric.name!r} to be one of "
                f"{list(RULES)}, or a dict from the names of its attributes to these, "
                f"got {declared!r}."
            )
        if name:
            states = keras.tree.flatten(getattr(metric, name, None))
            found.update((id(variable), rule) for variable in states)
        else:
            found["all"] = rule
    return found


def _refusal(metric: keras.metrics.Metric, what: str) -> str:
    kind = type(metric).__name__
    return (
        f"The metric {metric.name!r} ({kind}) does not define how to combine {what} "
        "across ranks; only the states of Keras classes are known to be sums. "
        f"Derive it from keras.metrics.Mean or Sum, or add to the class {kind}:\n"
        f'    {ATTRIBUTE} = "sum"  # all its states start at 0 and are added to\n'
        "or a rule for each state, by the name of its attribute:\n"
        f'    {ATTRIBUTE} = {{"total": "sum", "highest": "max", "lowest": "min"}}\n'
        "For other states (a mean, a variance), store sums instead, and compute the "
        "result from these sums."
    )


class Snapshot:
    """Values of a model's metric states at one point in time.

    Attributes:
        states: the states of all metrics, see `states_of`.
        values: a NumPy array for each state.
        samples: number of samples counted by the loss tracker; 0.0 without one.
    """

    def __init__(self, model: keras.Model) -> None:
        self.states = states_of(model)
        tracker = getattr(model, "_loss_tracker", None)
        self._count = getattr(tracker, "count", None)
        self.set_values([keras.ops.convert_to_numpy(s.variable) for s in self.states])

    def describe(self) -> list[str]:
        """Describes the states, which must be equal on all ranks to be combined."""
        return [
            f"{state.name} {value.dtype.name}{list(value.shape)} {state.rule}"
            for state, value in zip(self.states, self.values, strict=True)
        ]

    def set_values(self, values: Sequence[np.ndarray]) -> None:
        """Replaces the values, without changing the variables."""
        self.values = list(values)
        counts = [
            value
            for state, value in zip(self.states, self.values, strict=True)
            if state.variable is self._count
        ]
        self.samples = float(counts[0]) if counts else 0.0

    def pairs(self) -> Iterator[tuple[State, np.ndarray]]:
        """Returns each state with its value."""
        return zip(self.states, self.values, strict=True)

    def restore(self) -> None:
        """Assigns the values of the snapshot to the variables."""
        self.assign(self.values)

    def assign(self, values: Sequence[np.ndarray]) -> None:
        """Assigns other values to the variables."""
        for state, value in zip(self.states, values, strict=True):
            state.variable.assign(value)


def combine(
    parts: Sequence[Snapshot],
    *,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> list[list[np.ndarray]]:
    """Combines the states over all ranks; the result is bitwise equal on every rank.

    Integers are combined in 64 bits, floating-point numbers in float64, so sums of
    counts below 2**53 are exact in any order. The result is rounded once, to the dtype
    of the state.

    Args:
        parts: snapshots whose `describe` is equal on all ranks.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part; default all.

    Returns:
        The combined values for each snapshot, in the order of its states.
    """
    if len(members_of(process_set)) == 1:
        return [list(part.values) for part in parts]
    groups: dict[tuple[str, str], list[np.ndarray]] = {}
    for part in parts:
        for state, value in zip(part.states, part.values, strict=True):
            groups.setdefault(_group_of(state, value), []).append(value)
    reduced: dict[tuple[str, str], Iterator[np.ndarray]] = {}
    for (rule, dtype), values in groups.items():
        whole = collectives.allreduce(
            tf.constant(np.concatenate([v.ravel().astype(dtype) for v in values])),
            op=_OPERATIONS[rule],
            name=f"metrics of all ranks, {rule} of {dtype}",
            timeout_s=timeout_s,
            process_set=process_set,
        ).numpy()
        ends = np.cumsum([v.size for v in values])
        reduced[rule, dtype] = iter(np.split(whole, ends[:-1]))
    return [
        [
            next(reduced[_group_of(state, value)])
            .reshape(value.shape)
            .astype(value.dtype)
            for state, value in zip(part.states, part.values, strict=True)
        ]
        for part in parts
    ]


def _group_of(state: State, value: np.ndarray) -> tuple[str, str]:
    """Returns the rule and dtype by which states are grouped into one operation."""
    return state.rule, _WIDE.get(value.dtype.kind, "float64")


def results_of(model: keras.Model) -> dict[str, Any]:
    """Returns the current results of all metrics, in the form of Keras's evaluate.

    Returns:
        Numbers by name. A metric with several results has an entry for each result. A
        result that is not a scalar is an array.
    """
    return dict(_flat(model.get_metrics_result()))


def _flat(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(results.items()):
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            array = keras.ops.convert_to_numpy(value)
            try:
                yield key, float(array)  # older NumPy: also a one-element array
            except TypeError:
                yield key, array
