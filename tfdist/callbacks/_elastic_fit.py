"""The steps and hooks of an elastic `fit`, which are repeated if a rank is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import keras
import tensorflow as tf
from keras.src.utils.python_utils import pythonify_logs

from tfdist import collectives
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._callback_changes import CallbackChanges
from tfdist.callbacks._fit_place import (
    Place,
    place_of_hook,
    place_of_step,
    place_of_validation,
)
from tfdist.callbacks._fit_position import FitBatches, FitPosition
from tfdist.callbacks._fit_state import FitState, Received
from tfdist.callbacks._rank_comparison import RankComparison
from tfdist.callbacks._replaced_methods import ReplacedMethods
from tfdist.callbacks.rank_zero_only import overridden_hooks
from tfdist.callbacks.stop_on_signal import StopOnSignal
from tfdist.collectives.objects import broadcast_object
from tfdist.collectives.tf_ops.op_names import eager_calls
from tfdist.core import runtime
from tfdist.core.generations import Generations
from tfdist.core.rendezvous import renewal
from tfdist.core.weights_state import note_between_steps
from tfdist.data._global_batches import Source
from tfdist.elastic.sharing import Newest, check_supported, enter_next, is_loss
from tfdist.training.train_steps import remake_train_function

_Callback = TypeVar("_Callback", bound=keras.callbacks.Callback)


class ElasticFit(keras.callbacks.Callback):
    """Runs the steps and the hooks of one elastic `fit`; the last callback of its list.

    It replaces the model's train function and `evaluate`, and the methods of the list
    that call hooks. Each rank counts the steps, validations and hooks with collective
    operations that all ranks have completed. When a rank is lost, these counts show how
    far each rank has come. Ranks join and leave before a step, after its hooks
    `on_train_batch_begin`; a rank that has run these hooks does not run them again.

    In a job that is not elastic, it only skips the steps of an earlier job, and steps
    for which no samples are left because of the larger batches of a `BatchSchedule`,
    and undoes changes after an error.

    Args:
        callbacks: the callback list of `fit`.
        source: the batches, from `tfdist.data.global_batches`.
        step_size: variable that traced functions read: samples in a step, and ranks.
        start: number of steps that an earlier job has completed.
        release: function that is called at the end of `fit`, also after an error.
    """

    described_as = "the elastic training"  # in messages, as users do not create it

    def __init__(
        self,
        callbacks: keras.callbacks.CallbackList,
        source: Source,
        step_size: tf.Variable,
        start: int,
        release: Callable[[], None],
    ) -> None:
        super().__init__()
        self._list = callbacks
        self._source = source
        self._batches = FitBatches(callbacks, source, step_size)
        self._start = start
        self._release = release
        self.set_model(callbacks.model)
        self.set_params(callbacks.params)
        callbacks.callbacks.append(self)
        if renewal.is_elastic(os.environ):
            remake_train_function(
                self.model, lambda logs: self._state.metrics.with_exchange(logs)
            )

    # ---- begin and end ----

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all ranks the same state; a newcomer joins the other ranks here."""
        self._generations = Generations(hides_failures=False, progress=self._progress)
        self._state = FitState(self.model, self._shared_callbacks())
        self._function = self.model.train_function
        self._is_left_out = False  # whether no samples are left for the current step
        self._starts_at: Place | None = None  # first place after an earlier job's steps
        self._place = place_of_step(0, 0)
        self._logs: dict[str, Any] = {}
        self._step_logs: Any = {}  # of the latest step
        self._last_rank = runtime.rank()
        self._resumes_at: Place | None = None  # place at which a newcomer joins
        self._received: Received | None = None
        self._taken: Received | None = None  # its values include hooks still to be run
        self._epoch = self._step = 0
        self._hooks = {id(one): overridden_hooks(one) for one in self._list.callbacks}
        self._stop_on_signal = self._find(StopOnSignal)
        is_newcomer = self._generations.is_newcomer
        self._state.begin(self._generations)
        if not is_newcomer:
            self._begin_after(broadcast_object(self._start, name="elastic.start"))
        if self._generations.is_elastic:
            self._prepare_for_losses()
            if is_newcomer:
                self._rehearse()
                self._join()
            else:
                self._generations.begin()
                note_between_steps()
        repeats = self._generations.is_elastic
        skips = self._state.start > 0 or self._source.steps_vary
        self._methods = ReplacedMethods(
            self.model,
            self._list,
            train=self._train,
            validate=self._validate,
            call_hook=self.call_hook if repeats or skips else self._call_in_keras,
            on_error=self._finish,
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the other ranks have reached this hook."""
        if self._generations.is_elastic:
            collectives.barrier(name="end of the elastic fit")

    def _prepare_for_losses(self) -> None:
        """Checks the job, and prepares the other callbacks."""
        check_supported()
        if (comparison := self._find(RankComparison)) is not None:
            comparison.stop_comparing_samples()
        if self._stop_on_signal is not None:
            self._stop_on_signal.release(signal.SIGTERM)

    def _begin_after(self, start: int) -> None:
        """Lets `fit` begin after the steps of an earlier job, on all ranks."""
        self._state.start = start
        epoch, step = self._source.place_of(start)
        if step % self.model.steps_per_execution:
            raise ValueError(
                "Expected a start that is a multiple of steps_per_execution="
                f"{self.model.steps_per_execution} in its epoch, got {start}, which is "
                f"step {step} of epoch {epoch}."
            )
        if start:
            self.model._initial_epoch = min(epoch, int(self.params["epochs"]))
            self._starts_at = place_of_hook("on_train_batch_begin", epoch, step, 0)

    def _finish(self) -> None:
        """Undoes the changes to the model and the list; also after an error."""
        self._release()
        self._generations.end()
        # The steps of a later fit do not exchange metrics.
        self._methods.undo(None if self._generations.is_elastic else self._function)
        self.model._initial_epoch = 0

    def _rehearse(self) -> None:
        """Runs one step on this rank alone, so that no rank waits for its tracing."""
        self._source.seek(0)
        logs = self._function(iter(self._source.dataset))
        # Steps that this rank skips return these logs.
        self._step_logs = self._state.metrics.take_from(logs, runtime.generation())
        self.model.reset_metrics()
        self._state.restore()

    def _join(self) -> None:
        """Joins the other ranks, and sets the epoch in which `fit` begins."""
        self._enter_next_generation()
        if self._generations.is_last:
            self._save_and_end(self._place, self._received)
        if self._received is None:
            self._notify_callbacks()
            return
        self._resumes_at = place = self._received.place
        self.model._initial_epoch = min(place.epoch, int(self.params["epochs"]))

    # ---- steps ----

    def _train(self, iterator: Any) -> Any:
        """Runs a step, as the train function of the model."""
        place = place_of_step(self._epoch, self._step)
        if self._is_left_out or self._skip_or_enter(place):
            return self._step_logs
        state = self._state
        if not self._generations.is_elastic:
            batches = self._batches.iterator(state.position.samples, iterator)
            self._step_logs = self._function(batches)
            state.position = self._batches.after_step(state.position)
            return self._step_logs
        state.save()
        if self._generations.ends_after_commit():  # ranks join or leave
            self._recover(place)
            state.save()
        before = state.completed
        while True:
            try:
                self._run_step(place, iterator)
                state.completed = before + 1
                break
            except Exception as error:
                if not self._is_loss(error):
                    raise
                received = self._recover(place)
                if received is not None:  # the other ranks had completed the step
                    self._take_step(received, place)
                    break
        return self._step_logs

    def _take_step(self, received: Received, place: Place) -> None:
        """Takes the result of a step from a rank that has completed or skipped it."""
        state, calls = self._state, received.position.calls
        self._is_left_out = calls == state.position.calls
        state.take_step(received, place)
        self._taken = received
        if received.place > place_of_validation(self._epoch):
            # The other rank may already be at the beginning of the next epoch.
            state.position = FitPosition(calls, self._source.total)
        if not self._is_left_out:
            # Entries that a custom train_step adds are those of the step before.
            self._step_logs = {**self._step_logs, **self.model.get_metrics_result()}
        self._announce_steps(
            place_of_hook("on_train_batch_end", place.epoch, place.step, 0)
        )

    def _run_step(self, place: Place, iterator: Any) -> None:
        """Runs a step on the current ranks, and advances the position in the data.

        If the number of ranks has grown, too few samples may be left for a step. The
        ranks then skip the step together, and the epoch ends.
        """
        state, batches = self._state, self._batches
        after = batches.after_step(state.position)
        self._is_left_out = after.calls == state.position.calls
        if self._is_left_out:
            collectives.barrier(name="elastic.epoch")
        else:
            note_between_steps(False)
            logs = self._function(batches.iterator(state.position.samples, iterator))
            self._step_logs = state.metrics.take_from(logs, runtime.generation())
            note_between_steps()
        state.position = after

    def _progress(self) -> tuple[int, int]:
        """Returns the completed calls, and a number that is larger if more follow."""
        calls, samples = self._state.position
        is_last = self._epoch + 1 >= int(self.params["epochs"])
        if self.model.stop_training or (is_last and samples >= self._source.total):
            return calls, calls
        return calls, calls + 1

    def _announce_steps(self, place: Place) -> None:
        self._batches.announce_steps(place, self._state.position.samples)

    def _validate(self, *arguments: Any, **options: Any) -> Any:
        """Runs the validation of an epoch."""
        place = place_of_validation(self._epoch)
        if self._skip_or_enter(place):
            return {}
        if not self._generations.is_elastic:
            return self._methods.evaluate_alone(*arguments, **options)
        state = self._state
        state.save()
        before = state.completed
        # Callbacks of tfdist can be repeated without an undo.
        others = [c for c in state.callbacks if not isinstance(c, RankCallback)]
        while True:
            changes, is_complete = CallbackChanges(others), False
            try:
                check = self._generations.check_between_commits
                logs = self._methods.evaluate_with(check, *arguments, **options)
                is_complete = True
                state.validation.exchange(runtime.generation())
                state.completed = before + 1
                return logs
            except Exception as error:
                if not self._is_loss(error):
                    raise
                # If complete, only the exchange has failed here.
                if self._recover_or_keep(place, changes, is_complete):
                    return logs

    # ---- hooks ----

    def call_hook(self, hook: str, arguments: tuple[Any, ...], logs: Any) -> None:
        """Calls a hook of all callbacks; repeats a call in which a rank is lost."""
        if hook == "on_epoch_begin":
            self._begin_epoch(arguments[0])
        elif hook == "on_train_batch_begin":
            self._step = arguments[0]
            # Keras does not know the number of steps if it depends on the ranks.
            self._is_left_out = self._state.position.samples >= self._source.total
        if self._is_left_out and hook.startswith("on_train_batch"):
            return
        logs = {} if logs is None else pythonify_logs(logs)
        number = -1
        for callback in list(self._list.callbacks):
            # Not counted, because only rank 0 may show a progress bar.
            number += not isinstance(callback, keras.callbacks.ProgbarLogger)
            if hook not in self._hooks[id(callback)]:
                continue
            place = place_of_hook(hook, self._epoch, self._step, number)
            if self._skip_or_enter(place, logs):
                continue
            if not self._generations.is_elastic:
                getattr(callback, hook)(*arguments, logs)
                continue
            self._call(place, hook, callback, arguments, logs)
        if hook == "on_train_end":
            self._finish()
            self._generations.raise_late_signal()

    def _call_in_keras(self, hook: str, arguments: tuple[Any, ...], logs: Any) -> None:
        """Calls a hook of all callbacks, if no call is repeated or skipped."""
        getattr(type(self._list), hook)(self._list, *arguments, logs)
        if hook == "on_train_end":
            self._finish()

    def _begin_epoch(self, epoch: int) -> None:
        """Sets the position to the beginning of an epoch."""
        self._state.position = self._state.position._replace(samples=0)
        self._epoch, self._step = epoch, 0
        self._batches.begin_epoch(epoch)
        if self._generations.is_elastic and self._resumes_at is None:
            self._state.reset_metrics()
        self._announce_steps(place_of_step(epoch, 0))

    def _call(
        self,
        place: Place,
        hook: str,
        callback: keras.callbacks.Callback,
        arguments: tuple[Any, ...],
        logs: dict[str, Any],
    ) -> None:
        """Calls a hook of one callback until it is complete on all ranks."""
        state = self._state
        if not place.is_of_step:
            state.save()
        before = state.completed
        done, total = self._progress()
        is_last = done == total  # no step follows
        while True:
            changes = CallbackChanges([callback], logs)
            is_complete, calls = False, eager_calls()
            try:
                if is_last and not place.is_of_step:
                    self._generations.check_between_commits()
                getattr(callback, hook)(*arguments, logs)
                is_complete = True
                if eager_calls() != calls:
                    # No rank continues before all ranks have completed the hook.
                    collectives.barrier(name="elastic.hook")
                    state.completed = before + 1
                return
            except Exception as error:
                if not self._is_loss(error):
                    raise
                if place.is_of_step:
                    state.save()
                # If complete, only the barrier has failed here.
                if self._recover_or_keep(place, changes, is_complete, logs):
                    return

    def _skip_or_enter(self, place: Place, logs: dict[str, Any] | None = None) -> bool:
        """Returns whether this rank skips a place; if not, prepares it for the place.

        A newcomer skips the places that the others have passed; all ranks skip steps of
        an earlier job. A rank with a step of another rank runs its own hooks up to the
        place of that rank, whose values it then takes again.
        """
        if self._taken is not None and place >= self._taken.place:
            self._state.assign(self._taken.values)
            self._taken = None
        if self._starts_at is not None and place.is_of_step:
            if place < self._starts_at:
                return True
            self._starts_at = None
            self._batches.renew()
            used = place.step * self._source.step_size(place.epoch, runtime.size())
            self._state.position = self._state.position._replace(samples=used)
        if self._resumes_at is None:
            return False
        if place < self._resumes_at:
            return True
        self._resumes_at = None
        received, self._received = self._received, None
        if received is not None:
            self._state.take_all(received, place)
            self._notify_callbacks()
            self._batches.renew()
            self._announce_steps(place)
            if not place.is_of_step:
                self._begin_after(self._state.start)
            if logs is not None and received.logs:
                logs.clear()
                logs.update(received.logs)
        return False

    # ---- from one generation to the next ----

    def _is_loss(self, error: Exception) -> bool:
        return self._generations.has_ended() and is_loss(error)

    def _recover(
        self, place: Place, logs: dict[str, Any] | None = None
    ) -> Received | None:
        """Enters the next generation, with the state that was saved at this place.

        Returns:
            The state of another rank, if it has completed the step, validation or hook
            at this place; else None.
        """
        self._place, self._logs = place, dict(logs or {})
        self._state.restore()
        self._enter_next_generation()
        self._notify_callbacks()
        received, self._received = self._received, None
        if self._generations.is_last:
            self._save_and_end(place, received)
        return received

    def _recover_or_keep(
        self,
        place: Place,
        changes: CallbackChanges,
        is_complete: bool,
        logs: dict[str, Any] | None = None,
    ) -> bool:
        """Undoes a failed validation or hook, and enters the next generation.

        Returns:
            True if the work is complete on this rank, and the other ranks have
            continued. Its changes are then kept.
        """
        values = self._state.read()
        changes.undo()
        received = self._recover(place, logs)
        if not is_complete or received is None:
            return False
        changes.redo()
        self._state.assign(values)
        self._state.take_metrics(received, place)
        return True

    def _save_and_end(self, place: Place, received: Received | None) -> NoReturn:
        """Saves the state of a preempted job, if there is a StopOnSignal, and exits."""
        if received is not None:
            self._state.take_all(received, place)
            place = received.place
        if self._stop_on_signal is not None:
            done = place.batches_done(self.model.steps_per_execution)
            self._stop_on_signal.save_now(done - 1 if done else None)
        self._generations.exit_preempted()

    def _enter_next_generation(self) -> None:
        lines = [
            *self._state.describe(),
            self._source.describe(),
            f"{self.params.get('epochs')} epochs",
        ]
        enter_next(self._generations, self._state.completed, lines, self._share)
        note_between_steps()
        self._batches.renew()
        self._announce_steps(self._place)

    def _notify_callbacks(self) -> None:
        """Tells the callbacks that the ranks changed; they already have their state."""
        becomes_first = runtime.rank() == 0 and self._last_rank != 0
        self._last_rank = runtime.rank()
        values, stop = self._state.read(), self.model.stop_training
        for callback in self._list.callbacks:
            if isinstance(callback, RankCallback):
                if becomes_first and self._generations.has_lost_first:
                    callback.on_first_rank_lost()
                callback.on_ranks_changed(becomes_first=becomes_first)
        if becomes_first:  # a callback that moves to this rank may have changed them
            self._state.assign(values)
            self.model.stop_training = stop

    def _share(self, newest: Newest) -> None:
        received = self._state.share(newest, self._place, self._logs)
        if received is not None:
            self._received = received
        self._batches.set_step_size()

    def _find(self, kind: type[_Callback]) -> _Callback | None:
        """Returns the first callback of a class."""
        return next((c for c in self._list.callbacks if isinstance(c, kind)), None)

    def _shared_callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the callbacks that are the same on all ranks."""
        excluded = (keras.callbacks.ProgbarLogger, ElasticFit)
        return [one for one in self._list.callbacks if not isinstance(one, excluded)]
