"""Which operations run in Horovod now, and how many have ended.

What TensorFlow cancels counts nothing any more: where one operation of a step fails,
what would note the end of the others does not run. So an operation of a traced function
has a mark of its own, which is set while it runs: its next run takes it back, as the
step that has failed has ended by then (Horovod refuses two of one name at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


class Counts:
    """Of one process; the operations of traced functions keep theirs."""

    def __init__(self) -> None:
        self._ended: list[tf.Variable] = []  # all, and those that are counted
        self._marks: dict[str, tf.Variable] = {}
        self._eager: set[object] = set()

    def reset(self) -> None:
        """A new world: nothing has run in it."""
        if not self._ended:
            self._ended = [_variable(), _variable()]
        for one in self._ended:
            one.assign(0)
        self.forget()

    def forget(self) -> None:
        """A traced function has failed, and so has ended: nothing in it waits."""
        for mark in list(self._marks.values()):
            mark.assign(0)

    def ended(self) -> int:
        """How many have ended in this world."""
        return int(self._ended[0].numpy()) if self._ended else 0

    def counted(self) -> int:
        """How many of those were to be counted."""
        return int(self._ended[1].numpy()) if self._ended else 0

    def waits(self) -> bool:
        """Whether one has started and not ended."""
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
            name: of no other operation that may run beside it.
            given: its inputs.
            emit: emits it, or runs it.
            counts: whether it is one of the `counted`.
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
            marked = mark.assign(1, read_value=False)
        found = emit()
        # Also keeps what nobody uses in the graph, as other ranks wait for it.
        with tf.control_dependencies([*found, marked]):
            mark.assign(0, read_value=False)
            self._end(counts)
        return found

    def _end(self, counts: bool) -> None:
        for one in self._ended if counts else self._ended[:1]:
            one.assign_add(1, read_value=False)


def _variable() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)
