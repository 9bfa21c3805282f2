"""Variables that belong to one rank: their gradients are not reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class LocalVariables:
    """Which of the variables that are trained belong to each rank alone.

    Args:
        chosen: variables and layers (or models), which stand for all their variables,
            also for those that they do not have yet; or a function that is given a
            variable and says whether it is local.

    Raises:
        TypeError: `chosen` is neither, or something in it is neither.

    Example:
        >>> import tensorflow as tf
        >>> from tfdist.collectives.local_variables import LocalVariables
        >>> shared, own = tf.Variable(1.0, name="shared"), tf.Variable(2.0, name="own")
        >>> LocalVariables([own]).places([shared, own])
        [1]
        >>> LocalVariables(lambda v: v.name.startswith("sh")).places([shared, own])
        [0]
    """

    def __init__(self, chosen: Iterable[Any] | Callable[[Any], bool]) -> None:
        self._asks = chosen if callable(chosen) and not is_layer(chosen) else None
        if self._asks is not None:
            return
        if is_layer(chosen) or is_variable(chosen) or not _is_iterable(chosen):
            raise TypeError(
                "Expected local_variables to be a list of variables and layers, or a "
                f"function of a variable, got {type(chosen).__name__}: {chosen!r}."
            )
        self._listed = list(chosen)  # type: ignore[arg-type]
        for one in self._listed:
            if not (is_variable(one) or is_layer(one)):
                raise TypeError(
                    "Expected variables and layers in local_variables, got "
                    f"{type(one).__name__}: {one!r}."
                )

    def places(self, variables: Sequence[Any]) -> list[int]:
        """The places in `variables` of those that are local, ascending."""
        if self._asks is not None:
            return [i for i, v in enumerate(variables) if self._asks(v)]
        local = set(map(identity, self.listed()))
        return [i for i, v in enumerate(variables) if identity(v) in local]

    def listed(self) -> list[Any]:
        """The variables that are listed, and those of listed layers; of none asked."""
        if self._asks is not None:
            return []
        members = (one.weights if is_layer(one) else [one] for one in self._listed)
        return [variable for some in members for variable in some]


def with_one_more(known: LocalVariables | None, one: Any) -> LocalVariables:
    """Returns the known local variables with one variable or layer added.

    Raises:
        TypeError: it is neither.
    """
    return LocalVariables([*(known._listed if known else ()), one])


def check_clips_each_alone(optimizer: Any) -> None:
    """Raises ValueError if an optimizer clips by the norm over several variables.

    Where some of them are local that norm differs between the ranks.

    Args:
        optimizer: of Keras, or one made of others (loss scale, `MultiOptimizer`).
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for one in [inner, *getattr(inner, "_inner_optimizers", ())]:
        if getattr(one, "global_clipnorm", None) is not None:
            raise ValueError(
                "global_clipnorm cannot be used with local_variables: the norm over "
                "all gradients would differ between the ranks, and with it the "
                "variables that they share. Use clipnorm."
            )


def is_layer(one: Any) -> bool:
    """Whether it has variables: a layer or a model."""
    return hasattr(one, "trainable_variables") and hasattr(one, "weights")


def is_variable(one: Any) -> bool:
    """Whether it is a variable of Keras or TensorFlow."""
    return hasattr(one, "assign") and hasattr(one, "dtype")


def _is_iterable(chosen: Any) -> bool:
    return isinstance(chosen, Iterable) and not isinstance(chosen, str)


def identity(variable: Any) -> int:
    """Tells variables apart; that of a Keras variable is that of what it holds."""
    held = getattr(variable, "value", variable)
    return id(variable if callable(held) else held)
