"""Refuses to save a model whose weights are torn, before a file is touched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.core.weights_state import check_not_torn

_METHODS = ("save", "save_weights", "export")


def guard_saving(model: keras.Model) -> None:
    """Makes the saving methods of this model refuse after an aborted step.

    Keras empties the target file before it asks the optimizer for its state, so a
    refusal there would cost what was saved before.

    Args:
        model: the model that is about to be trained.
    """
    for name in _METHODS:
        method = getattr(model, name)
        if not hasattr(method, "_tfdist_guards"):
            # Not by setattr: Keras would track it as a part of the model.
            object.__setattr__(model, name, _guarded(method))


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def refuse_torn(*args: Any, **kwargs: Any) -> Any:
        check_not_torn()
        return method(*args, **kwargs)

    refuse_torn._tfdist_guards = True  # type: ignore[attr-defined]
    return refuse_torn
