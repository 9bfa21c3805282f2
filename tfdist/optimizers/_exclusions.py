"""Variables that an optimizer excludes from weight decay and adaptation."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras

_logger = logging.getLogger("tfdist")

Exclude = None | str | Sequence[str] | Callable[[Any], bool]


def check_exclude(exclude: Any) -> Any:
    """Checks the option; returns None, a list of patterns, or a function.

    Raises:
        TypeError: the option has a different type.
        ValueError: a pattern is not a valid regular expression.
    """
    if exclude is None or callable(exclude):
        return exclude
    patterns = [exclude] if isinstance(exclude, str) else exclude
    is_list = isinstance(patterns, list | tuple)
    if not is_list or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "exclude: expected None, a regular expression or a list of them, or a "
            "function of a variable that returns True or False, got "
            f"{type(exclude).__name__} {exclude!r}."
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"exclude: {pattern!r} is not a valid regular expression: {error}."
            ) from error
    return list(patterns)


def are_excluded(variables: Sequence[Any], exclude: Any) -> list[bool]:
    """Returns for each variable whether it is excluded.

    Args:
        variables: Keras or TensorFlow variables.
        exclude: result of `check_exclude`.

    Raises:
        TypeError: the function did not return True or False.
    """
    if exclude is None:
        return [len(v.shape) <= 1 for v in variables]
    if callable(exclude):
        return [_call_predicate(exclude, v) for v in variables]
    paths = [_path_of(v) for v in variables]
    for pattern in exclude:
        if not any(re.search(pattern, path) for path in paths):
            _logger.warning(
                "exclude: no variable's path matches %r. The paths are: %s.",
                pattern,
                ", ".join(paths),
            )
    return [any(re.search(pattern, path) for pattern in exclude) for path in paths]


def serialize(exclude: Any) -> Any:
    """Returns the option in a form that can be saved with a model."""
    if callable(exclude):
        return keras.saving.serialize_keras_object(exclude)
    return exclude


def deserialize(exclude: Any, custom_objects: dict[str, Any] | None) -> Any:
    """Returns the option that was serialized."""
    if isinstance(exclude, dict):
        return keras.saving.deserialize_keras_object(exclude, custom_objects)
    return exclude


def _call_predicate(function: Callable[[Any], Any], variable: Any) -> bool:
    answer = function(variable)
    if not isinstance(answer, bool):
        raise TypeError(
            "exclude: expected a function that returns True or False, got "
            f"{type(answer).__name__} {answer!r} for {_path_of(variable)}."
        )
    return answer


def _path_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
