"""Prevents saving a model if an aborted step may have changed only some weights.

The check takes place before a file is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.core.weights_state import check_not_torn

_METHODS = ("save", "save_weights", "export")


def guard_saving(model: keras.Model) -> None:
    """Makes the saving methods of a model raise after an aborted step.

    Keras truncates the target file before it reads the optimizer's state, so an error
    raised there would destroy the previous file.

    Args:
        model: the model to be trained.
    """
    for name in _METHODS:
        method = getattr(model, name)
        if not hasattr(method, "_tfdist_guards"):
            # Bypass setattr: Keras would track it as a part of the model.
            object.__setattr__(model, name, _guarded(method))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse_torn(*args: Any, **kwargs: Any) -> Any:
        check_not_torn()
        return method(*args, **kwargs)

    refuse_torn._tfdist_guards = True  # type: ignore[attr-defined]
    return refuse_torn
