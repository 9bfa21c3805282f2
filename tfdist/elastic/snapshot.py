"""Saves the values of variables, and restores them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.tf_ops.op_library import native_ops


def variables_of(objects: Iterable[Any]) -> list[Any]:
    """Returns the variables of models, layers, optimizers and metrics, each once.

    Args:
        objects: Keras models (with the variables of the optimizer that they were
            compiled with), layers, optimizers, metrics and seed generators, Keras
            variables and `tf.Variable`s.

    Raises:
        TypeError: an object is none of these.
        ValueError: an object is not built, or is a metric without variables.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.elastic.snapshot import variables_of
        >>> w = tf.Variable(1.0)
        >>> len(variables_of([w, w]))
        1
    """
    found: dict[int, Any] = {}
    for one in objects:
        for variable in _variables_of(one):
            found.setdefault(id(_tensorflow_variable(variable)), variable)
    return list(found.values())


def _variables_of(one: Any) -> Sequence[Any]:
    if isinstance(one, tf.Variable | keras.Variable):
        return [one]
    if isinstance(one, keras.random.SeedGenerator):
        return [one.state]
    if isinstance(one, keras.Model):
        _check_built(one, "model", "Call model.build(input_shape) first.")
        optimizer = getattr(one, "optimizer", None)
        return [*one.variables, *(_variables_of(optimizer) if optimizer else ())]
    if isinstance(one, keras.optimizers.Optimizer):
        _check_built(
            one,
            "optimizer",
            "Call optimizer.build(model.trainable_variables) first. If the model was "
            "compiled for its metrics only, compile it with this optimizer.",
        )
        return list(one.variables)
    if isinstance(one, keras.Layer):
        _check_built(one, "layer", "Call layer.build(input_shape) first.")
        return list(one.variables)
    if isinstance(one, keras.Metric):
        if not one.variables:
            raise ValueError(
                f"Expected a metric with variables, got {one.name!r}, which creates "
                "them in its first call. Call it once first, then reset_state()."
            )
        return list(one.variables)
    raise TypeError(
        "Expected Keras models, layers, optimizers, metrics or seed generators, or "
        f"variables, got {type(one).__name__}: {one!r}."
    )


def _check_built(one: Any, kind: str, advice: str) -> None:
    if not one.built:
        raise ValueError(
            f"Expected a built {kind}, got {one.name!r}, which is not built. {advice}"
        )


def _tensorflow_variable(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _reader_of(variables: Sequence[tf.Variable]) -> Callable[[], Sequence[tf.Tensor]]:
    """Returns a fast function that reads all variables."""
    if variables and all("CPU" in v.device for v in variables):
        return functools.partial(
            native_ops().tfdist_read_variables,
            handles=[v.handle for v in variables],
            dtypes=[v.dtype for v in variables],
        )

    @tf.function(jit_compile=False, autograph=False)
    def read() -> list[tf.Tensor]:
        return [v.read_value() for v in variables]

    return read.get_concrete_function()  # type: ignore[no-any-return]


class Snapshot:
    """Saved values of variables, which can be restored.

    A snapshot keeps references to the variables' tensors instead of copying them.
    TensorFlow does not change a tensor that is still in use: an update then writes to
    new memory. So a snapshot takes additional memory as soon as the variables are
    updated. Only a variable that was updated by rows (an embedding) is copied at each
    `save`.

    Args:
        variables: Keras or TensorFlow variables, each once.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.elastic.snapshot import Snapshot
        >>> w = tf.Variable(1.0)
        >>> snapshot = Snapshot([w])
        >>> _ = w.assign_add(1.0)
        >>> snapshot.restore()
        >>> float(w)
        1.0
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [_tensorflow_variable(v) for v in variables]
        self._read = _reader_of(self._variables)
        self.save()

    def save(self) -> None:
        """Replaces the saved values with the current values of the variables."""
        self._values = self._read()

    def restore(self) -> None:
        """Sets the variables to the saved values."""
        self.assign(self._values)

    @property
    def values(self) -> list[tf.Tensor]:
        """The saved values, in the order of the variables."""
        return list(self._values)

    def assign(self, values: Sequence[Any]) -> None:
        """Sets the variables to `values`, which are in the order of the variables."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)
