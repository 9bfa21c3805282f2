"""Variables that are local to each rank: their gradients are not reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class LocalVariables:
    """Selection of the trained variables that are local to each rank.

    Args:
        selection: list of variables and layers or models, or a function that takes a
            variable and returns whether it is local. A layer or model stands for all
            its variables, including those that it creates later.

    Raises:
        TypeError: `selection` or an entry of the list has a wrong type.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.collectives.local_variables import LocalVariables
        >>> shared, own = tf.Variable(1.0, name="shared"), tf.Variable(2.0, name="own")
        >>> LocalVariables([own]).places([shared, own])
        [1]
        >>> LocalVariables(lambda v: v.name.startswith("sh")).places([shared, own])
        [0]
    """

    def __init__(self, selection: Iterable[Any] | Callable[[Any], bool]) -> None:
        self._predicate = (
            selection if callable(selection) and not is_layer(selection) else None
        )
        if self._predicate is not None:
            return
        if is_layer(selection) or is_variable(selection) or not _is_iterable(selection):
            raise TypeError(
                "Expected local_variables to be a list of variables and layers, or a "
                f"function of a variable, got {type(selection).__name__}: "
                f"{selection!r}."
            )
        self._listed = list(selection)  # type: ignore[arg-type]
        for item in self._listed:
            if not (is_variable(item) or is_layer(item)):
                raise TypeError(
                    "Expected variables and layers in local_variables, got "
                    f"{type(item).__name__}: {item!r}."
                )

    def places(self, variables: Sequence[Any]) -> list[int]:
        """Returns the indices of the local variables in `variables`, ascending."""
        if self._predicate is not None:
            return [i for i, v in enumerate(variables) if self._predicate(v)]
        local = set(map(identity, self.listed()))
        return [i for i, v in enumerate(variables) if identity(v) in local]

    def listed(self) -> list[Any]:
        """Returns listed variables and those of listed layers; [] for a function."""
        if self._predicate is not None:
            return []
        members = (item.weights if is_layer(item) else [item] for item in self._listed)
        return [variable for part in members for variable in part]


def with_local_variable(local: LocalVariables | None, item: Any) -> LocalVariables:
    """Returns a selection of the variables in `local` and one more variable or layer.

    Raises:
        TypeError: `item` is neither a variable nor a layer.
    """
    return LocalVariables([*(local._listed if local else ()), item])


def check_clips_each_alone(optimizer: Any) -> None:
    """Raises ValueError if an optimizer clips by the norm over several variables.

    If some of these variables are local, the norm differs between the ranks.

    Args:
        optimizer: Keras optimizer, or an optimizer that wraps others (loss scale,
            `MultiOptimizer`).
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for one in [inner, *getattr(inner, "_inner_optimizers", ())]:
        if getattr(one, "global_clipnorm", None) is not None:
            raise ValueError(
                "global_clipnorm cannot be used with local_variables: the norm over "
                "all gradients would differ between the ranks, and so would the "
                "updates of the variables that the ranks share. Use clipnorm."
            )


def is_layer(one: Any) -> bool:
    """Returns whether `one` has variables, as a layer or a model does."""
    return hasattr(one, "trainable_variables") and hasattr(one, "weights")


def is_variable(one: Any) -> bool:
    """Returns whether `one` is a Keras or TensorFlow variable."""
    return hasattr(one, "assign") and hasattr(one, "dtype")


def _is_iterable(selection: Any) -> bool:
    return isinstance(selection, Iterable) and not isinstance(selection, str)


def identity(variable: Any) -> int:
    """Returns the id of a TensorFlow variable, or of a Keras variable's `value`."""
    value = getattr(variable, "value", variable)
    return id(variable if callable(value) else value)
