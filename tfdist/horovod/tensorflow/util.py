"""Small functions that scripts import from `horovod.tensorflow.util`."""

from __future__ import annotations

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Returns whether operations run eagerly."""
    return bool(tf.executing_eagerly())
