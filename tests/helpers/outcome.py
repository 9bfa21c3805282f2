"""What a call ended with, as a value that a worker can return."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import errors

FORBIDDEN = (tf.errors.UnavailableError, tf.errors.OutOfRangeError)


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Class, message, record and seconds of the error that `call` raises."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        seconds = time.monotonic() - begin
        assert not isinstance(error, FORBIDDEN), error
        ours = errors.from_tf(error)
        record = vars(ours.record) if ours is not None else {}
        return {
            "class": type(ours or error).__name__,
            "raised": type(error).__name__,
            "message": ours.message if ours is not None else str(error),
            "record": record,
            "seconds": seconds,
        }
    return {"class": "none", "seconds": time.monotonic() - begin}
