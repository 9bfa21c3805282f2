"""Gradients of one step that are reduced while the next step is computed.

With double buffering, a step stores its gradients and gets the reduced gradients of the
step before. Their reduction depends on nothing that the step computes, so TensorFlow's
executor starts it at once, and it runs during the forward and the backward pass:

    step t      read the gradients of step t - 1 --> reduce --> update the weights
                forward --> backward --> store the gradients of step t

With weights w, mean gradients g, and an update U, w(t + 1) = U(w(t), g(w(t - 1))). The
first step has nothing to reduce, and the last gradients are not used: T steps make
T - 1 updates.

References:
    T. Akiba, K. Fukuda, S. Suzuki, ChainerMN: Scalable Distributed Deep Learning
    Framework, 2017 (arXiv:1710.11351); `double_buffering` of its optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.local_variables import identity
from tfdist.collectives.per_rank_variables import tf_variable
from tfdist.core import runtime
from tfdist.core.registry import WeakRegistry
from tfdist.gradients.options import ReduceOptions

_logger = logging.getLogger("tfdist")


class DoubleBuffer:
    """Holds the gradients of one step until the next step reduces them.

    The gradients are this rank's own. They are not part of any saved state.
    """

    def __init__(self) -> None:
        self._stored: dict[int, tf.Variable] = {}
        self._is_full: tf.Variable | None = None
        self._has_warned = False
        # A scalar bool of the latest step: whether it got gradients of an earlier one.
        self.was_full: Any = None

    def exchange(self, grads: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Stores the gradients of this step; returns those of the previous one.

        Args:
            grads: dense gradients of known shapes, or `None`; the same in every step.

        Returns:
            The stored gradients, of the same shapes and dtypes; zeros in the first
            step.
        """
        self._create_variables(grads)
        if tf.executing_eagerly():
            self._warn_eager()
        is_full: Any = self._is_full
        self.was_full = is_full.read_value()
        previous = [
            None if g is None else self._stored[i].read_value()
            for i, g in enumerate(grads)
        ]
        # tf.function runs these after the reads above, because they come later.
        is_full.assign(True)
        for i, grad in enumerate(grads):
            if grad is not None:
                self._stored[i].assign(grad)
        return previous

    def clear(self) -> None:
        """Drops the stored gradients: the next step is a first step again."""
        if self._is_full is not None:
            self._is_full.assign(False)
        for variable in self._stored.values():
            variable.assign(tf.zeros_like(variable))

    def _create_variables(self, grads: Sequence[tf.Tensor | None]) -> None:
        shapes = {
            i: (g.shape, g.dtype)
            for i, g in enumerate(grads)
            if g is not None and i not in self._stored
        }
        with tf.init_scope():  # once, outside of the traced function
            for i, (shape, dtype) in shapes.items():
                zeros = tf.zeros(shape, dtype)
                self._stored[i] = tf.Variable(zeros, trainable=False)
            if self._is_full is None:
                self._is_full = tf.Variable(False, trainable=False)

    def _warn_eager(self) -> None:
        if not self._has_warned and runtime.rank() == 0:
            _logger.warning(
                "Double buffering in eager execution delays the gradients by a step "
                "without hiding their reduction. Run the step in a tf.function."
            )
        self._has_warned = True


# The buffers of tapes, which usually exist for a single step; by the first variable.
_of_tapes: WeakRegistry[dict[Any, DoubleBuffer]] = WeakRegistry()


def buffer_of_tape(
    variables: Sequence[Any], options: ReduceOptions
) -> DoubleBuffer | None:
    """Returns the buffer of a tape: the same in every step.

    Args:
        variables: the variables whose gradients the tape reduces.
        options: options of the tape.

    Returns:
        The buffer of this list of variables and the name of the tape; `None` without
        double buffering or without variables.
    """
    if not options.double_buffering or not variables:
        return None
    first = tf_variable(variables[0])
    buffers = _of_tapes.get(first)
    if buffers is None:
        buffers = _of_tapes.set(first, {})
    key = (options.name, options.process_set, tuple(map(identity, variables)))
    return buffers.setdefault(key, DoubleBuffer())
