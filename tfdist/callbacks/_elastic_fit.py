"""The steps and hooks of an elastic `fit`, which are repeated if a rank is lost."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.utils.python_utils import pythonify_logs

from tfdist import collectives, errors
from tfdist.callbacks._base import RankCallback, finished_operations
from tfdist.callbacks._callback_states import plain_state
from tfdist.callbacks._error_translation import restore_train_function
from tfdist.callbacks._learning_rates import factors_of
from tfdist.callbacks._metric_table import MetricTable
from tfdist.callbacks._rank_comparison import RankComparison
from tfdist.callbacks.metric_average import MetricAverage
from tfdist.callbacks.rank_zero_only import RankZeroOnly
from tfdist.collectives.objects import broadcast_object, gather_from_all
from tfdist.collectives.per_rank_variables import note_broadcast
from tfdist.collectives.signature import describe_variable
from tfdist.collectives.variables import broadcast_variables
from tfdist.consistency.comparison import equal_on_all_ranks
from tfdist.consistency.fingerprint import digest_of_fingerprints, fingerprints
from tfdist.core import runtime
from tfdist.core.generations import Generations
from tfdist.elastic.seeds import SeedsByRank
from tfdist.elastic.sharing import (
    NEWCOMER_COMMITS,
    Newest,
    check_supported,
    enter_next,
    is_loss,
)
from tfdist.elastic.snapshot import Snapshot
from tfdist.training.model_optimizers import optimizers_of

_logger = logging.getLogger("tfdist")
_MAX_STATE_BYTES = 1 << 30
_EPOCH_BEGIN, _STEPS, _EPOCH_END = range(3)
_BEFORE, _STEP, _AFTER = range(3)
_END_OF_FIT = 1 << 40  # "epoch" of on_train_end
_HOOKS = (
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
)


class Place(NamedTuple):
    """A step, or one callback's call of a hook, in the order of `fit`.

    Attributes:
        epoch: counted from 0.
        part: of the epoch: its beginning, its steps, its end.
        step: first batch of the step.
        moment: before the step, the step, after it.
        callback: position of the callback in the list; 1 after a completed step.
    """

    epoch: int
    part: int
    step: int
    moment: int
    callback: int

    def is_of_steps(self) -> bool:
        """Returns whether the metrics are those of the steps of the epoch."""
        return self.part in (_EPOCH_BEGIN, _STEPS)


@dataclass
class _Program:
    """Facts about the program that runs in this process."""

    was_used: bool = False


_program = _Program()


class ElasticFit(keras.callbacks.Callback):
    """Runs the steps and the hooks of one `fit`; the last callback of its list.

    In an elastic job, it replaces the train function, and the methods of the list that
    call the hooks. What needs the other ranks (a step, a hook with collective
    operations) is counted when it is complete on all ranks, so that the ranks know
    after a loss where each of them was.

    Args:
        callbacks: the list of the `fit`.
        source: the batches, as from `tfdist.data.global_batches`.
        size: variable with the number of ranks, which traced functions use.
        is_elastic: whether the job is elastic.
    """

    described_as = "the elastic training"  # in messages, as users do not create it

    def __init__(
        self,
        callbacks: keras.callbacks.CallbackList,
        source: Any,
        size: tf.Variable,
        is_elastic: bool,
    ) -> None:
        super().__init__()
        self._list = callbacks
        self._source = source
        self._size = size
        self._is_elastic = is_elastic

    @classmethod
    def append_to(
        cls,
        callbacks: keras.callbacks.CallbackList,
        source: Any,
        size: tf.Variable,
        is_elastic: bool,
    ) -> None:
        """Appends an `ElasticFit` to the list of a `fit` that begins."""
        own = cls(callbacks, source, size, is_elastic)
        own.set_model(callbacks.model)
        own.set_params(callbacks.params)
        listed = [one for one in callbacks.callbacks if not isinstance(one, cls)]
        callbacks.callbacks[:] = [*listed, own]

    # ---- begin and end ----

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks the same state; a newcomer joins the other ranks here."""
        model = self.model
        model._symbolic_build(data_batch=_batch_like(self._source.dataset.element_spec))
        optimizers = optimizers_of(model)
        slots = [v for one in optimizers for v in one.variables]
        own = [*model.variables, *slots, *factors_of(optimizers)]
        own = list({id(getattr(v, "value", v)): v for v in own}.values())
        self._seeds = SeedsByRank(own)
        self._variables = [*own, *self._seeds.variables]
        self._generations = Generations(hides_failures=False)
        if not self._is_elastic:
            broadcast_variables(self._variables)
            self._seeds.set_for_rank()
            return
        if _program.was_used:
            raise RuntimeError(
                "Elastic was used in an earlier fit of this program. In a job started "
                "with --min-np, run all epochs in one fit: a process that joins later "
                "could not know in which fit the other ranks are."
            )
        _program.was_used = True
        check_supported()
        self._last_rank = runtime.rank()
        self._ranks_by_generation: dict[int, int] = {}
        self._metrics = MetricTable(model)
        self._completed = NEWCOMER_COMMITS if self._generations.is_newcomer else 0
        self._place = Place(0, _EPOCH_BEGIN, 0, _BEFORE, 0)
        self._resumes_at: Place | None = None
        self._received: dict[str, Any] | None = None
        self._iterator: Any = None
        self._needs_iterator = False
        self._epoch = self._step = 0
        self._function = model.train_function
        for callback in self._list.callbacks:
            if isinstance(callback, RankComparison):
                callback.stop_comparing_samples()
        if self._generations.is_newcomer:
            note_broadcast(self._variables)  # what is traced depends on it
            self._seeds.set_for_rank()
            self._snapshot = Snapshot(self._variables)
            self._rehearse()
            self._enter_next_generation()
        else:
            broadcast_variables(self._variables)
            self._seeds.set_for_rank()
            self._snapshot = Snapshot(self._variables)
            self._note_generation()
            self._generations.begin()
        model.train_function = self._train
        for hook in _HOOKS:
            setattr(self._list, hook, _Hook(self, hook))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the epoch of the data."""
        self._source.seek(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Undoes the changes to the model, after the other ranks have come here."""
        if not self._is_elastic:
            return
        collectives.barrier(name="end of the elastic fit")

    def _finish(self) -> None:
        self._generations.end()
        restore_train_function(self.model)
        if self.model.train_function == self._train:  # else it was removed
            self.model.train_function = self._function
        for hook in _HOOKS:
            delattr(self._list, hook)

    def _rehearse(self) -> None:
        """Runs one step alone, so that nobody waits while it is traced."""
        self._source.seek(0)
        self._function(iter(self._source.dataset))
        self._metrics.exchange(0)
        self._metrics.reset(0)
        self.model.reset_metrics()
        self._snapshot.restore()

    # ---- steps ----

    def _train(self, iterator: Any) -> Any:
        """Runs a step, as the train function of the model."""
        place = Place(self._epoch, _STEPS, self._step, _STEP, 0)
        if self._skips(place):
            return {}
        self._snapshot.save()
        before = self._completed
        while True:
            try:
                logs = self._function(self._batches(place, iterator))
                self._metrics.exchange(runtime.generation())
                self._completed = before + 1
                break
            except Exception as error:
                if not self._is_loss(error):
                    raise
                self._recover(place)
                if self._completed > before:  # the other ranks had completed it
                    logs = self.model.get_metrics_result()
                    self._needs_iterator = True
                    break
        if not self._is_last_step():
            self._let_newcomers_join(place)
        return logs

    def _batches(self, place: Place, iterator: Any) -> Any:
        """Returns the iterator for a step: Keras's, or one for the current ranks."""
        if self._needs_iterator:
            self._source.seek(place.epoch, place.step)
            self._iterator = iter(self._source.dataset)
            self._needs_iterator = False
        return self._iterator or iterator

    def _is_last_step(self) -> bool:
        per_execution = self.model.steps_per_execution
        return self._step + per_execution >= self._source.steps

    def _let_newcomers_join(self, place: Place) -> None:
        self._generations.end_for_newcomers()
        if self._generations.has_ended():
            self._snapshot.save()
            self._recover(place._replace(callback=1))

    # ---- hooks ----

    def call_hooks(self, hook: str, arguments: tuple[Any, ...], logs: Any) -> None:
        """Calls a hook of all callbacks, and repeats it where a rank is lost."""
        if hook == "on_epoch_begin":
            self._epoch = arguments[0]
            self._iterator, self._needs_iterator = None, False
            if self._resumes_at is None:
                self._metrics.reset(runtime.generation())
        elif hook == "on_train_batch_begin":
            self._step = arguments[0]
        logs = pythonify_logs(logs)
        number = 0
        for callback in list(self._list.callbacks):
            place = self._place_of(hook, number)
            # Rank 0 alone may show a progress bar.
            number += not isinstance(callback, keras.callbacks.ProgbarLogger)
            if self._skips(place):
                continue
            if isinstance(callback, ElasticFit) and hook == "on_train_end":
                self._call(place, hook, callback, arguments, logs)
                self._finish()
            else:
                self._call(place, hook, callback, arguments, logs)

    def _place_of(self, hook: str, number: int) -> Place:
        part = {"on_epoch_begin": _EPOCH_BEGIN, "on_epoch_end": _EPOCH_END}
        if hook == "on_train_end":
            return Place(_END_OF_FIT, _EPOCH_BEGIN, 0, _BEFORE, number)
        if hook in part:
            return Place(self._epoch, part[hook], 0, _BEFORE, number)
        moment = _BEFORE if hook == "on_train_batch_begin" else _AFTER
        return Place(self._epoch, _STEPS, self._step, moment, number)

    def _call(
        self,
        place: Place,
        hook: str,
        callback: keras.callbacks.Callback,
        arguments: tuple[Any, ...],
        logs: dict[str, Any],
    ) -> None:
        is_of_step = place.part == _STEPS
        if not is_of_step:
            self._snapshot.save()
        before, operations = self._completed, finished_operations()
        attributes, logs_before = dict(vars(callback)), dict(logs or {})
        while True:
            is_complete = False
            try:
                getattr(callback, hook)(*arguments, logs)
                is_complete = True
                if finished_operations() != operations:
                    # Nobody goes on before all ranks have completed the hook.
                    collectives.barrier(name="elastic.hook")
                    self._completed = before + 1
                return
            except Exception as error:
                if not self._is_loss(error):
                    raise
                if is_of_step:
                    self._snapshot.save()
                found = dict(vars(callback))
                values = self._read() if is_complete else []
                vars(callback).update(attributes)
                self._recover(place)
                if self._completed > before:  # only the barrier had failed here
                    vars(callback).update(found)
                    self._snapshot.assign(values)
                    self._seeds.set_for_rank()
                    return
                if logs is not None:
                    logs.clear()
                    logs.update(logs_before)
                operations = finished_operations()

    # ---- skipping to the place of the other ranks ----

    def _skips(self, place: Place) -> bool:
        """Returns whether a newcomer leaves out a place, which is before its start."""
        if self._resumes_at is None:
            return False
        if place < self._resumes_at:
            return True
        self._resumes_at = None
        received, self._received = self._received, None
        if received is not None:
            self._take_values(received, place)
            self._take_callbacks(received)
        return False

    def _take_values(self, received: dict[str, Any], place: Place) -> None:
        self._snapshot.assign(received["values"])
        self._seeds.set_for_rank()
        self._set_metrics(place)
        self._needs_iterator = True

    def _take_callbacks(self, received: dict[str, Any]) -> None:
        self.model.stop_training = received["stop"]
        for callback, state in zip(self._shared(), received["callbacks"], strict=True):
            vars(callback).update(state)

    def _shared(self) -> list[keras.callbacks.Callback]:
        """Returns the callbacks whose state is sent; the same on all ranks."""
        excluded = (keras.callbacks.ProgbarLogger, ElasticFit)
        own = [one for one in self._list.callbacks if not isinstance(one, excluded)]
        # All ranks have a copy of the state of a callback that runs on rank 0.
        return [*own, *(one.callback for one in own if isinstance(one, RankZeroOnly))]

    # ---- from one generation to the next ----

    def _read(self) -> list[tf.Tensor]:
        return [tf.identity(tf.convert_to_tensor(v)) for v in self._variables]

    def _is_loss(self, error: Exception) -> bool:
        return self._generations.has_ended() and is_loss(error)

    def _recover(self, place: Place) -> None:
        """Enters the next generation from a place, with the state at its beginning."""
        self._place = place
        self._snapshot.restore()
        self._enter_next_generation()
        self._needs_iterator = True
        received, self._received = self._received, None
        # A step that the others have completed; the callbacks are here where they were.
        if received is not None and place.moment == _STEP:
            self._take_values(received, place)

    def _enter_next_generation(self) -> None:
        callbacks = [type(one).__name__ for one in self._shared()]
        program = [
            *[describe_variable(v) for v in self._variables],
            f"{self._source.steps} steps of {self._source.global_batch}",
            f"{self.params.get('epochs')} epochs",
            f"callbacks {callbacks}",
        ]
        is_newcomer = self._generations.is_newcomer
        enter_next(self._generations, self._completed, program, self._share)
        if is_newcomer and self._received is not None:
            place = self._received["place"]
            self._resumes_at = place
            epochs = int(self.params["epochs"])
            self.model._initial_epoch = min(place.epoch, epochs)
        self._notify_callbacks()

    def _note_generation(self) -> None:
        self._ranks_by_generation[runtime.generation()] = runtime.rank()

    def _share(self, newest: Newest) -> None:
        """Shares the state and the metrics of the earlier generation."""
        generation = runtime.generation()
        told = gather_from_all(
            {
                "ranks": sorted(self._ranks_by_generation.items()),
                "metrics": self._metrics.generation,
                "completed": self._completed,
            },
            "Elastic",
            name="elastic.places",
        )
        received = None if newest.is_everywhere else self._receive(newest.root)
        holders = [
            (one["metrics"], -rank)
            for rank, one in enumerate(told)
            if one["completed"] == newest.committed
        ]
        latest, minus_rank = max(holders)
        rows = broadcast_object(
            _plain_rows(self._metrics.rows),
            -minus_rank,
            name="elastic.rows",
            max_bytes=_MAX_STATE_BYTES,
        )
        # ---- nothing can fail from here on ----
        self._metrics.rows = rows
        places = [dict(map(tuple, one["ranks"])).get(latest, -1) for one in told]
        self._metrics.regroup(places, generation)
        is_behind = self._completed != newest.committed
        place = self._place
        if received is not None and is_behind:
            self._received = received
            place = received["place"]
        self._completed = newest.committed
        self._note_generation()
        self._size.assign(runtime.size())
        if not is_behind:
            self._snapshot.restore()
            self._seeds.set_for_rank()
            self._set_metrics(place)
            self._snapshot.save()

    def _receive(self, root: int) -> dict[str, Any]:
        """Sends the state of rank `root` to all ranks, and returns it."""
        is_root = runtime.rank() == root
        own: dict[str, Any] = {}
        if is_root:
            own = {
                "place": list(self._place),
                "stop": bool(self.model.stop_training),
                "callbacks": [plain_state(vars(one)) for one in self._shared()],
            }
        told = broadcast_object(
            own, root, name="elastic.callbacks", max_bytes=_MAX_STATE_BYTES
        )
        values = collectives.grouped_broadcast(
            self._snapshot.values, root, name="elastic.state"
        )
        number = digest_of_fingerprints(fingerprints(values))
        if not equal_on_all_ranks([number], "elastic.fingerprint", None):
            raise errors.MismatchError(
                f"The state that rank {root} has sent arrived differently on a rank. "
                "Check the memory of this host."
            )
        return {**told, "place": Place(*told["place"]), "values": values}

    def _set_metrics(self, place: Place) -> None:
        rank = runtime.rank()
        if place.is_of_steps():
            self._metrics.assign(rank)
        for callback in self._list.callbacks:
            if isinstance(callback, MetricAverage):
                if place.part == _EPOCH_END or callback.has_training_metrics:
                    callback.set_training_metrics(self._metrics.snapshot(rank))

    def _notify_callbacks(self) -> None:
        was_first, is_first = self._last_rank == 0, runtime.rank() == 0
        self._last_rank = runtime.rank()
        for callback in self._list.callbacks:
            if isinstance(callback, RankCallback):
                callback.on_ranks_changed(becomes_first=is_first and not was_first)


class _Hook:
    """A method of a callback list that calls a hook of its callbacks."""

    def __init__(self, owner: ElasticFit, hook: str) -> None:
        self._owner = owner
        self._hook = hook

    def __call__(self, *arguments: Any, logs: Any = None) -> None:
        """Calls the hook, as `keras.callbacks.CallbackList` does."""
        count = 0 if self._hook == "on_train_end" else 1
        given = arguments[count] if len(arguments) > count else logs
        self._owner.call_hooks(self._hook, arguments[:count], given)


def _plain_rows(rows: Any) -> Any:
    return rows.numpy() if isinstance(rows, tf.Tensor) else rows


def _batch_like(spec: Any) -> Any:
    """Returns x, y and sample weights of a batch for Keras's symbolic build."""
    return spec if isinstance(spec, tuple) else (spec,)
