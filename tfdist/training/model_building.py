"""Builds a model at the first batch of `fit`, and finds layers that are built later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def is_built(model: keras.Model) -> bool:
    """Returns whether Keras considers the model, or all of its layers, built.

    Keras never considers a model built if it does not define `call` (e.g. if a custom
    `train_step` trains several models). Keras may also consider a model built although
    its layers are not; `unbuilt_layers` finds these layers.
    """
    layers = list(model._flatten_layers(include_self=False))
    return bool(model.built or (layers and all(layer.built for layer in layers)))


def unbuilt_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the unbuilt layers (or model) that may create variables when called.

    Layers with Keras's default `build` are omitted, because it creates no variables. A
    `Sequential` is omitted, because its layers are checked instead.
    """
    makes_none = (keras.layers.Layer.build, keras.Sequential.build)
    return [
        layer
        for layer in model._flatten_layers(include_self=_has_call(model))
        if not layer.built and type(layer).build not in makes_none
    ]


def build_from_batch(model: keras.Model, batch: Any) -> Exception | None:
    """Builds the layers that the model's `call` uses, if possible.

    Args:
        model: the model in `fit`.
        batch: the specification of a batch, from `before_first_call`.

    Returns:
        The error if building failed, otherwise None. Building may fail because a custom
        `train_step` calls the model with different inputs or not at all.
    """
    if not _has_call(model):
        return None
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:
        return error
    return None


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Builds the metrics of a compiled model before the first step.

    Args:
        model: the model; if it is not built, nothing happens.
        batch: a batch or its specification: x, or a tuple of x, y and sample weights.
    """
    if is_built(model) and model._compile_metrics is not None:
        model._symbolic_build(data_batch=batch)


class UnsyncedWeights:
    """Detects weights that a step created after the weights were broadcast.

    Such weights have different values on each rank. A layer may be used for the first
    time in any step, so unbuilt layers are checked after each step.

    Args:
        model: the model in `fit`, whose weights have been broadcast.
        why: the error from an earlier attempt to build the model, if any.
    """

    def __init__(self, model: keras.Model, why: Exception | None = None) -> None:
        self._model = model
        self._why = why
        self._sent = {id(v): v for v in model.weights}
        self._unbuilt = unbuilt_layers(model)
        self._is_first = True

    def check(self, error: Exception | None = None) -> None:
        """Checks the layers; call it after each step.

        Args:
            error: the exception of the step, if any.

        Raises:
            RuntimeError: a step has created weights. The message names the layers.
        """
        still_unbuilt = [layer for layer in self._unbuilt if not layer.built]
        if len(still_unbuilt) == len(self._unbuilt) and not self._is_first:
            return
        self._unbuilt = still_unbuilt
        self._is_first = False
        new = [v for v in self._model.weights if id(v) not in self._sent]
        if not new:
            return
        raised = error or self._why  # part of the message, as Keras drops causes
        names = dict.fromkeys(repr(v.path.rpartition("/")[0] or v.name) for v in new)
        raise RuntimeError(
            f"A training step of the model {self._model.name!r} has created the "
            f"weights of {', '.join(names)} after BroadcastInitialState had broadcast "
            "the weights, so the new weights differ between ranks. Build all layers on "
            "all ranks before fit, with a keras.Input, layer.build(shape) or a call on "
            "a batch."
            + (f" (Raised before: {type(raised).__name__}: {raised})" if raised else "")
        )


def before_first_call(
    model: keras.Model,
    act: Callable[[Any], None],
    on_error: Callable[[Exception], None] | None = None,
) -> None:
    """Runs `act` before the next call of the train function.

    `act` runs outside any trace, where new variables have values. Call this in
    `on_train_batch_begin`, because callbacks may recreate the train function when
    training begins. `act` also runs on a rank without any batch.

    Args:
        model: the model in `fit`.
        act: called with the specification of a batch; omitted parts are None.
        on_error: called with the exception of the call; may raise a different one.
    """
    original = model.train_function

    def first_call(iterator: Any) -> Any:
        model.train_function = original
        act(_batch_like(iterator.element_spec))
        try:
            return original(iterator)
        except Exception as error:
            if on_error is not None:
                on_error(error)
            raise

    model.train_function = first_call


def _has_call(model: keras.Model) -> bool:
    return type(model).call is not keras.Model.call


def _batch_like(spec: Any) -> Any:
    return tf.nest.map_structure(
        lambda s: None if isinstance(s, tf.OptionalSpec) else s, spec
    )
