"""One iteration of another rank's dataset: read here, sent in blocks.

Elements are collected while they come fast, so that small ones share a message. None is
held back while the next one takes its time: a second thread, which also receives what
the other side has taken, sends what has waited too long.
"""

from __future__ import annotations

import collections
import logging
import re
import threading
import time
from typing import Any

import tensorflow as tf

from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.stream import Stream
from tfdist.data import _element_codec

_log = logging.getLogger("tfdist")
_BLOCK_BYTES = 1 << 20
_BLOCK_ELEMENTS = 256
_MOST_BYTES = (
    _element_codec.MOST_BYTES // 2
)  # of an element; the rest is for its lengths
# An element that took longer is sent at once: it costs more than the message.
_SLOW_S = 1e-3
_HELD_S = 0.02  # longest time for which an element waits for the next one
_ERROR_CHARACTERS = 4000
_TAKEN = {"taken": 1}


def send_all(stream: Stream, iterator: Any, window: int) -> None:
    """Sends all elements, then the end or the error of the dataset.

    Returns when the other side has hung up.

    Args:
        stream: to the rank that iterates.
        iterator: over its dataset.
        window: bytes that it receives ahead of need.
    """
    sender = _Sender(stream, window)
    try:
        _read_all(iterator, sender)
        sender.finish({"end": True})
    except (OSError, AuthenticationError) as error:
        _log.debug("an iteration ended: %s", error)
    except Exception as error:
        sender.finish(described(error))
    finally:
        # Who is first to close may cut off its own last words.
        sender.wait_for_the_end()


def described(error: Exception) -> dict[str, Any]:
    """An error as a message, without the names that TensorFlow gives to nodes."""
    text = str(getattr(error, "message", "") or error)
    text = re.sub(r"\{\{function_node [^}]*\}\} ?", "", text)
    text = text.partition(" [Op:")[0].strip()
    return {"error": text[:_ERROR_CHARACTERS], "class": type(error).__name__}


def _read_all(iterator: Any, sender: _Sender) -> None:
    types, shapes = iterator._flat_output_types, iterator._flat_output_shapes
    handle = iterator._iterator_resource
    while True:
        started = time.monotonic()
        try:
            # What next(iterator) does, without the 0.1 ms that it takes beside that.
            tensors = tf.raw_ops.IteratorGetNext(
                iterator=handle, output_types=types, output_shapes=shapes
            )
        except tf.errors.OutOfRangeError:
            return
        slow = time.monotonic() - started > _SLOW_S
        sender.add([one.numpy() for one in tensors], at_once=slow)


class _Sender:
    """Sends blocks, as many ahead as the other side has room for."""

    def __init__(self, stream: Stream, window: int) -> None:
        self._stream = stream
        self._window = window
        self._changed = threading.Condition()  # guards what follows, and sending
        self._block: list[list[Any]] = []
        self._shapes: list[tuple[int, ...]] = []
        self._bytes = 0
        self._since = 0.0  # when the first element of the block came
        self._ahead: collections.deque[int] = collections.deque()
        self._over: Exception | None = None  # why the other side is gone
        self._thread = threading.Thread(
            target=self._listen, name="tfdist-reading-acknowledged", daemon=True
        )
        self._thread.start()

    def add(self, element: list[Any], *, at_once: bool) -> None:
        """Takes an element; waits while there is no room.

        Raises:
            OSError, AuthenticationError: the other side is gone.
            ValueError: the element is too large for a block.
        """
        shapes = _element_codec.shapes_of(element)
        size = sum(map(_element_codec.bytes_of, element))
        if size > _MOST_BYTES:
            raise ValueError(
                f"Expected elements of at most {_MOST_BYTES} bytes, got one of {size}."
            )
        with self._changed:
            if shapes != self._shapes:
                self._flush()
                self._shapes = shapes
            if not self._block:
                self._since = time.monotonic()
            self._block.append(element)
            self._bytes += size
            full = self._bytes >= _BLOCK_BYTES or len(self._block) >= _BLOCK_ELEMENTS
            if at_once or full:
                self._flush()

    def finish(self, last: dict[str, Any]) -> None:
        """Sends what is left, and a last message."""
        with self._changed:
            try:
                self._flush()
                self._stream.send(last)
            except (OSError, AuthenticationError) as error:
                _log.debug("an iteration ended: %s", error)

    def wait_for_the_end(self) -> None:
        """Waits until the other side hangs up."""
        self._thread.join()

    def _has_room(self) -> bool:
        return sum(self._ahead) < self._window

    def _flush(self) -> None:
        while self._block and self._over is None and not self._has_room():
            self._changed.wait()  # meanwhile the other thread may send the block
        if self._over is not None:
            raise self._over
        if self._block:
            description, parts = _element_codec.encode(self._block)
            self._block, self._bytes = [], 0
            self._ahead.append(_element_codec.charge(description))
            self._stream.send(description, parts)

    def _listen(self) -> None:
        """The second thread, until the connection ends."""
        try:
            while True:
                taken = self._stream.waits(_HELD_S)
                if taken and (self._stream.receive() != _TAKEN or not self._ahead):
                    raise AuthenticationError("a message that does not belong here")
                with self._changed:
                    if taken:
                        self._ahead.popleft()
                        self._changed.notify_all()
                    held_s = time.monotonic() - self._since
                    if self._block and held_s > _HELD_S and self._has_room():
                        self._flush()
        except (OSError, AuthenticationError) as error:
            with self._changed:
                self._over = error
                self._changed.notify_all()
