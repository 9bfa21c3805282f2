"""Checks that an aborted step has not updated only some of the weights."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

from tfdist.core import engines, native, runtime

_logger = logging.getLogger("tfdist")
_uses_snapshot = contextvars.ContextVar("tfdist_uses_snapshot", default=False)


def note_between_steps(is_between: bool = True) -> None:
    """Records whether the weights are those of a completed step of elastic training.

    They then are not torn, even if a rank is lost.

    Args:
        is_between: False if a step has begun, or if the training has ended.
    """
    runtime.state.is_between_steps = is_between


@contextlib.contextmanager
def using_snapshot() -> Iterator[None]:
    """Disables `check_not_torn` in this thread while it reads weights of a snapshot."""
    token = _uses_snapshot.set(True)
    try:
        yield
    finally:
        _uses_snapshot.reset(token)


def check_not_torn() -> None:
    """Raises if an aborted step may have changed only some of the weights.

    With `TFDIST_ATOMIC_STEPS=1`, the weights are not torn if the surviving ranks have
    agreed on the failed rank: each of them has the weights after the committed step.

    Raises:
        RuntimeError: the message names the last good step and the failure.
    """
    if _uses_snapshot.get():
        return
    failure = native.failure()
    if failure is None or runtime.state.is_between_steps:
        return
    committed = failure.payload.get("committed_step")
    if committed is not None:
        _logger.info(
            "The weights are not torn: they are the weights after step %d.", committed
        )
        return
    good = ""
    if engines.chosen() is None:  # the core does not see steps of other engines
        good = (
            f"The last good step is {native.good_steps()}, counted from tfdist.init()."
        )
    raise RuntimeError(
        "The weights are torn: a step was aborted when some variables may already "
        f"have been updated ({failure.message}). {good} Saving is refused: go back "
        "to the last checkpoint."
    )
