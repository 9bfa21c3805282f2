"""Small functions that scripts import from `horovod.tensorflow.util`."""

from __future__ import annotations

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Whether operations run at once."""
    return bool(tf.executing_eagerly())
