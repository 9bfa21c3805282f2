"""Helpers shared by the tape and the optimizer that accept local layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import keras


def has_parameters_of(whole: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """Gives a function the parameters of another function, and additional ones.

    Args:
        whole: function whose parameters are used, in the same order.
        **more: names and defaults of additional parameters, which are inserted before
            the last parameter.

    Returns:
        A decorator for a function that accepts all these parameters as keywords.

    Example:
        >>> def make(a, b=1):
        ...     return a, b
        >>> @has_parameters_of(make, c=None)
        ... def make_more(*, c, **options):
        ...     return c, make(**options)
        >>> make_more(1, 2, b=3)
        (2, (1, 3))
    """
    known = inspect.signature(whole)
    parameters = list(known.parameters.values())
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters[-1:-1] = [
        inspect.Parameter(name, kind, default=default, annotation=Any)
        for name, default in more.items()
    ]
    signature = known.replace(parameters=parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(**{**more, **signature.bind(*args, **kwargs).arguments})

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def layers_of(given: Any) -> list[keras.layers.Layer]:
    """Returns one or several layers as a list; None as an empty list.

    Raises:
        ValueError: an entry is not a Keras layer.
    """
    if given is None:
        return []
    is_one = isinstance(given, keras.layers.Layer | str)
    listed = [given] if is_one or not isinstance(given, Collection) else list(given)
    for layer in listed:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "Expected local_layers to be a layer or a list of layers, got "
                f"{type(layer).__name__}: {layer!r}. To register a variable, call "
                "register_local_source(variable) on the tape, or "
                "register_local_var(variable) on the optimizer."
            )
    return listed
