"""The metric states of all ranks, kept on every rank of an elastic `fit`.

The metrics of each rank cover its own samples, and would be lost together with the
rank. Therefore the ranks exchange their metric states, a few numbers, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.training.metric_states import Snapshot, states_of

_OPERATIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_ROWS = "tfdist_metric_rows"  # in the logs of a step


def rows_of_next_ranks(
    rows: np.ndarray,
    places: Sequence[int],
    rules: Sequence[str],
    initial: np.ndarray,
) -> np.ndarray:
    """Returns the metric states for the ranks of the next generation.

    A rank that stays keeps its states. A newcomer takes over the states of a rank that
    was lost or has left. If there are fewer newcomers than such ranks, rank 0 adds the
    remaining states to its own, so that no sample is missing from the metrics of all
    ranks. If there are more, because the job grows, the remaining newcomers begin with
    reset metrics.

    Args:
        rows: array of shape [number of earlier ranks, number of states].
        places: for each of the next ranks, the index of its row; -1 for a newcomer.
        rules: how states are combined: "sum", "max" or "min", one for each state.
        initial: the states of metrics that have seen no sample.

    Example:
        >>> import numpy as np
        >>> from tfdist.callbacks._metric_table import rows_of_next_ranks
        >>> rows = np.array([[1.0], [20.0], [300.0], [4000.0]])
        >>> rows_of_next_ranks(rows, [2, 0, -1], ["sum"], np.zeros(1)).ravel().tolist()
        [4300.0, 1.0, 20.0]
    """
    lost = [place for place in range(len(rows)) if place not in places]
    found = np.tile(initial, (len(places), 1))
    for rank, place in enumerate(places):
        if place >= 0:
            found[rank] = rows[place]
        elif lost:
            found[rank] = rows[lost.pop(0)]
    for place in lost:
        for column, rule in enumerate(rules):
            combine = _OPERATIONS[rule]
            found[0, column] = combine(found[0, column], rows[place, column])
    return found


class MetricTable:
    """A table of a model's metric states, with one row for each rank.

    Args:
        model: the model that is trained; its metrics have to be built.
        name: name of the operation that exchanges the states.

    Attributes:
        rows: array of shape [number of ranks, number of states]; None if the states
            have not been exchanged since the metrics were reset.
        generation: number of the generation of the elastic job that exchanged `rows`.

    Raises:
        ValueError: a metric does not define how its states are combined.
    """

    def __init__(self, model: keras.Model, name: str) -> None:
        self._model = model
        states = states_of(model)
        self._variables = [state.variable for state in states]
        self._rules = [
            state.rule
            for state in states
            for _ in range(int(np.prod(state.variable.shape)))
        ]
        model.reset_metrics()  # as at the start of each epoch
        self._initial = self._own_states().numpy()
        self.rows: np.ndarray | tf.Tensor | None = None
        self.generation = 0

        def exchange() -> tf.Tensor:
            return collectives.allgather(self._own_states()[tf.newaxis], name=name)

        self._exchange = exchange
        self._exchange_alone = tf.function(exchange, jit_compile=False, autograph=False)

    def _own_states(self) -> tf.Tensor:
        """Returns the states of this process, of shape [number of states]."""
        own = [
            tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float64), [-1])
            for v in self._variables
        ]
        return tf.concat(own, 0) if own else tf.zeros([0], tf.float64)

    def exchange(self, generation: int) -> None:
        """Exchanges the states of all ranks; all ranks call it."""
        self.rows = self._exchange_alone()
        self.generation = generation

    def with_exchange(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Exchanges the states in a traced step, and returns its logs for `take_from`.

        The states do not depend on the gradients, so the exchange overlaps with the
        backward pass.
        """
        return {**logs, _ROWS: self._exchange()}

    def take_from(self, logs: dict[str, Any], generation: int) -> dict[str, Any]:
        """Takes the states from the logs of a step; returns the logs without them.

        If the step has not exchanged the states (the model has its own
        `make_train_function`), they are exchanged now.
        """
        logs = dict(logs)
        rows = logs.pop(_ROWS, None)
        self.rows = self._exchange_alone() if rows is None else rows
        self.generation = generation
        return logs

    def reset(self, generation: int) -> None:
        """Records that the metrics of all ranks were reset."""
        self.rows = None
        self.generation = generation

    def plain_rows(self) -> np.ndarray | None:
        """Returns the rows, to be sent to other ranks."""
        return None if self.rows is None else np.asarray(self.rows)

    def regroup(
        self, rows: np.ndarray | None, places: Sequence[int], generation: int
    ) -> None:
        """Computes the rows of the next generation's ranks.

        Args:
            rows: the rows of an earlier generation, from a rank with the newest rows;
                None if the metrics were reset.
            places: for each of the next ranks, the index of its row; -1 for a newcomer.
            generation: number of the next generation.
        """
        self.rows = None
        if rows is not None:
            self.rows = rows_of_next_ranks(rows, places, self._rules, self._initial)
        self.generation = generation

    def assign(self, rank: int) -> None:
        """Sets the metrics of this process to the row of its rank."""
        if self.rows is None:
            self._model.reset_metrics()
            return
        values = self._values(np.asarray(self.rows)[rank])
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def snapshot(self, rank: int) -> Snapshot:
        """Returns the row of a rank as a snapshot of the metrics."""
        if self.rows is None:
            return self.empty_snapshot()
        found = Snapshot(self._model)
        found.set_values(self._values(np.asarray(self.rows)[rank]))
        return found

    def empty_snapshot(self) -> Snapshot:
        """Returns the states of metrics that have seen no sample."""
        found = Snapshot(self._model)
        found.set_values(self._values(self._initial))
        return found

    def _values(self, row: np.ndarray) -> list[np.ndarray]:
        """Returns the states in a row, one array for each variable."""
        sizes = [int(np.prod(v.shape)) for v in self._variables]
        parts = np.split(row, np.cumsum(sizes))[:-1]  # the last one is empty
        return [
            part.reshape(v.shape).astype(keras.backend.standardize_dtype(v.dtype))
            for part, v in zip(parts, self._variables, strict=True)
        ]
