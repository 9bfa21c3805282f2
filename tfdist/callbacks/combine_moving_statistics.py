"""CombineMovingStatistics: batch-normalisation statistics of all ranks' data."""

from __future__ import annotations

from typing import Any

from tfdist.callbacks._base import RankCallback
from tfdist.core.process_sets import ProcessSet
from tfdist.layers.statistics import combine_at


class CombineMovingStatistics(RankCallback):
    """Combines the moving statistics of batch normalisation over the ranks.

    It calls `tfdist.layers.combine_moving_statistics` before an evaluation, in `fit`
    and in `model.evaluate(..., callbacks=[CombineMovingStatistics()])`, and at the end
    of every epoch. So all ranks evaluate and save the same model. Training itself is
    unaffected (see that function).

    Put it before callbacks that save or evaluate the model, such as
    `keras.callbacks.ModelCheckpoint`; its order with `MetricAverage` does not matter.
    `tfdist.callbacks.Checkpoint` combines the statistics that it saves itself, also
    between epochs. With `SyncBatchNormalization` the statistics are equal already.

    Args:
        weight: weight of this rank's data, for example its batch size if batch sizes
            differ between ranks; default 1.0, the same for all.
        process_set: the ranks that take part; only these use it; default: those that
            train the model.

    Raises:
        ValueError: at the first use, on all ranks: a rank's weight is not finite or
            negative, or all are 0.
        tfdist.MismatchError: likewise: the ranks' layers differ, or only some of the
            ranks validate.

    Example:
        >>> import keras, tfdist
        >>> callbacks = [tfdist.callbacks.CombineMovingStatistics(),
        ...              tfdist.callbacks.MetricAverage(),
        ...              tfdist.callbacks.Checkpoint("best.keras",
        ...                                          save_best_only=True)]
    """

    def __init__(
        self, *, weight: float = 1.0, process_set: ProcessSet | None = None
    ) -> None:
        super().__init__()
        self.weight = weight
        self.process_set = process_set

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Combines the statistics before an evaluation."""
        self._combine("before an evaluation")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Combines the statistics before a save."""
        self._combine("at the end of an epoch")

    def _combine(self, where: str) -> None:
        ranks = self.process_set or self._ranks
        combine_at(where, self.model, self.weight, ranks)
