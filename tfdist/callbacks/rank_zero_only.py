"""RankZeroOnly: runs a callback on rank 0 and broadcasts its decisions."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._callback_list import kind_of
from tfdist.callbacks._callback_states import (
    MAX_STATE_BYTES,
    plain_state,
    state_to_send,
)
from tfdist.callbacks._list_rules import WRITES
from tfdist.callbacks._rank_comparison import compare_model
from tfdist.callbacks._state_sync import TrainingState, rates_of, share, variables_of
from tfdist.callbacks.stop_together import StopTogether
from tfdist.collectives.all_ranks import run_on_rank, single_rank_code
from tfdist.core import native, runtime
from tfdist.core.generations import Generations

_ALL_HOOKS = [n for n in dir(keras.callbacks.Callback) if n.startswith("on_")]
# Keras callbacks, without subclasses, that change nothing but files.
_READS_ONLY = tuple(
    getattr(keras.callbacks, name) for name in WRITES if hasattr(keras.callbacks, name)
)
_SAVES_WEIGHTS = ("ModelCheckpoint", "OrbaxCheckpoint", "BackupAndRestore")
_REFUSED = {
    "TerminateOnNaN": "it has to check the loss on every rank",
    "SwapEMAWeights": "every rank has the averages and has to swap them",
}


class RankZeroOnly(RankCallback):
    """Runs a Keras callback on rank 0 only and broadcasts its decisions.

    Use it for callbacks that write files (CSVLogger, TensorBoard, ModelCheckpoint,
    BackupAndRestore, custom ones). On the other ranks the callback is created, but its
    methods are not called. At the beginning and the end of training and of each epoch,
    all ranks wait for rank 0 and apply the changes that the callback made on rank 0. If
    the model's optimizer has a `process_set`, the ranks of the set wait for its lowest
    rank. These changes are broadcast:

    - `model.stop_training`, and the initial epoch (BackupAndRestore);
    - variables of the model and its optimizers (the optimizer of `compile`, and
      optimizers that are attributes), including learning rates, but not the states of
      random number generators;
    - an exception: rank 0 raises it, and the other ranks raise a
      `tfdist.RankFailedError` that quotes it. The ranks stay connected.

    The other hooks (steps, validation, prediction) do not communicate, so their changes
    cannot be broadcast. If such a hook changes a learning rate or weights, or sets
    `stop_training` without `StopTogether` in the list, rank 0 raises an error. Weights
    are checked only in the first call of each hook in an epoch. An exception in such a
    hook ends the job on all ranks immediately.

    Other changes are not broadcast: attributes of layers, a new train function, or
    entries added to `logs`. Setting a new schedule as the learning rate raises an
    error.

    Args:
        callback: a Keras callback, created in the same way on every rank. It is
            available as the attribute `callback`.
        timeout_s: seconds that the other ranks wait for rank 0; default
            `TFDIST_TIMEOUT_S`.

    Raises:
        TypeError: `callback` is not a Keras callback.
        ValueError: `callback` is a tfdist callback, or has to run on all ranks.
        RuntimeError: in `fit`, on all ranks: the callback made a change that cannot be
            broadcast.
        tfdist.MismatchError: in `fit`, on rank 0: the callback called a collective
            operation, e.g. `tfdist.evaluate` or the `fit` of a distributed model.
        tfdist.RankFailedError: in `fit`, on the other ranks: the callback failed on
            rank 0.

    Example:
        >>> import keras, tfdist
        >>> log = keras.callbacks.CSVLogger("training.csv")
        >>> callbacks = [tfdist.callbacks.MetricAverage(),
        ...              tfdist.callbacks.RankZeroOnly(log)]
    """

    def __init__(
        self, callback: keras.callbacks.Callback, *, timeout_s: float | None = None
    ) -> None:
        super().__init__()
        _check_wrappable(callback)
        self.callback = callback
        self.timeout_s = timeout_s
        self._hooks = overridden_hooks(callback)
        self._changes_nothing = type(callback) in _READS_ONLY
        self._training = False
        self._keeps_copies = False  # whether all ranks copy the callback's state
        # At most one. A list, because the attributes of a failed hook are put back.
        self._latest: list[_HookChanges] = []
        self._looked_at: set[str] = set()  # hooks whose changes were checked
        # Other hooks remain Keras's defaults, which Keras skips.
        for hook in self._hooks:
            if hook.startswith(("on_test_", "on_predict_")):
                setattr(self, hook, functools.partial(self._alone, hook))

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the overridden hooks, in some of which the ranks wait."""
        return {"hooks": sorted(self._hooks)}

    def set_model(self, model: keras.Model) -> None:
        """Passes the model to the callback on rank 0."""
        super().set_model(model)
        self._alone("set_model", model)

    def set_params(self, params: dict[str, Any]) -> None:
        """Passes the parameters to the callback on rank 0."""
        super().set_params(params)
        self._alone("set_params", params)

    def on_ranks_changed(self, *, becomes_first: bool) -> None:
        """Continues the callback on a new rank 0, with the previous one's state."""
        if not becomes_first:
            return
        callback = self.callback
        state = plain_state(vars(callback))
        callback.set_model(self.model)
        callback.set_params(self.params)
        if kind_of(callback) == "CSVLogger":
            callback.append = True
            callback.on_train_begin()
            callback.keys = state.get("keys")  # the columns of the file
        elif kind_of(callback) != "BackupAndRestore":  # it would restore the backup
            callback.on_train_begin()
            vars(callback).update(state)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model and the list; runs the hook while the others wait."""
        super().on_train_begin(logs)
        self._training = True
        self._latest.clear()
        self._keeps_copies = Generations().is_elastic
        self._run_on_first_rank("on_train_begin", logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Runs the hook on the first rank; the others wait."""
        super().on_train_end(logs)
        self._run_on_first_rank("on_train_end", logs)
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the hook on the first rank; the others wait."""
        super().on_epoch_begin(epoch, logs)
        self._looked_at.clear()
        self._run_on_first_rank("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Runs the hook on the first rank; the others wait."""
        self._run_on_first_rank("on_epoch_end", epoch, logs)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Runs the hook on rank 0; the others do not wait."""
        super().on_train_batch_begin(batch, logs)
        self._latest.clear()  # a hook that all ranks have completed is not repeated
        if "on_train_batch_begin" in self._hooks:
            self._alone("on_train_batch_begin", batch, logs=logs)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Runs the hook on rank 0; the others do not wait."""
        super().on_train_batch_end(batch, logs)
        if "on_train_batch_end" in self._hooks:
            self._alone("on_train_batch_end", batch, logs=logs)

    def _run_on_first_rank(self, hook: str, *arguments: Any) -> None:
        """Calls the hook on rank 0; all ranks return or raise together."""
        if hook not in self._hooks:
            return

        if hook == "on_epoch_end" and kind_of(self.callback) in _SAVES_WEIGHTS:
            compare_model(self.model, f"when {self._name} is to save")

        call = (hook, *arguments[:-1])  # without the logs

        def run() -> dict[str, Any]:
            if self._latest and self._latest[0].call == call:
                return self._latest[0].restore(self.model)
            before = TrainingState(self.model, with_values=self._looks())
            getattr(self.callback, hook)(*arguments)
            changes = before.changes(
                f"{self._name}.{hook}", all_or_none=hook == "on_train_begin"
            )
            if self._keeps_copies:
                changes["state"] = state_to_send(self.callback)
                self._keep(call, changes)
            return changes

        told = run_on_rank(
            self._first,
            run,
            f"{self._name}.{hook} failed on rank {self._first}",
            place=f"RankZeroOnly({self._name}).{hook}",
            name="RankZeroOnly, what rank 0 has changed",
            max_bytes=MAX_STATE_BYTES,
            timeout_s=self.timeout_s,
            process_set=self._ranks,
        )
        if told is None:  # in a newcomer of an elastic job
            return
        share(self.model, told, self._first, self._ranks)
        if runtime.rank() != self._first:
            vars(self.callback).update(told.get("state", {}))
            if self._keeps_copies:
                self._keep(call, told)

    def _keep(self, call: tuple[Any, ...], changes: dict[str, Any]) -> None:
        """Keeps the changes of a hook until the next step."""
        if call[0] != "on_train_begin":  # which is not repeated after a loss
            self._latest[:] = [_HookChanges(call, changes, self.model)]

    def _alone(self, hook: str, *arguments: Any, **named: Any) -> None:
        """Calls the method on rank 0; no rank waits, so an exception ends the job."""
        if runtime.rank() != self._first:
            return
        place = f"RankZeroOnly({self._name}).{hook}"
        try:
            with single_rank_code(place, self._ranks, others_wait=False):
                if self._training and runtime.size() > 1:
                    self._call_watched(hook, *arguments, **named)
                else:
                    getattr(self.callback, hook)(*arguments, **named)
        except Exception as error:
            if runtime.size() > 1:
                cause = f"{type(error).__name__}: {error}"
                where = f"{self._name}.{hook} failed on rank {self._first}"
                native.abort(f"{where}: {cause}"[:4096])
            raise

    def _call_watched(self, hook: str, *arguments: Any, **named: Any) -> None:
        """Calls a training hook; raises if it made changes, which are not broadcast."""
        looks = self._looks() and hook not in self._looked_at
        self._looked_at.add(hook)
        before = TrainingState(self.model, with_values=looks)
        rates = rates_of(self.model) if self._looks() else []
        getattr(self.callback, hook)(*arguments, **named)
        where = f"{self._name}.{hook}"
        if self._looks() and rates_of(self.model) != rates:
            _refuse(where, "the learning rate")
        changes = before.changes(where)
        if changes["changed"]:
            _refuse(where, "the model's or the optimizer's variables")
        if changes["stop"] and not self._stops_together():
            raise RuntimeError(
                f"{where} set model.stop_training on rank 0. The other ranks would "
                "wait for rank 0 in the next step. Put tfdist.callbacks.StopTogether() "
                "at the end of the list of callbacks."
            )

    @property
    def _name(self) -> str:
        return type(self.callback).__name__

    def _looks(self) -> bool:
        return not self._changes_nothing and runtime.size() > 1

    def _stops_together(self) -> bool:
        return any(isinstance(c, StopTogether) for c in self._listed)


