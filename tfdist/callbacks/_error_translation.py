"""Translates errors of the training steps in `fit` to the classes of tfdist."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors


class _TrainFunction:
    """Wraps the train function of a model in `fit` and translates its errors.

    After an error it restores the model's own function, because `fit` ends without
    calling its callbacks again.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._function = model.train_function

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._function(*arguments)
        except tf.errors.OpError as error:
            restore_train_function(self._model)
            ours = errors.from_tf(error)
            if ours is None or ours is error:
                raise
            raise ours from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":  # while being copied
            raise AttributeError(name)
        return getattr(self._function, name)


def translate_errors(model: keras.Model) -> None:
    """Makes the training steps of `fit` raise `tfdist.RankFailedError` and the like.

    Call it before the first step: callbacks may recreate the train function when
    training begins.
    """
    if not isinstance(model.train_function, _TrainFunction):
        model.train_function = _TrainFunction(model)


def restore_train_function(model: keras.Model) -> None:
    """Undoes `translate_errors`, if it was called."""
    if isinstance(model.train_function, _TrainFunction):
        model.train_function = model.train_function._function
