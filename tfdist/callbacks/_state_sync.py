"""Detects a callback's changes to the training state and broadcasts them."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.collectives.consistency.fingerprint import fingerprints
from tfdist.collectives.variables import broadcast_variables
from tfdist.core.process_sets import ProcessSet
from tfdist.gradients.double_buffer import clear_buffers
from tfdist.training.model_optimizers import optimizers_of
from tfdist.training.preprocessing_layers import follow_variables


class TrainingState:
    """Snapshot of the training state, to be compared with a later state.

    Args:
        model: the model in `fit`.
        with_values: whether to include fingerprints of the values of the variables.
    """

    def __init__(self, model: keras.Model, *, with_values: bool) -> None:
        self._model = model
        self._with_values = with_values
        self._stop = wants_to_stop(model)
        self._initial_epoch = model._initial_epoch
        self._weights = len(model.weights) if with_values else 0
        self._built = _built(model)
        self._rates = _rate_objects(optimizers_of(model))
        self._prints = fingerprints(variables_of(model)) if with_values else []

    def changes(self, where: str, *, all_or_none: bool = False) -> dict[str, Any]:
        """Returns the changes since this state was captured, as plain values.

        Args:
            where: the callback and its hook, for errors.
            all_or_none: whether a change of one variable, or of the epoch, is treated
                as a change of all variables, because a variable that is unchanged on
                this rank may differ on the others.

        Returns:
            A dict with "stop" (whether to stop), "initial_epoch" (the new epoch or
            None), "built" (whether each optimizer is built) and "changed" (indices of
            changed variables in `variables_of`).

        Raises:
            RuntimeError: a change cannot be broadcast.
        """
        model = self._model
        if self._with_values and len(model.weights) != self._weights:
            raise RuntimeError(
                f"{where} created variables of the model on rank 0 only. Build the "
                "model on every rank before fit, e.g. with a keras.Input."
            )
        now_built = _built(model)
        if now_built[1:] != self._built[1:]:
            raise RuntimeError(
                f"{where} built an optimizer on rank 0 only. It is not the optimizer "
                "passed to model.compile, so its variables are unknown on the other "
                "ranks. Build it on every rank before fit."
            )
        rates = _rate_objects(optimizers_of(model))
        if any(rates.get(one) is not old for one, old in self._rates.items()):
            raise RuntimeError(
                f"{where} replaced the learning rate object on rank 0 only. Run the "
                "callback on every rank, without RankZeroOnly."
            )
        changed: list[int] = []
        if self._with_values:
            now = fingerprints(variables_of(model))
            restored = (
                model._initial_epoch != self._initial_epoch or now != self._prints
            )
            if now_built != self._built or (all_or_none and restored):
                changed = list(range(len(now)))
            else:
                pairs = zip(self._prints, now, strict=True)
                changed = [i for i, (old, new) in enumerate(pairs) if old != new]
        epoch = model._initial_epoch
        return {
            "stop": wants_to_stop(model) and not self._stop,
            "initial_epoch": None if epoch == self._initial_epoch else epoch,
            "built": now_built[0],
            "changed": changed,
        }


def share(
    model: keras.Model,
    changes: dict[str, Any],
    root: int = 0,
    process_set: ProcessSet | None = None,
) -> None:
    """Applies the changes of rank `root` on all ranks of a process set.

    Raises:
        tfdist.MismatchError: the ranks' variables differ.
    """
    if changes["initial_epoch"] is not None:
        model._initial_epoch = changes["initial_epoch"]
    if changes["built"] and not _built(model)[0]:
        model.optimizer.build(model.trainable_variables)
    if changes["changed"]:
        variables = variables_of(model)
        broadcast_variables(
            [variables[i] for i in changes["changed"]], root, process_set=process_set
        )
        follow_variables(model)
        clear_buffers(model.trainable_variables)
    if changes["stop"]:  # not if a rank was lost before
        model.stop_training = True


def wants_to_stop(model: keras.Model) -> bool:
    """Returns whether a callback has asked to stop; False before the first fit."""
    return bool(getattr(model, "stop_training", False))


def variables_of(model: keras.Model) -> list[Any]:
    """Returns weights and optimizer variables, in the same order on every rank."""
    return model.weights + [v for one in optimizers_of(model) for v in one.variables]


def rates_of(model: keras.Model) -> list[float]:
    """Returns the learning rates that are numbers, which callbacks can set."""
    return _numbers(_rate_objects(optimizers_of(model)))


def common_rates_of(model: keras.Model, process_set: ProcessSet | None) -> list[float]:
    """Returns the rates of `rates_of` that have to be equal on all ranks.

    Excluded are optimizers besides the model's own that have local variables or reduce
    over other ranks.

    Args:
        model: the model in `fit`.
        process_set: the ranks that train it; None for all.
    """
    common = []
    for one in optimizers_of(model):
        options = getattr(one, "tfdist_options", None)
        if one is model.optimizer or options is None:
            common.append(one)
        elif options.local_variables is None and options.process_set == process_set:
            common.append(one)
    return _numbers(_rate_objects(common))


def other_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the model's other optimizers that use the gradients of all ranks.

    Parts of other optimizers, and optimizers with local variables, are excluded.
    """
    found = optimizers_of(model)
    parts = {id(p) for one in found for p in _with_rates(one) if p is not one}
    others = [one for one in found if one is not model.optimizer]
    options = [getattr(one, "tfdist_options", None) for one in others]
    return [
        one
        for one, option in zip(others, options, strict=True)
        if id(one) not in parts and getattr(option, "local_variables", None) is None
    ]


def _built(model: keras.Model) -> list[bool]:
    """Returns whether the model's optimizer, and each of the others, is built."""
    own = model.optimizer
    others = [one.built for one in optimizers_of(model) if one is not own]
    return [bool(own is not None and own.built), *others]


def _with_rates(optimizer: Any) -> list[Any]:
    """Returns the optimizers with learning rates, unwrapped from their containers."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [inner, *getattr(inner, "_inner_optimizers", ())]


def _rate_objects(optimizers: list[keras.optimizers.Optimizer]) -> dict[int, Any]:
    """Returns learning rates by optimizer id, including nested optimizers."""
    inner = [part for one in optimizers for part in _with_rates(one)]
    return {
        id(one): getattr(one, "_learning_rate", None)
        for one in inner
        if not hasattr(one, "_inner_optimizers")  # a MultiOptimizer's rate is unused
    }


def _numbers(rates: dict[int, Any]) -> list[float]:
    variables = [rate for rate in rates.values() if hasattr(rate, "assign")]
    return [float(keras.ops.convert_to_numpy(rate)) for rate in variables]
