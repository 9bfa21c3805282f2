"""Mixin for callbacks that include all ranks, regardless of the process set."""

from __future__ import annotations

from typing import Any

from tfdist.horovod.tensorflow.gradients import is_outside


class OfAllRanks:
    """Mixin that makes a tfdist callback include all ranks of the job.

    Without this mixin, the callback includes only the optimizer's process set. With it,
    a script can also call `fit` on ranks outside the process set, as in Horovod.
    """

    # Attributes of the callback.
    model: Any

    @property
    def _ranks(self) -> None:
        return None

    def _has_reduced(self) -> bool:
        """Returns whether gradients were reduced; True outside the process set."""
        options = getattr(self.model.optimizer, "tfdist_options", None)
        if options is not None and is_outside(options):
            return True
        return bool(super()._has_reduced())  # type: ignore[misc]
