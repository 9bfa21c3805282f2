"""Callback that compares the state of all ranks after all other callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdist.callbacks._callback_list import kind_of
from tfdist.callbacks._data_check import DataCheck
from tfdist.callbacks._per_rank_state import own_variables
from tfdist.collectives.consistency.comparison import compare, is_on, plain
from tfdist.collectives.consistency.explanation import SLOT, STATE, TRAINED, RankState
from tfdist.collectives.consistency.fingerprint import fingerprints
from tfdist.collectives.local_variables import identity
from tfdist.collectives.per_rank_variables import (
    is_declared,
    shared_weights,
    were_broadcast,
)
from tfdist.collectives.signature import path_of
from tfdist.core import runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.training.model_optimizers import optimizers_of, slots_of

# Attributes by which Keras callbacks decide; their values depend on the logs.
_DECIDES_BY = {
    "EarlyStopping": ("best", "wait", "stopped_epoch"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
}


class RankComparison(keras.callbacks.Callback):
    """Raises if the ranks diverge in `fit`.

    Compares weights, optimizer variables, and the state of callbacks that control
    training (such as EarlyStopping) after the first update, after each epoch and at the
    end of training. The first tfdist callback appends this one to the list when
    training begins, so that it runs after all others.
    """

    described_as = "the comparison of weights"  # in messages, as users do not create it

    def __init__(self) -> None:
        super().__init__()
        self._listed: list[keras.callbacks.Callback] = []
        self._steps_until_update = 0
        self._data_check: DataCheck | None = None

    @classmethod
    def append_to(cls, callbacks: keras.callbacks.CallbackList) -> None:
        """Appends a `RankComparison`, replacing the one of an earlier `fit`."""
        listed = [one for one in callbacks.callbacks if not isinstance(one, cls)]
        own = cls()
        own.set_model(callbacks.model)
        own.set_params(callbacks.params)
        own._listed = listed
        callbacks.callbacks[:] = [*listed, own]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the state, and starts to collect samples."""
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        steps = getattr(inner, "gradient_accumulation_steps", None)
        self._steps_until_update = steps or 1
        if is_on():
            self._data_check = DataCheck(self.model, process_set_of(self.model))

    def stop_comparing_samples(self) -> None:
        """Stops collecting samples, and discards those collected so far."""
        if self._data_check is not None:
            self._data_check.stop_collecting()
            self._data_check = None

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Compares the models after the first update."""
        if self._steps_until_update == 0:
            return
        self._steps_until_update -= 1
        if self._steps_until_update == 0:
            self._compare("after the first step", is_first=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the models, and after the first epoch the ranks' samples."""
        self._compare(f"at the end of epoch {epoch + 1}")
        # A rank that has had no batch yet would compare alone in a later epoch.
        self._steps_until_update = 0
        if self._data_check is not None:
            self._data_check.finish()
            self._data_check = None

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Compares the weights, which callbacks may have restored."""
        self._compare("at the end of fit")

    def _compare(self, when: str, *, is_first: bool = False) -> None:
        compare_model(self.model, when, callbacks=self._listed, is_first=is_first)


def compare_model(
    model: keras.Model,
    when: str,
    *,
    callbacks: list[keras.callbacks.Callback] | None = None,
    is_first: bool = False,
) -> None:
    """Compares a model, its optimizers and callbacks between the ranks that train it.

    All of these ranks have to call it; on other ranks it has no effect.

    Args:
        model: the model in training.
        when: when it is called, for messages.
        callbacks: callbacks whose decisions are compared; default none.
        is_first: whether the ranks may have started with different weights.

    Raises:
        tfdist.MismatchError: the ranks differ. All ranks raise it.
    """
    process_set = process_set_of(model)
    if runtime.rank() not in ranks_that_train(model) or not is_on():
        return
    pairs = compared_variables(model)
    variables = [variable for variable, _ in pairs]
    state = RankState(
        rank=runtime.rank(),
        names=list(map(path_of, variables)),
        kinds=[kind for _, kind in pairs],
        fingerprints=fingerprints(variables),
        were_broadcast=were_broadcast(variables),
        decisions=decisions_of(callbacks or []),
        monitors=monitors_of(callbacks or []),
    )
    compare(state, when, process_set, is_first=is_first)


def process_set_of(model: keras.Model) -> ProcessSet | None:
    """Returns the ranks over which a model's own optimizer reduces; None for all."""
    optimizer = getattr(model, "optimizer", None)  # missing if it is not compiled
    options = getattr(optimizer, "tfdist_options", None)
    return options.process_set if options is not None else None


def ranks_that_train(model: keras.Model) -> Sequence[int]:
    """Returns the ranks whose models have to be equal; empty for a single rank."""
    ranks = members_of(process_set_of(model))
    return ranks if len(ranks) > 1 else ()


def compared_variables(model: keras.Model) -> list[tuple[Any, str]]:
    """Returns the variables that have to be equal on all ranks, with their kinds.

    Excluded are local variables and their slots, the slots of an optimizer that uses
    Adasum, moving statistics of each rank's own batches, states of stateful layers,
    accumulated gradients, and variables whose optimizer reduces over other ranks.
    """
    optimizers = optimizers_of(model)
    own = set(map(identity, own_variables(model)))
    ranks = process_set_of(model)
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        trained = inner._trainable_variables if inner.built else []
        local = [v for v in trained if is_declared(v)]
        own.update(map(identity, slots_of(optimizer, map(identity, local))))
        options = getattr(optimizer, "tfdist_options", None)
        if options is not None and options.process_set != ranks:
            own.update(map(identity, [*trained, *optimizer.variables]))
    pairs = [(v, TRAINED if v.trainable else STATE) for v in shared_weights(model)]
    pairs += [(v, SLOT) for one in optimizers for v in one.variables]
    return [(v, kind) for v, kind in pairs if identity(v) not in own]


def decisions_of(callbacks: list[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns the state by which callbacks decide, by names such as "X.best"."""
    return {
        f"{name}.{attribute}": plain(getattr(callback, attribute, None))
        for name, callback, kind in _deciding(callbacks)
        for attribute in _DECIDES_BY[kind]
    }


def monitors_of(callbacks: list[keras.callbacks.Callback]) -> dict[str, str]:
    """Returns the name in the logs that each callback monitors, by callback name."""
    return {name: str(cb.monitor) for name, cb, _ in _deciding(callbacks)}


def _deciding(
    callbacks: list[keras.callbacks.Callback],
) -> list[tuple[str, Any, str]]:
    kinds = [(one, kind_of(one)) for one in callbacks]
    found = [(one, kind) for one, kind in kinds if kind in _DECIDES_BY]
    names = [type(one).__name__ for one, _ in found]
    return [
        (f"{name} {number}" if names.count(name) > 1 else name, one, kind)
        for number, (name, (one, kind)) in enumerate(zip(names, found, strict=True), 1)
    ]