class _HookChanges:
    """The changes that a hook has made on rank 0, kept on each rank that has them.

    If a rank is lost before all ranks have them, the hook is repeated. Rank 0 then
    sends the changes again instead of calling the callback again, and so does a new
    rank 0 that has them.

    Args:
        call: name and arguments of the hook.
        changes: the changes, from `TrainingState`.
        model: the model, whose variables have been changed.
    """

    def __init__(
        self, call: tuple[Any, ...], changes: dict[str, Any], model: keras.Model
    ) -> None:
        self.call = call
        self._changes = changes
        variables = variables_of(model)
        self._values = [_copy(variables[i]) for i in changes["changed"]]

    def restore(self, model: keras.Model) -> dict[str, Any]:
        """Sets the changed variables again after a rollback; returns the changes."""
        variables = variables_of(model)
        for i, value in zip(self._changes["changed"], self._values, strict=True):
            variables[i].assign(value)
        return self._changes


def overridden_hooks(callback: keras.callbacks.Callback) -> frozenset[str]:
    """Returns the hooks that a callback overrides.

    The old names `on_batch_begin` and `on_batch_end` are returned as
    `on_train_batch_begin` and `on_train_batch_end`, which call them by default.

    Example:
        >>> sorted(overridden_hooks(keras.callbacks.TerminateOnNaN()))
        ['on_train_batch_end']
    """
    found = set()
    for hook in _ALL_HOOKS:
        method = getattr(callback, hook)
        default = getattr(keras.callbacks.Callback, hook)
        if getattr(method, "__func__", method) is not default:
            found.add(hook.replace("on_batch_", "on_train_batch_"))
    return frozenset(found)


def _copy(variable: Any) -> tf.Tensor:
    return tf.identity(tf.convert_to_tensor(variable))


def _refuse(where: str, what: str) -> None:
    raise RuntimeError(
        f"{where} changed {what} on rank 0 only, in a hook whose changes are not "
        "broadcast. Make the change in on_epoch_begin or on_epoch_end, or run the "
        "callback on every rank, without RankZeroOnly."
    )


def _check_wrappable(callback: Any) -> None:
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(
            "Expected a Keras callback, e.g. keras.callbacks.CSVLogger('log.csv'), got "
            f"{type(callback).__name__}: {callback!r}."
        )
    name = type(callback).__name__
    if isinstance(callback, RankCallback):
        raise ValueError(
            f"tfdist.callbacks.{name} has to run on all ranks: put it into the list "
            "of callbacks without RankZeroOnly."
        )
    reason = _REFUSED.get(kind_of(callback))
    if reason is not None:
        raise ValueError(
            f"{name} must not run on rank 0 only: {reason}. Put it into the list of "
            "callbacks of every rank, without RankZeroOnly."
        )
