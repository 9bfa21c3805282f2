"""The state of callbacks as plain values, to send to other ranks or to restore."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.collectives.object_codec import can_encode, encode
from tfdist.core.registry import WeakRegistry

MAX_STATE_BYTES = 1 << 30  # of all that ranks of an elastic `fit` send at once
MAX_CALLBACK_BYTES = 1 << 28  # of the state of one callback
_logger = logging.getLogger("tfdist")
# Callback → names of the attributes that a warning has named.
_named: WeakRegistry[set[str]] = WeakRegistry()
# Attributes of keras.callbacks.Callback, which differ between ranks.
_OF_KERAS = ("params", "_model", "validation_data")
_SCALARS = (bool, int, float, str, bytes, type(None), np.generic)
_MAX_DEPTH = 8


def plain_state(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a callback that are plain data.

    These are numbers, arrays, and lists, tuples and dicts of them, such as the best
    value of an EarlyStopping, or the lists of a History. Open files, models and
    functions are excluded, because they belong to this process. Attributes that are
    strings are also excluded, because they may be names of this process's files.

    Args:
        attributes: `vars(callback)`.

    Example:
        >>> from tfdist.callbacks._callback_states import plain_state
        >>> plain_state({"wait": 2, "params": {}, "path": "a", "best": [0.5]})
        {'wait': 2, 'best': [0.5]}
    """
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_KERAS
        and not isinstance(value, str | bytes)
        and _is_plain(value, 0)
    }


def state_to_send(callback: Any) -> dict[str, Any]:
    """Returns the plain state of a callback, without attributes that cannot be sent.

    A warning names an attribute that cannot be sent, for example because a list holds
    texts of NumPy, or because it is too large.

    Args:
        callback: a Keras callback.
    """
    found: dict[str, Any] = {}
    left = MAX_CALLBACK_BYTES
    for name, value in plain_state(vars(callback)).items():
        try:
            left -= len(encode(value, max_bytes=left))
        except (TypeError, ValueError) as error:
            _warn(callback, name, error)
        else:
            found[name] = value
    return found


def _warn(callback: Any, name: str, error: Exception) -> None:
    named = _named.get(callback) or _named.set(callback, set())
    if name not in named:
        named.add(name)
        _logger.warning(
            "The attribute %r of the callback %s is not sent to other ranks, so it "
            "begins anew on a rank that replaces this one: %s",
            name,
            type(callback).__name__,
            error,
        )


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, _SCALARS):
        return not isinstance(value, enum.Enum)
    if isinstance(value, np.ndarray):
        return can_encode(value.dtype)
    if depth == _MAX_DEPTH:
        return False
    if type(value) in (list, tuple):
        return all(_is_plain(one, depth + 1) for one in value)
    if type(value) is dict:
        keys_are_plain = all(isinstance(key, str | int) for key in value)
        return keys_are_plain and all(
            _is_plain(one, depth + 1) for one in value.values()
        )
    return False
