"""Maps process sets to Horovod's process set ids, and tracks which sets still exist.

Horovod reuses the id of a removed set for the next set, and starts numbering again
after the next init. A function that was traced for the old set would then reduce over
the new set.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

WORLD = 0


class Sets:
    """Process sets known to this process: id in tfdist → id in Horovod."""

    def __init__(self) -> None:
        self._horovod_ids: dict[int, int] = {}
        self._births = itertools.count(1)
        self._born: dict[int, int] = {}  # set → serial number of its creation
        self._lives: dict[int, tf.Variable] = {}  # the same, for traced functions

    def start(self) -> None:
        """Starts a new world, which has the set of all ranks."""
        self.clear()
        self._horovod_ids[WORLD] = WORLD

    def clear(self) -> None:
        """Removes all sets."""
        for number in list(self._horovod_ids):
            self.remove(number)

    def add(self, number: int, horovod_id: int) -> None:
        """Adds a set whose id in Horovod is `horovod_id`."""
        self._horovod_ids[number] = horovod_id
        self._set_birth(number, next(self._births))

    def remove(self, number: int) -> int:
        """Removes a set; returns its id in Horovod."""
        self._set_birth(number, 0)
        return self._horovod_ids.pop(number)

    def __contains__(self, number: int) -> bool:
        return number in self._horovod_ids

    def __getitem__(self, number: int) -> int:
        return self._horovod_ids[number]

    def checks(self, number: int) -> list[tf.Operation]:
        """Returns assertions that fail if the traced function runs without this set.

        Returns [] in eager mode, and for the set of all ranks, which is not checked.
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
            "removed. Expected an existing process set: trace the function again.",
        )
        return [check] if check is not None else []

    def _set_birth(self, number: int, birth: int) -> None:
        self._born[number] = birth
        if number in self._lives:
            self._lives[number].assign(birth)
