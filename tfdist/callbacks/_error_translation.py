"""Errors of the training steps in `fit`, raised as classes of tfdist."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors


class _TrainFunction:
    """The train function of a model in `fit`, with our errors for its own.

    After an error it gives the model its function back: `fit` ends, and none of its
    callbacks is called any more.
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
        if name.startswith("__") or name == "_function":  # of a copy being made
            raise AttributeError(name)
        return getattr(self._function, name)


def translate_errors(model: keras.Model) -> None:
    """Lets the training steps of `fit` raise `tfdist.RankFailedError` and the like.

    To be called before the first step: when training begins, callbacks may make the
    train function anew.
    """
    if not isinstance(model.train_function, _TrainFunction):
        model.train_function = _TrainFunction(model)


def restore_train_function(model: keras.Model) -> None:
    """Takes back what `translate_errors` did; no effect where it did nothing."""
    if isinstance(model.train_function, _TrainFunction):
        model.train_function = model.train_function._function
