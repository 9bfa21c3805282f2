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

# Variables and their values. The keys are the identities of the variables, which no
# other object can get while the variable is in the table.
_Values = dict[int, tuple[Any, np.ndarray]]


class ModelSnapshots:
    """Copies the variables of a model to host memory.

    Keras may save a variable of a custom layer or attribute that is in none of the
    model's lists of variables. The first attempt to save such a variable fails; later
    snapshots include it.

    The arrays of a snapshot that is no longer needed are reused: copying into new
    memory takes several times as long, because the kernel clears each page first.
    """

    def __init__(self) -> None:
        self._further: list[Any] = []
        self._unused: _Values = {}  # of the last snapshot that was released

    def take(self, model: keras.Model) -> ModelSnapshot:
        """Returns copies of the current values."""
        unused, self._unused = self._unused, {}
        values: _Values = {}
        for variable in [*_variables_of(model), *self._further]:
            _, array = unused.get(id(variable), (None, None))
            values[id(variable)] = variable, _copy(variable, array)
        return ModelSnapshot(values, self._further)

    def release(self, snapshot: ModelSnapshot) -> None:
        """Lets a later snapshot overwrite this one; may be called by another thread."""
        self._unused = snapshot.values

    def free(self) -> None:
        """Frees the memory that was kept for later snapshots."""
        self._unused = {}


class ModelSnapshot:
    """The values of a model's variables at one moment.

    Args:
        values: the variables and their values.
        missing: list to which variables are appended that were read but have no value.

    Attributes:
        values: the variables and their values.
    """

    def __init__(self, values: _Values, missing: list[Any]) -> None:
        self.values = values
        self._missing = missing

    @contextlib.contextmanager
    def as_values(self) -> Iterator[None]:
        """Gives the variables the values of the snapshot, in this thread only."""
        _prepare_thread()
        with _Scope(self.values, self._missing):
            yield


def _copy(variable: Any, array: np.ndarray | None) -> np.ndarray:
    """Returns a copy of a variable's value, in `array` if that fits."""
    value = np.asarray(tf.convert_to_tensor(variable))  # shares the variable's buffer
    if array is None or (array.shape, array.dtype) != (value.shape, value.dtype):
        return value.copy()
    np.copyto(array, value)
    return array


def _prepare_thread() -> None:
    """Lets Keras save an optimizer in a `_Scope`, in this thread.

    To find out which attributes of an optimizer to skip, Keras creates another
    optimizer, which is not possible in a scope. Keras first looks up their names under
    the key below, but Keras 3.15 stores them under a different key.
    """
    names = get_attr_skipset("Optimizer")
    global_state.set_global_attribute("saving_attr_skiplist_Optimizer", names)


class _Scope(keras.StatelessScope):
    """Scope from which Keras reads variables, in the thread that entered it."""

    def __init__(self, values: _Values, missing: list[Any]) -> None:
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
