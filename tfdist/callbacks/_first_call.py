"""What has to be done when the first batch of a `fit` is known, and before its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def is_built(model: keras.Model) -> bool:
    """Whether all layers have their variables.

    A model without a `call` of its own (a custom `train_step` that trains several
    models) never counts as built itself.
    """
    layers = list(model._flatten_layers(include_self=False))
    return bool(model.built or (layers and all(layer.built for layer in layers)))


def at_first_call(model: keras.Model, act: Callable[[Any], None]) -> None:
    """Lets the next call of the train function do something before it begins.

    That is outside of any trace: inside of one new variables exist but have no values
    yet. To be called in `on_train_batch_begin`, because callbacks may make the train
    function anew when training begins. It also comes on a rank without any batch.

    Args:
        model: the model in `fit`.
        act: gets the specification of a batch; what the user left out is None.
    """
    original = model.train_function

    def first_call(iterator: Any) -> Any:
        model.train_function = original
        act(_batch_like(iterator.element_spec))
        return original(iterator)

    model.train_function = first_call


def _batch_like(spec: Any) -> Any:
    return tf.nest.map_structure(
        lambda s: None if isinstance(s, tf.OptionalSpec) else s, spec
    )
