"""Replaces methods of the model and of the callback list in an elastic `fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks._callback_list import ReplacedHook
from tfdist.callbacks._error_translation import restore_train_function

HOOKS = (
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
)


class ReplacedMethods:
    """Replaces the train function, the validation and the calls of hooks.

    Args:
        model: the model in `fit`.
        callbacks: the callback list of this `fit`.
        train: the new train function.
        validate: called in place of `evaluate` for the validations of `fit`.
        call_hook: called in place of the list's methods named in `HOOKS`, with the
            arguments that `ReplacedHook` describes.
        on_error: called when an error in one of these functions ends `fit`, which then
            calls no further hooks.

    Attributes:
        evaluate_alone: the original method `evaluate` of the model.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: keras.callbacks.CallbackList,
        *,
        train: Callable[..., Any],
        validate: Callable[..., Any],
        call_hook: Callable[..., None],
        on_error: Callable[[], None],
    ) -> None:
        self._model, self._list = model, callbacks
        self._on_error = on_error
        self._train, self._validate = self._guarded(train), self._guarded(validate)
        self._is_installed = True
        self.evaluate_alone = model.evaluate
        model.train_function = self._train
        # Keras would track the attribute.
        object.__setattr__(model, "evaluate", self._evaluate)
        for hook in HOOKS:
            setattr(callbacks, hook, ReplacedHook(hook, self._guarded(call_hook)))

    def evaluate_with(
        self, check: Callable[[], None], *arguments: Any, **options: Any
    ) -> Any:
        """Evaluates the model, and calls a function before each step.

        Args:
            check: the function, which may raise an error.
            *arguments: arguments of `evaluate`.
            **options: options of `evaluate`.
        """
        model = self._model
        model.make_test_function()
        function = model.test_function

        def test(iterator: Any) -> Any:
            check()
            return function(iterator)

        model.test_function = test
        try:
            return self.evaluate_alone(*arguments, **options)
        finally:
            model.test_function = function

    def undo(self, train_function: Callable[..., Any] | None) -> None:
        """Undoes the changes.

        Args:
            train_function: train function for the model; None: Keras creates one.
        """
        self._is_installed = False
        restore_train_function(self._model)
        if self._model.train_function == self._train:  # else it was removed
            self._model.train_function = train_function
        object.__delattr__(self._model, "evaluate")
        for hook in HOOKS:
            delattr(self._list, hook)

    def _evaluate(self, *arguments: Any, **options: Any) -> Any:
        if options.get("_use_cached_eval_dataset"):  # by `fit`
            return self._validate(*arguments, **options)
        return self.evaluate_alone(*arguments, **options)

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise  # Keras ends the epoch
            except BaseException:
                if self._is_installed:
                    self._on_error()
                raise

        return call
