"""Converts Horovod's errors to errors of the core."""

from __future__ import annotations

import re
import time

import tensorflow as tf

from tfdist.core import native

# Horovod fails as soon as a connection ends. Within this time, the cores of the ranks
# agree on the failed rank.
_VERDICT_S = 3.0
_POLL_S = 0.02
# Patterns of Horovod's messages.
_MISMATCH = re.compile(r"Mismatched? .*")
_OURS = re.compile(r"Horovod(?! operation)|\bgloo\b|MPI_\w+ failed|stalled")


def to_core_error(
    error: BaseException, late: native.CoreError | None = None
) -> native.CoreError | None:
    """Converts an error of Horovod to an error of the core; None for other errors.

    Args:
        error: exception raised by an operation, a `tf.function` or `model.fit`.
        late: the error with which this rank itself shut Horovod down, or None.
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error.message)
    found = _MISMATCH.search(text)
    if isinstance(error, tf.errors.FailedPreconditionError) and found:
        cause = re.sub(r"\s*\[Op:.*", "", found.group(0))
        message = f"Horovod reports: {cause}"
        payload = {"kind": "mismatch", "cause": message}
        return native.CoreError(native.FAILED_PRECONDITION, message, payload)
    if not _OURS.search(text):
        return None
    if late is not None:
        return late
    deadline = time.monotonic() + _VERDICT_S
    while time.monotonic() < deadline:
        known = native.failure()
        if known is not None:
            return known
        time.sleep(_POLL_S)
    message = (
        "Horovod was shut down, either by Horovod itself or because a rank left before "
        f"an operation that this rank called. Horovod reports: {_last_line(text)}"
    )
    payload = {"kind": "rank_failed", "cause": message}
    return native.CoreError(native.ABORTED, message, payload)


def _last_line(text: str) -> str:
    """Returns the last line of a TensorFlow error; skips lines about the graph.

    Example:
        >>> _last_line("{{node a}} It is gone. [Op:c]")
        'It is gone.'
    """
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if line and not line.startswith("[[")] or [text]
    return re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:.*", "", reasons[-1])
