"""Adds operations after a model's training step, in the function that `fit` traces."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_PARTS = "_tfdist_parts"  # attribute of a step: the original step, and what follows it

_Step = Callable[[Any], Any]
_Parts = tuple[_Step, Callable[[Any], Any] | None]


def followed_by(step: _Step, after: Callable[[Any], Any]) -> _Step:
    """Returns a step that calls `step` with a batch, and `after` with its logs.

    Example:
        >>> from tfdist.training.train_steps import followed_by
        >>> followed_by(lambda data: {"loss": data}, lambda logs: logs["loss"] + 1)(2)
        3
    """

    @functools.wraps(step)
    def both(data: Any) -> Any:
        return after(step(data))

    setattr(both, _PARTS, (step, after))
    return both


def parts_of(step: _Step) -> _Parts:
    """Returns the original step, and what follows it; None if nothing does."""
    parts: _Parts = getattr(step, _PARTS, (step, None))
    return parts


@contextlib.contextmanager
def replaced_step(model: Any, step: _Step) -> Iterator[None]:
    """Makes `step` the `train_step` of a model while its train function is created."""
    own = vars(model).get("train_step")
    # Bypass setattr: Keras would track it as a part of the model.
    object.__setattr__(model, "train_step", step)
    try:
        yield
    finally:
        object.__delattr__(model, "train_step")
        if own is not None:
            object.__setattr__(model, "train_step", own)


def remake_train_function(model: Any, after: Callable[[Any], Any]) -> None:
    """Recreates the train function of a model so that `after` follows each step.

    With `steps_per_execution`, `after` runs after each single step. If the model has a
    custom `make_train_function` that does not call `train_step`, `after` does not run.

    Args:
        model: a compiled Keras model.
        after: function that gets the logs of the step, and returns those of the train
            function.
    """
    with replaced_step(model, followed_by(model.train_step, after)):
        model.train_function = None  # a custom make_train_function may ignore `force`
        model.make_train_function(force=True)
