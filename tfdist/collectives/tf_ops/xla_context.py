"""Detects functions that XLA compiles, in which tfdist operations cannot run."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import control_flow_util


class InsideXlaError(NotImplementedError):
    """An operation of tfdist was called in a function that XLA compiles.

    Args:
        why: the reason, to be added to the message; default: none.
    """

    ag_pass_through = True  # otherwise AutoGraph raises an exception class of its own
    _keras_call_info_injected = True  # otherwise layers would pass a message as `why`

    def __init__(self, why: str | None = None) -> None:
        self.why = why
        super().__init__(
            "tfdist operations cannot run inside a function compiled by XLA"
            f"{f': {why}' if why else ''}. Pass a callback of tfdist to model.fit, so "
            "that XLA compiles only the forward and backward pass: "
            "callbacks=[tfdist.callbacks.BroadcastInitialState()]; or write "
            "jit_compile=False in model.compile(...) or tf.function(...). (On a "
            "machine with a GPU, Keras compiles with XLA by default.)"
        )


def inside_xla() -> bool:
    """Returns whether XLA compiles the function being traced."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def check_not_xla(why: str | None = None) -> None:
    """Raises if the function being traced is compiled by XLA.

    Args:
        why: the reason, to be added to the message; default: none.

    Raises:
        InsideXlaError: the message says what to change.
    """
    if inside_xla():
        raise InsideXlaError(why)
