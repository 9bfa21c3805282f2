"""Training in float64, and how near several ranks have to come to one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

TOLERANCE = 1e-10  # relative; the order of additions differs


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that makes and trains models."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        before = keras.config.floatx()
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        try:
            return function(*args)
        finally:
            keras.config.set_floatx(before)
            keras.config.set_dtype_policy(before)

    return wrapped


def state_of(model: Any, *optimizers: Any) -> list[np.ndarray]:
    """Weights and slots, without what is float32 in a float64 model: the rates."""
    slots = [v for o in optimizers for v in o.variables]
    slots = [v for v in slots if not v.path.endswith("learning_rate")]
    return [v.numpy() for v in [*model.weights, *slots]]


def assert_like_one_process(
    ranks: Sequence[Sequence[np.ndarray]], alone: Sequence[np.ndarray], case: str
) -> None:
    """All ranks have the same bits, and nearly the values of one process."""
    for rank, other in enumerate(ranks[1:], 1):
        for a, b in zip(ranks[0], other, strict=True):
            assert a.tobytes() == b.tobytes(), f"{case}: rank {rank} differs"
    for number, (a, b) in enumerate(zip(alone, ranks[0], strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        error = np.max(np.abs(a - b) / (1e-6 + np.abs(a)), initial=0.0)
        assert error < TOLERANCE, f"{case}: relative error {error:.1e} in [{number}]"
