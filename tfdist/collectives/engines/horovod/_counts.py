"""Counts Horovod's operations: those that are running and those that have ended.

If one operation of a step fails, TensorFlow cancels the code that would count the end
of the other operations. So each operation of a traced function has its own mark, which
is set while the operation runs. The next run resets the mark. By then the failed step
has ended, because Horovod rejects two simultaneous operations with the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


class Counts:
    """Counts of the operations of one process."""

    def __init__(self) -> None:
        self._ended: list[tf.Variable] = []  # [all, all except batch statistics]
        self._marks: dict[str, tf.Variable] = {}
        self._eager: set[object] = set()

    def reset(self) -> None:
        """Starts a new world, in which no operation has run."""
        if not self._ended:
            self._ended = [_variable(), _variable()]
        for one in self._ended:
            one.assign(0)
        self.forget()

    def forget(self) -> None:
        """Resets all marks after a traced function has failed."""
        for mark in list(self._marks.values()):
            mark.assign(0)

    def ended_count(self) -> int:
        """Returns the number of operations that have ended in this world."""
        return int(self._ended[0].numpy()) if self._ended else 0

    def operation_count(self) -> int:
        """Returns the number of ended operations, excluding batch statistics."""
        return int(self._ended[1].numpy()) if self._ended else 0

    def is_waiting(self) -> bool:
        """Returns whether an operation has started but not ended."""
        marks = list(self._marks.values())
        return bool(self._eager) or any(int(mark.numpy()) for mark in marks)

    def around(
        self,
        name: str,
        given: Sequence[tf.Tensor],
        emit: Callable[[], list[tf.Tensor]],
        *,
        counts: bool,
    ) -> list[tf.Tensor]:
        """Calls `emit`, records the operation's start and end, and returns its outputs.

        Args:
            name: name that is unique among the operations that may run at the same
                time.
            given: inputs of the operation.
            emit: emits or runs the operation.
            counts: whether `operation_count` includes the operation.
        """
        if tf.executing_eagerly():
            token = object()
            self._eager.add(token)
            try:
                found = emit()
            finally:
                self._eager.discard(token)
            self._end(counts)
            return found
        if name not in self._marks:
            self._marks[name] = _variable()
        mark = self._marks[name]
        with tf.control_dependencies(given):
            mark_set = mark.assign(1, read_value=False)
        found = emit()
        # This also keeps unused operations in the graph, because other ranks wait for
        # them.
        with tf.control_dependencies([*found, mark_set]):
            mark.assign(0, read_value=False)
            self._end(counts)
        return found

    def _end(self, counts: bool) -> None:
        for one in self._ended if counts else self._ended[:1]:
            one.assign_add(1, read_value=False)


def _variable() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)
