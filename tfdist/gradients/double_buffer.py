"""Gradients of one step that are reduced while the next step is computed.

With double buffering, a step stores its gradients and uses the reduced gradients of
the previous step. Their reduction needs nothing that the step computes. TensorFlow's
executor therefore starts it as soon as the step has read its batch (at the end of the
data there is no batch, and nothing is reduced). The reduction runs during the forward
and the backward pass:

    step t      read the gradients of step t - 1 --> reduce --> update the weights
                forward --> backward --> store the gradients of step t

With weights w, mean gradients g, and an update U, w(t + 1) = U(w(t), g(w(t - 1))). The
first step reduces zeros and changes no weights, and the gradients of the last step are
not used: T steps make T - 1 updates.

References:
    ChainerMN 1.3, 2018: `create_multi_node_optimizer(..., double_buffering=True)`
    (chainer.org/general/2018/05/25/chainermn-v1-3.html).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.per_rank_variables import tf_variable
from tfdist.collectives.variables import after_broadcast
from tfdist.core import runtime
from tfdist.gradients.options import ReduceOptions

_logger = logging.getLogger("tfdist")
# Operations that fail at the end of the data.
_READS_BATCH = ("IteratorGetNext", "OptionalGetValue")


class DoubleBuffer:
    """Holds the gradients of one step until the next step reduces them.

    The stored gradients are this rank's, before the reduction. They are not saved in
    checkpoints.
    """

    def __init__(self) -> None:
        self._stored: dict[int, tf.Variable] = {}
        self._is_full: tf.Variable | None = None
        self._is_weighted = False
        self._has_warned = False
        # Scalar bool: whether the latest step got the gradients of an earlier step.
        self.was_full: Any = None

    def exchange(
        self, grads: Sequence[tf.Tensor | None], *, is_weighted: bool
    ) -> list[tf.Tensor | None]:
        """Stores the gradients of this step; returns those of the previous step.

        Args:
            grads: dense gradients of known shapes, or `None`.
            is_weighted: whether the ranks' gradients are weighted in this step.

        Returns:
            The gradients of the previous step, with the same shapes and dtypes; zeros
            in the first step.

        Raises:
            ValueError: the set of missing gradients differs from earlier steps, or only
                some steps are weighted.
        """
        self._create_variables(grads, is_weighted)
        if tf.executing_eagerly():
            self._warn_eager()
        is_full: Any = self._is_full
        with tf.control_dependencies(_batch_of_step()):
            self.was_full = is_full.read_value()
            previous = [
                None if g is None else self._stored[i].read_value()
                for i, g in enumerate(grads)
            ]
        # tf.function runs these assignments after the reads above, in program order.
        is_full.assign(True)
        for i, grad in enumerate(grads):
            if grad is not None:
                self._stored[i].assign(grad)
        return previous

    def clear(self) -> None:
        """Drops the stored gradients, so the next step is like the first one."""
        if self._is_full is not None:
            self._is_full.assign(False)
        for variable in self._stored.values():
            variable.assign(tf.zeros_like(variable))

    def _create_variables(
        self, grads: Sequence[tf.Tensor | None], is_weighted: bool
    ) -> None:
        present = {i: g for i, g in enumerate(grads) if g is not None}
        if self._is_full is None:
            self._is_weighted = is_weighted
            with tf.init_scope():  # once, outside the traced function
                for i, g in present.items():
                    zeros = tf.zeros(g.shape, g.dtype)
                    self._stored[i] = tf.Variable(zeros, trainable=False)
                self._is_full = tf.Variable(False, trainable=False)
        if present.keys() != self._stored.keys():
            raise ValueError(
                "With double_buffering=True, the same variables need gradients in every"
                f" step, got gradients of the variables {sorted(present)} in this step "
                f"and of {sorted(self._stored)} in earlier steps (indices in the list)."
                " Use a separate optimizer, or a tape with a separate name, for each "
                "part of a model that is trained separately, or omit double_buffering."
            )
        if is_weighted != self._is_weighted:
            raise ValueError(
                "With double_buffering=True, weight must be passed in all steps or in "
                "none. Pass it in all steps (the number of samples), or omit "
                "double_buffering."
            )

    def _warn_eager(self) -> None:
        if not self._has_warned and runtime.rank() == 0:
            _logger.warning(
                "In eager mode, double buffering delays the gradients by one step "
                "without hiding their reduction. Run the step in a tf.function."
            )
        self._has_warned = True


def _batch_of_step() -> list[Any]:
    """Returns the operations in the current graph that provide the step's data."""
    if tf.executing_eagerly():
        return []
    graph: Any = tf.compat.v1.get_default_graph()
    constant = {
        inner.name
        for outer, inner in getattr(graph, "captures", ())
        if not tf.is_symbolic_tensor(outer)
    }
    return [
        operation
        for operation in graph.get_operations()
        if operation.type.startswith(_READS_BATCH)
        or (operation.type == "Placeholder" and f"{operation.name}:0" not in constant)
    ]


class _Entry:
    """A buffer and its owners: the variables and, if there is one, the optimizer."""

    def __init__(self, owners: Sequence[Any], on_death: Any) -> None:
        self.owners = [weakref.ref(one, on_death) for one in owners]
        self.buffer = DoubleBuffer()

    def belongs_to(self, owners: Sequence[Any]) -> bool:
        """Returns whether these are the owners; an id may have been reused."""
        return all(ref() is one for ref, one in zip(self.owners, owners, strict=True))


_buffers: dict[Any, _Entry] = {}


def buffer_of(
    variables: Sequence[Any], options: ReduceOptions, owner: Any = None
) -> DoubleBuffer | None:
    """Returns the buffer of a gradient list, which is the same in every step.

    The buffer exists as long as the optimizer and all variables exist.

    Args:
        variables: the variables whose gradients are reduced.
        options: options of the reduction.
        owner: the optimizer; None for a tape, which exists for a single step only.
            Tapes with equal names share a buffer.

    Returns:
        The buffer; `None` without double buffering or without variables.
    """
    if not options.double_buffering or not variables:
        return None
    owners = [tf_variable(one) for one in variables]
    if owner is not None:
        owners.append(owner)
    key = (options.name, options.process_set, *map(id, owners))
    entry = _buffers.get(key)
    if entry is None or not entry.belongs_to(owners):
        entry = _Entry(owners, lambda _: _buffers.pop(key, None))
        _buffers.update({key: entry})  # AutoGraph rewrites item assignments
    return entry.buffer


def clear_buffers(variables: Iterable[Any]) -> None:
    """Drops the stored gradients of all lists that contain one of these variables."""
    wanted = {id(tf_variable(one)) for one in variables}
    for entry in list(_buffers.values()):
        if not wanted.isdisjoint(id(ref()) for ref in entry.owners):
            entry.buffer.clear()


# A load on one rank clears only its own buffers, but all ranks have to update in the
# same steps.
after_broadcast.append(clear_buffers)
