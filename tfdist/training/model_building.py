"""Model building and other work between the first batch of a `fit` and its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def is_built(model: keras.Model) -> bool:
    """Whether Keras counts the model, or all of its layers, as built.

    A model without a `call` of its own (a custom `train_step` that trains several
    models) never counts as built itself. Keras also counts a model as built of which
    it has built nothing: `unbuilt_layers` has what may still make variables.
    """
    layers = list(model._flatten_layers(include_self=False))
    return bool(model.built or (layers and all(layer.built for layer in layers)))


def unbuilt_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers, and the model itself, that may make variables when they are called.

    Keras's default `build`, of a layer or a model, makes none and sets `built` all the
    same; that of a Sequential makes those of its layers, which are looked at here.
    """
    makes_none = (keras.layers.Layer.build, keras.Sequential.build)
    return [
        layer
        for layer in model._flatten_layers(include_self=_has_call(model))
        if not layer.built and type(layer).build not in makes_none
    ]


def build_from_batch(model: keras.Model, batch: Any) -> Exception | None:
    """Builds the layers that the model's `call` uses, if that can be done.

    Args:
        model: the model in `fit`.
        batch: the specification of a batch, as `before_first_call` gives it.

    Returns:
        Why it could not: a `train_step` of the user's own may call the model with
        something else, or not at all, and build what it needs itself.
    """
    if not _has_call(model):
        return None
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:
        return error
    return None


class UnsyncedWeights:
    """Looks for weights that a step has made, after those of one rank were sent.

    Each rank has made them with values of its own. A layer may also be used for the
    first time in a later step, so the unbuilt ones are looked at after each.

    Args:
        model: the model in `fit`, whose weights have been sent.
        why: the error that prevented building it before, if there was one.
    """

    def __init__(self, model: keras.Model, why: Exception | None = None) -> None:
        self._model = model
        self._why = why
        self._sent = {id(v): v for v in model.weights}
        self._unbuilt = unbuilt_layers(model)
        self._is_first = True

    def check(self, error: Exception | None = None) -> None:
        """To be called after each step.

        Args:
            error: what the step has raised.

        Raises:
            RuntimeError: there are such weights. Names the layers.
        """
        still_unbuilt = [layer for layer in self._unbuilt if not layer.built]
        if len(still_unbuilt) == len(self._unbuilt) and not self._is_first:
            return
        self._unbuilt = still_unbuilt
        self._is_first = False
        new = [v for v in self._model.weights if id(v) not in self._sent]
        if not new:
            return
        raised = error or self._why  # in the message: Keras cuts off causes
        names = dict.fromkeys(repr(v.path.rpartition("/")[0] or v.name) for v in new)
        raise RuntimeError(
            f"Of the model {self._model.name!r} a training step has made the weights "
            f"of {', '.join(names)}, after BroadcastInitialState had sent those of one "
            "rank: every rank has others. Build all layers before fit, on all ranks: "
            "with a keras.Input, layer.build(shape) or a call on a batch."
            + (f" (Raised before: {type(raised).__name__}: {raised})" if raised else "")
        )


def before_first_call(
    model: keras.Model,
    act: Callable[[Any], None],
    on_error: Callable[[Exception], None] | None = None,
) -> None:
    """Lets the next call of the train function do something before it begins.

    That is outside of any trace: inside of one new variables exist but have no values
    yet. To be called in `on_train_batch_begin`, because callbacks may make the train
    function anew when training begins. It also comes on a rank without any batch.

    Args:
        model: the model in `fit`.
        act: gets the specification of a batch; what the user left out is None.
        on_error: gets what the call raises, and may raise something else.
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
