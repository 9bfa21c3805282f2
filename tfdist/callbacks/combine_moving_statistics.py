"""CombineMovingStatistics: batch normalization statistics of all ranks' data."""

from __future__ import annotations

from typing import Any

from tfdist.callbacks._base import RankCallback
from tfdist.core.process_sets import ProcessSet
from tfdist.layers.statistics import combine_at


class CombineMovingStatistics(RankCallback):
    """Combines the moving statistics of batch normalization over the ranks.

    This callback calls `tfdist.layers.combine_moving_statistics` at the end of every
    epoch and before every evaluation, in `fit` and in `model.evaluate(...,
    callbacks=[CombineMovingStatistics()])`. All ranks therefore evaluate and save the
    same model. Training is not affected, see `combine_moving_statistics`.

    Put it before callbacks that save or evaluate the model, such as
    `keras.callbacks.ModelCheckpoint`; it may come before or after `MetricAverage`.
    `tfdist.callbacks.Checkpoint` combines statistics before each save, also within
    epochs. With `SyncBatchNormalization` the statistics are already equal.

    Args:
        weight: weight of this rank's data, for example its batch size if batch sizes
            differ between ranks; default 1.0, the same for all ranks.
        process_set: the ranks that take part; only these ranks use the callback.
            Default: the ranks that train the model.

    Raises:
        ValueError: at the first use: a rank's weight is negative or not finite, or all
            weights are 0. All ranks raise it.
        tfdist.MismatchError: at the first use: the ranks' layers differ, or only some
            ranks validate. All ranks raise it.

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
