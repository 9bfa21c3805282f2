"""Makes callbacks cover all ranks, as in Horovod, whatever the process set."""

from __future__ import annotations

from typing import Any

from tfdist.horovod.tensorflow.gradients import is_outside


class OfAllRanks:
    """Mixin for a tfdist callback; alone, it covers only the ranks that train together.

    It lets a script call `fit` on a rank outside of the process set too, as in Horovod.
    """

    # Attributes of the callback.
    model: Any

    @property
    def _ranks(self) -> None:
        return None

    def _has_reduced(self) -> bool:
        """Returns whether gradients were reduced, or must not be on this rank."""
        options = getattr(self.model.optimizer, "tfdist_options", None)
        if options is not None and is_outside(options):
            return True
        return bool(super()._has_reduced())  # type: ignore[misc]
