"""What a callback may change in a training, and how the change reaches all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import keras

from tfdist.variables import broadcast_variables


class TrainingState:
    """The state of a training at one moment, to be compared with a later one.

    Args:
        model: the model in `fit`.
        with_values: whether to look at the values of the variables. They are not
            kept: only a fingerprint of each.
    """

    def __init__(self, model: keras.Model, *, with_values: bool) -> None:
        self._model = model
        self._with_values = with_values
        self._stop = wants_to_stop(model)
        self._initial_epoch = model._initial_epoch
        self._weights = len(model.weights) if with_values else 0
        self._built = _is_built(model)
        self._schedule = _rate_object(model)
        self._prints = _fingerprints(model) if with_values else []

    def changes(self, where: str, *, all_or_none: bool = False) -> dict[str, Any]:
        """What has changed since, as plain values.

        Args:
            where: the callback and its hook, for errors.
            all_or_none: a change of one variable, or of the epoch, counts as one of
                all variables: the other ranks' need not have been equal before.

        Returns:
            "stop" (it asks to stop), "initial_epoch" (None or the new one), "built"
            (the optimizer has its variables), "changed" (places of the variables in
            `variables_of`).

        Raises:
            RuntimeError: a change that cannot be sent.
        """
        model = self._model
        if self._with_values and len(model.weights) != self._weights:
            raise RuntimeError(
                f"{where} made variables of the model on rank 0 only. Build the model "
                "on every rank before fit, e.g. with a keras.Input."
            )
        if _rate_object(model) is not self._schedule:
            raise RuntimeError(
                f"{where} replaced the learning rate by another object on rank 0 only. "
                "Let the callback run on every rank, without RankZeroOnly."
            )
        changed: list[int] = []
        if self._with_values:
            now = _fingerprints(model)
            restored = (
                model._initial_epoch != self._initial_epoch or now != self._prints
            )
            if _is_built(model) != self._built or (all_or_none and restored):
                changed = list(range(len(now)))
            else:
                pairs = zip(self._prints, now, strict=True)
                changed = [i for i, (old, new) in enumerate(pairs) if old != new]
        epoch = model._initial_epoch
        return {
            "stop": wants_to_stop(model) and not self._stop,
            "initial_epoch": None if epoch == self._initial_epoch else epoch,
            "built": _is_built(model),
            "changed": changed,
        }


def share(model: keras.Model, changes: dict[str, Any]) -> None:
    """Makes the changes of rank 0 on all ranks, rank 0 included.

    Raises:
        tfdist.MismatchError: the ranks' variables differ.
    """
    if changes["stop"]:
        model.stop_training = True
    if changes["initial_epoch"] is not None:
        model._initial_epoch = changes["initial_epoch"]
    if changes["built"] and not _is_built(model):
        model.optimizer.build(model.trainable_variables)
    if changes["changed"]:
        variables = variables_of(model)
        broadcast_variables([variables[i] for i in changes["changed"]], 0)


def wants_to_stop(model: keras.Model) -> bool:
    """Whether a callback has stopped the training; before the first fit none has."""
    return bool(getattr(model, "stop_training", False))


def variables_of(model: keras.Model) -> list[Any]:
    """The weights and the optimizer's state, in the same order on every rank."""
    optimizer = model.optimizer
    return model.weights + (list(optimizer.variables) if optimizer is not None else [])


def _is_built(model: keras.Model) -> bool:
    return bool(model.optimizer is not None and model.optimizer.built)


def _rate_object(model: keras.Model) -> Any:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return getattr(optimizer, "_learning_rate", None)


def _fingerprints(model: keras.Model) -> list[bytes]:
    """A cryptographic hash of each variable's bytes: equal only if these are."""
    return [
        hashlib.blake2b(
            keras.ops.convert_to_numpy(v).tobytes(), digest_size=16
        ).digest()
        for v in variables_of(model)
    ]
