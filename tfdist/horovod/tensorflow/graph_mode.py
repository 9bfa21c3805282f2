"""Functions and hooks for a `tf.Graph` and its session."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.horovod.tensorflow.functions import broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns an operation that broadcasts the graph's global variables from one rank.

    Args:
        root_rank: rank whose values are sent.

    Returns:
        The operation; run it once after initializing the variables.

    Raises:
        RuntimeError: called in eager mode, which has no global variables.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...     v = tf.compat.v1.get_variable("v", initializer=[1.0])
        ...     send = hvd.broadcast_global_variables(0)
        ...     session.run(tf.compat.v1.global_variables_initializer())
        ...     session.run(send)
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution, which "
            "has no global variables. Write hvd.broadcast_variables(model.weights + "
            "optimizer.variables, root_rank=0) after the first step. In fit, use "
            "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)] of "
            "horovod.keras."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook:
    """A session hook of TensorFlow 1, which tfdist does not support.

    Args:
        root_rank: used in the message only.
        device: used in the message only.

    Raises:
        NotImplementedError: always; the message names alternatives.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise NotImplementedError(
            f"BroadcastGlobalVariablesHook({root_rank!r}, device={device!r}) is a "
            "session hook of TensorFlow 1 (tf.estimator, MonitoredTrainingSession), "
            "which tfdist does not support. In a tf.compat.v1.Session, run "
            f"session.run(hvd.broadcast_global_variables({root_rank!r})) once after "
            "the variables were initialized. In model.fit, use "
            f"callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank!r})]"
            " of horovod.keras."
        )
