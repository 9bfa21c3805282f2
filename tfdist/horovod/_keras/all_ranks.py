"""Horovod's callbacks are of all ranks, whatever the optimizer's process set."""

from __future__ import annotations

from typing import Any

from tfdist.horovod.tensorflow.gradients import is_outside


class OfAllRanks:
    """Mixin before a callback of tfdist's, which is of the ranks that train together.

    So a script may call `fit` on a rank outside of the set as well, as with Horovod.
    """

    # Of the callback.
    model: Any

    @property
    def _ranks(self) -> None:
        return None

    def _has_reduced(self) -> bool:
        """Whether gradients were reduced, or this rank's are not to be."""
        options = getattr(self.model.optimizer, "tfdist_options", None)
        if options is not None and is_outside(options):
            return True
        return bool(super()._has_reduced())  # type: ignore[misc]
