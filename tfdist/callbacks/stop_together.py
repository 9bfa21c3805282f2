"""StopTogether: a stop on one rank stops all ranks at the end of the same step."""

from __future__ import annotations

import logging
from typing import Any

from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._state_sync import wants_to_stop
from tfdist.core import runtime

_logger = logging.getLogger("tfdist")


class StopTogether(RankCallback):
    """Stops all ranks when a callback on any rank sets `model.stop_training`.

    All ranks stop at the end of the same step, or at the end of the same epoch if the
    stop was decided at the end of the epoch. With `steps_per_execution` above 1, a step
    is one execution, as for all callbacks. The cost is one reduction of a single number
    after each step. Without this callback, if a single rank stops, the others wait for
    it in the next step, for up to `TFDIST_TIMEOUT_S` seconds.

    It has to be the last callback in the list on all ranks, so that it runs after the
    decisions of the other callbacks.

    Args:
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: at the start of `fit`: this is not the last callback in the list.
        tfdist.TimeoutError: after a step: the ranks have different numbers of steps.

    Example:
        >>> import keras, tfdist
        >>> callbacks = [keras.callbacks.TerminateOnNaN(),
        ...              tfdist.callbacks.StopTogether()]
    """

    def __init__(self, *, timeout_s: float | None = None) -> None:
        super().__init__()
        self.timeout_s = timeout_s

    @property
    def meets_at_steps(self) -> bool:
        """Returns True, because this callback waits for all ranks after each step."""
        return True

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Stops on all ranks if any rank has asked to stop."""
        super().on_train_batch_end(batch, logs)
        self._ask(f"step {batch + 1} of epoch {self._epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks again, as validation and other callbacks ran in between."""
        self._ask(f"the end of epoch {epoch + 1}")

    def _ask(self, when: str) -> None:
        if runtime.size() == 1:
            return
        was_set = wants_to_stop(self.model)
        wish = runtime.rank() + 1 if was_set else 0
        # The maximum identifies a rank that asked to stop.
        wish = self._largest_of_all(wish, "StopTogether", self.timeout_s)
        if wish and not was_set:
            self.model.stop_training = True
            _logger.info("Training stops at %s, requested by rank %d.", when, wish - 1)
