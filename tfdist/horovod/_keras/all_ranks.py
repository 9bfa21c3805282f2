"""The ranks of Horovod's callbacks, which may also run outside the process set."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.callbacks._rank_comparison import process_set_of
from tfdist.core import runtime
from tfdist.core.process_sets import members_of


def trains_in_subset(model: keras.Model) -> bool:
    """Returns whether the optimizer's process set does not contain all ranks."""
    return len(members_of(process_set_of(model))) < runtime.size()


class MayBeOutside:
    """Mixin for a tfdist callback that may run outside the optimizer's process set.

    On such a rank, no gradients are reduced.
    """

    # Attributes of the callback.
    model: Any
    _trains_here: bool

    def _has_reduced(self) -> bool:
        """Returns whether gradients were reduced; True outside the process set."""
        return not self._trains_here or bool(super()._has_reduced())  # type: ignore[misc]


class OfAllRanks(MayBeOutside):
    """Mixin that makes a tfdist callback include all ranks of the job.

    Without this mixin, the callback includes only the optimizer's process set. With it,
    a script can also call `fit` on ranks outside the process set, as in Horovod.
    """

    @property
    def _ranks(self) -> None:
        return None
