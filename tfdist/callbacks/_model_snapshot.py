"""Copies of a model's variables, from which Keras can save the model later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.saving.saving_lib import get_attr_skipset

from tfdist.training.model_optimizers import optimizers_of


class ModelSnapshots:
    """Copies the variables of a model to host memory.

    A variable of a custom layer or attribute may be saved by Keras although it is in no
    list of the model. Such a variable is part of the copies that are made after the
    first attempt to save it.
    """

    def __init__(self) -> None:
        self._further: list[Any] = []

    def take(self, model: keras.Model) -> ModelSnapshot:
        """Returns copies of the current values."""
        variables = [*_variables_of(model), *self._further]
        values = [variable.numpy() for variable in variables]  # copies
        return ModelSnapshot(variables, values, self._further)


class ModelSnapshot:
    """The values of a model's variables at one moment.

    Args:
        variables: Keras variables.
        values: their values, as NumPy arrays.
        missing: variables without a value that were needed are appended to this list.
    """

    def __init__(
        self, variables: list[Any], values: list[Any], missing: list[Any]
    ) -> None:
        # With the variables themselves, so that no other object gets their identities.
        pairs = zip(variables, values, strict=True)
        self._values = {id(v): (v, value) for v, value in pairs}
        self._missing = missing

    @contextlib.contextmanager
    def as_values(self) -> Iterator[None]:
        """In this thread, variables have the values of the snapshot."""
        _prepare_thread()
        with _Scope(self._values, self._missing):
            yield


def _prepare_thread() -> None:
    """Lets Keras save an optimizer in a scope, in this thread.

    To learn which attributes of an optimizer are variables of their own, Keras creates
    another optimizer, which is not possible in a scope. It looks for the names of the
    attributes here first, but Keras 3.15 stores them under a different name.
    """
    names = get_attr_skipset("Optimizer")
    global_state.set_global_attribute("saving_attr_skiplist_Optimizer", names)


class _Scope(keras.StatelessScope):
    """Keras reads the values of variables from it, in the thread that entered it."""

    def __init__(
        self, values: dict[int, tuple[Any, np.ndarray]], missing: list[Any]
    ) -> None:
        super().__init__(initialize_variables=False)
        self._values = values
        self._missing = missing

    def get_current_value(self, variable: Any) -> tf.Tensor:
        if id(variable) not in self._values:
            if all(one is not variable for one in self._missing):
                self._missing.append(variable)
            raise RuntimeError(
                f"the variable {variable.path} is in no list of the model, and was not "
                "copied; the next save will include it"
            )
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(self._values[id(variable)][1])


def _variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables that a file of the model contains."""
    found = [*model.variables, *model.metrics_variables]
    for optimizer in optimizers_of(model):
        found += optimizer.variables
    return list({id(v): v for v in found}.values())
