"""The state of an elastic `fit`, which can be restored and sent to other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import collectives
from tfdist.callbacks._callback_states import (
    MAX_STATE_BYTES,
    plain_state,
    state_to_send,
)
from tfdist.callbacks._fit_place import EPOCH_END, Place
from tfdist.callbacks._fit_position import FitPosition
from tfdist.callbacks._learning_rates import factors_of
from tfdist.callbacks._metric_table import MetricTable
from tfdist.callbacks._per_rank_state import broadcast_at_start
from tfdist.callbacks.broadcast_initial_state import BroadcastInitialState
from tfdist.callbacks.metric_average import MetricAverage
from tfdist.callbacks.rank_zero_only import RankZeroOnly
from tfdist.callbacks.stop_on_signal import StopOnSignal
from tfdist.collectives.objects import broadcast_object, gather_from_all
from tfdist.collectives.per_rank_variables import note_broadcast
from tfdist.collectives.signature import describe_variable
from tfdist.collectives.variables import broadcast_variables
from tfdist.core import runtime
from tfdist.core.generations import Generations
from tfdist.elastic.seeds import SeedsByRank
from tfdist.elastic.sharing import NEWCOMER_COMMITS, Newest, check_arrived
from tfdist.elastic.snapshot import Snapshot
from tfdist.elastic.updates import update_out_of_place
from tfdist.training.model_optimizers import optimizers_of


def variables_of_steps(model: keras.Model) -> list[Any]:
    """Returns the variables that training steps change, without metrics."""
    optimizers = optimizers_of(model)
    slots = [v for one in optimizers for v in one.variables]
    found = [*model.variables, *slots, *factors_of(optimizers)]
    return list({id(getattr(v, "value", v)): v for v in found}.values())


@dataclass(frozen=True)
class Received:
    """The state of another rank, for use when this rank reaches the same place.

    Attributes:
        place: the place of the other rank in `fit`.
        values: the values of the variables.
        callbacks: the plain state of each callback.
        logs: the logs of the hook at that place.
        stop: whether training is to stop.
        start: number of steps that an earlier job has completed.
        position: the position of the other rank in the data.
    """

    place: Place
    values: list[tf.Tensor]
    callbacks: list[dict[str, Any]]
    logs: dict[str, Any]
    stop: bool
    start: int
    position: FitPosition


class FitState:
    """Variables, metrics and callbacks of a model in an elastic `fit`.

    Args:
        model: the model, whose metrics are built.
        callbacks: the callbacks whose state is sent, the same on all ranks.

    Attributes:
        callbacks: `callbacks`, and those that they contain.
        variables: weights, variables of the optimizers and seeds.
        metrics: the training metrics of the epoch, for each rank.
        validation: the validation metrics of the epoch, for each rank.
        completed: number of completed steps, validations, and hooks with collective
            operations; `NEWCOMER_COMMITS` in a newcomer.
        start: number of steps that an earlier job has completed.
        position: position in the data; saved and restored with the variables.
    """

    def __init__(
        self, model: keras.Model, callbacks: list[keras.callbacks.Callback]
    ) -> None:
        self._model = model
        # All ranks have a copy of the state of a callback that runs on rank 0.
        inner = [one.callback for one in callbacks if isinstance(one, RankZeroOnly)]
        unlisted = [
            one.checkpoint
            for one in callbacks
            if isinstance(one, StopOnSignal) and one.checkpoint not in callbacks
        ]
        self.callbacks = [*callbacks, *inner, *unlisted]
        own = variables_of_steps(model)
        has_equal_seeds = any(
            isinstance(one, BroadcastInitialState) and one.seed_generators == "equal"
            for one in callbacks
        )
        self._seeds = SeedsByRank([] if has_equal_seeds else own)
        self.variables = [*own, *self._seeds.variables]
        self.metrics = MetricTable(model, "elastic.metrics")
        self.validation = MetricTable(model, "elastic.validation")
        self._tables = (self.metrics, self.validation)
        self.completed = self.start = 0
        self.position = self._kept_position = FitPosition(0, 0)
        self._ranks: dict[int, int] = {}  # generation → rank of this process in it

    def begin(self, generations: Generations) -> None:
        """Gives all ranks the state of rank 0; a newcomer gets it when it joins."""
        if generations.is_newcomer:
            self.completed = NEWCOMER_COMMITS
            note_broadcast(self.variables)  # tracing depends on this note
        else:
            if generations.is_elastic:
                broadcast_variables(self.variables)
            else:  # some of the state may differ between ranks
                broadcast_at_start(self._model, self.variables, 0, None, "Elastic")
            self._ranks[runtime.generation()] = runtime.rank()
        self._seeds.set_for_rank()
        if generations.is_elastic:  # else no snapshot is saved after a step
            update_out_of_place(optimizers_of(self._model))
        self._snapshot = Snapshot(self.variables)

    def describe(self) -> list[str]:
        """Describes what has to be equal on all ranks."""
        names = [type(one).__name__ for one in self.callbacks]
        return [*map(describe_variable, self.variables), f"callbacks {names}"]

    def save(self) -> None:
        """Stores copies of the variables and the position, for `restore`."""
        self._snapshot.save()
        self._kept_position = self.position

    def restore(self) -> None:
        """Sets the variables and the position to the values that `save` has stored."""
        self._snapshot.restore()
        self.position = self._kept_position

    def read(self) -> list[tf.Tensor]:
        """Returns the values of the variables."""
        return [tf.identity(tf.convert_to_tensor(v)) for v in self.variables]

    def assign(self, values: list[tf.Tensor]) -> None:
        """Sets the variables to values that this or another rank has read."""
        self._snapshot.assign(values)
        self._seeds.set_for_rank()

    def share(
        self, newest: Newest, place: Place, logs: dict[str, Any]
    ) -> Received | None:
        """Shares the state in a new generation; all ranks call it.

        A rank keeps its state if no other rank has completed more. The metrics of all
        ranks are distributed to the ranks of the new generation.

        Args:
            newest: the rank that has completed most.
            place: the place of this rank in `fit`.
            logs: the logs of the hook at this place.

        Returns:
            The state of the newest rank if this rank has completed less; else None.
        """
        reports = gather_from_all(
            {
                "ranks": sorted(self._ranks.items()),
                "metrics": [table.generation for table in self._tables],
                "completed": self.completed,
            },
            "Elastic",
            name="elastic.places",
        )
        received = None
        if not newest.is_everywhere:
            received = self._broadcast(newest.root, place, logs)
        rows: list[tuple[int, np.ndarray | None]] = []  # with their generation
        for number, table in enumerate(self._tables):
            generation, holder = max(
                (one["metrics"][number], -rank)
                for rank, one in enumerate(reports)
                if one["completed"] == newest.committed
            )
            found = broadcast_object(
                table.plain_rows(),
                -holder,
                name="elastic.metrics",
                max_bytes=MAX_STATE_BYTES,
            )
            rows.append((generation, found))
        # No communication from here on, so either all of the state is taken, or none.
        ranks = [dict(map(tuple, one["ranks"])) for one in reports]
        for table, (generation, found) in zip(self._tables, rows, strict=True):
            earlier = [one.get(generation, -1) for one in ranks]
            table.regroup(found, earlier, runtime.generation())
        self._ranks[runtime.generation()] = runtime.rank()
        is_behind = self.completed != newest.committed
        self.completed = newest.committed
        if is_behind:
            return received
        self.assign(self._snapshot.values)
        self._set_metrics(place)
        self._snapshot.save()
        return None

    def reset_metrics(self) -> None:
        """Records that the metrics of all ranks were reset when an epoch began."""
        for table in self._tables:
            table.reset(runtime.generation())

    def take_step(self, received: Received, place: Place) -> None:
        """Takes variables, position and metrics of another rank.

        Args:
            received: the state of the other rank.
            place: the place of this rank in `fit`.
        """
        self.assign(received.values)
        self.position = received.position
        self.take_metrics(received, place)

    def take_metrics(self, received: Received, place: Place) -> None:
        """Takes this rank's metrics, which may include those of a lost rank.

        If the other rank has already begun the next epoch, it has reset its metrics,
        and this rank keeps its own.

        Args:
            received: the state of the other rank.
            place: the place of this rank in `fit`.
        """
        if received.place.epoch <= place.epoch:
            self._set_metrics(place)

    def take_all(self, received: Received, place: Place) -> None:
        """Takes the whole state of another rank, including its callbacks."""
        self._model.stop_training = received.stop
        self.start = received.start
        for callback, state in zip(self.callbacks, received.callbacks, strict=True):
            vars(callback).update(state)
        self.take_step(received, place)

    def _broadcast(self, root: int, place: Place, logs: dict[str, Any]) -> Received:
        """Returns the state of rank `root`, on all ranks."""
        own: dict[str, Any] = {}
        if runtime.rank() == root:
            own = {
                "place": list(place),
                "callbacks": [state_to_send(one) for one in self.callbacks],
                "logs": plain_state(logs),
                "stop": bool(self._model.stop_training),
                "start": self.start,
                "position": list(self.position),
            }
        sent = broadcast_object(
            own, root, name="elastic.callbacks", max_bytes=MAX_STATE_BYTES
        )
        values = collectives.grouped_broadcast(
            self._snapshot.values, root, name="elastic.state"
        )
        check_arrived(values, root)
        sent["place"] = Place(*sent["place"])
        sent["position"] = FitPosition(*sent["position"])
        return Received(**sent, values=values)

    def _set_metrics(self, place: Place) -> None:
        """Sets this rank's metrics to its rows in the tables."""
        rank = runtime.rank()
        is_validated = self.validation.rows is not None
        (self.validation if is_validated else self.metrics).assign(rank)
        for callback in self._averages():
            if place.part == EPOCH_END or callback.has_training_metrics:
                callback.set_training_metrics(self.metrics.snapshot(rank))
            if is_validated:
                callback.set_validation_metrics(self.validation.snapshot(rank))

    def _averages(self) -> list[MetricAverage]:
        return [one for one in self.callbacks if isinstance(one, MetricAverage)]
