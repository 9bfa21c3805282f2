"""Maps process sets to Horovod's numbers, and tells which of them still exist.

Horovod gives the number of a set that was removed to the next one, and starts again
after the next init: a function that was traced for the one would reduce over the other.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

WORLD = 0


class Sets:
    """The sets of one process: number of a set → Horovod's."""

    def __init__(self) -> None:
        self._horovod_ids: dict[int, int] = {}
        self._births = itertools.count(1)
        self._born: dict[int, int] = {}  # number of the set → which of its uses exists
        self._lives: dict[int, tf.Variable] = {}  # the same, for traced functions

    def start(self) -> None:
        """Begins a new world, which has the set of all ranks."""
        self.clear()
        self._horovod_ids[WORLD] = WORLD

    def clear(self) -> None:
        """Removes all sets."""
        for number in list(self._horovod_ids):
            self.remove(number)

    def add(self, number: int, horovod_id: int) -> None:
        """Adds a set, whose number in Horovod is `horovod_id`."""
        self._horovod_ids[number] = horovod_id
        self._set_birth(number, next(self._births))

    def remove(self, number: int) -> int:
        """Removes a set; returns its number in Horovod."""
        self._set_birth(number, 0)
        return self._horovod_ids.pop(number)

    def __contains__(self, number: int) -> bool:
        return number in self._horovod_ids

    def __getitem__(self, number: int) -> int:
        return self._horovod_ids[number]

    def checks(self, number: int) -> list[tf.Operation]:
        """Fail where the function that is traced runs without this set.

        Without effect in eager mode, and for all ranks, which is no set of its own.
        """
        if number == WORLD or tf.executing_eagerly():
            return []
        if number not in self._lives:
            with tf.init_scope(), tf.device("CPU:0"):
                self._lives[number] = tf.Variable(
                    self._born[number], dtype=tf.int64, trainable=False
                )
        check = tf.debugging.assert_equal(
            self._lives[number].read_value(),
            tf.constant(self._born[number], tf.int64),
            f"The process set {number} that this tf.function was traced for was "
            "removed. Expected a process set that lives: trace it anew.",
        )
        return [check] if check is not None else []

    def _set_birth(self, number: int, birth: int) -> None:
        self._born[number] = birth
        if number in self._lives:
            self._lives[number].assign(birth)
