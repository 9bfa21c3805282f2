"""What `tfdistrun --horovod` does to optimizers and tapes, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.horovod import _unreduced
from tfdist.horovod._keras.optimizer import OwnSteps
from tfdist.training.optimizer_mixins import Reducing

_Optimizer = tf.compat.v1.train.Optimizer
CHANGED = (
    (keras.optimizers.Optimizer, "apply"),
    (_Optimizer, "apply_gradients"),
    (_Optimizer, "compute_gradients"),
    (tf.GradientTape, "gradient"),
    (Reducing, "apply"),
    (OwnSteps, "apply"),
)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Steps are checked inside of it, in this process, and not after it."""
    before = [(owner, name, getattr(owner, name)) for owner, name in CHANGED]
    _unreduced.guard()
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
