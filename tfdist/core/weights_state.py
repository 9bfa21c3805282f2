"""Checks that an aborted step has not updated only some of the weights."""

from __future__ import annotations

import logging

from tfdist.core import engines, native, runtime

_logger = logging.getLogger("tfdist")


def note_restored() -> None:
    """Records that the weights are those of a commit, although a rank has failed."""
    runtime.state.was_restored = True


def check_not_torn() -> None:
    """Raises if an aborted step may have changed only some of the weights.

    With `TFDIST_ATOMIC_STEPS=1` and a decision of the ranks, no step is torn: the
    weights are those after the committed step, on every surviving rank.

    Raises:
        RuntimeError: the message names the last good step and the failure.
    """
    failure = native.failure()
    if failure is None or runtime.state.was_restored:
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
