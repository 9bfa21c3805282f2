"""Horovod's callbacks over tfdist's, but for those that set the learning rate."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np

from tfdist.callbacks import BroadcastInitialState, MetricAverage
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks.metric_average import exchange_logs
from tfdist.collectives.local_variables import identity, is_variable
from tfdist.collectives.per_rank_variables import declare
from tfdist.core import runtime
from tfdist.horovod._keras.all_ranks import OfAllRanks
from tfdist.horovod._warnings import warn_unused_device
from tfdist.training.metric_states import check_metrics
from tfdist.training.model_optimizers import optimizers_of, slots_of

_logger = logging.getLogger("tfdist")


class BroadcastGlobalVariablesCallback(OfAllRanks, BroadcastInitialState):
    """Sends the model's weights and the optimizer's state of one rank to all.

    Before the first step. (Horovod sends after it, so its first step is one of
    different weights.) Also to ranks outside of the optimizer's process set. Random
    numbers of layers are drawn from another stream on each rank; see
    `tfdist.callbacks.BroadcastInitialState`.

    Args:
        root_rank: rank whose state all others take.
        device: has no meaning here; a warning says so.
        local_variables: a variable or several that each rank keeps as they are, and
            what the optimizer holds for them.

    Raises:
        ValueError: something in `local_variables` is no variable; at the start of
            `fit`, if the model's optimizer does not reduce gradients.
        tfdist.MismatchError: at the start of `fit`, if the ranks' variables differ.

    Example:
        >>> import tfdist.horovod.keras as hvd
        >>> callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None
    ) -> None:
        super().__init__(root_rank)
        warn_unused_device("device", device)
        self.root_rank = root_rank
        self._local: list[Any] = []
        if local_variables is not None:
            single = is_variable(local_variables)
            listed = [local_variables] if single else local_variables
            for one in listed:
                self.register_local_var(one)

    def register_local_var(self, var: Any) -> None:
        """Lets each rank keep its own value of a variable.

        Raises:
            ValueError: it is no variable.
        """
        if not is_variable(var):
            raise ValueError(
                "All local variables must be variables of Keras or TensorFlow, got "
                f"{type(var).__name__}: {var!r}."
            )
        self._local.append(var)
        declare([var])

    def _variables(self) -> list[Any]:
        everything = super()._variables()
        if not self._local:
            return everything
        kept = {identity(v) for v in self._local}
        for optimizer in optimizers_of(self.model):
            kept |= {identity(v) for v in slots_of(optimizer, kept)}
        return [v for v in everything if identity(v) not in kept]


class MetricAverageCallback(OfAllRanks, MetricAverage):
    """Replaces the epoch's metrics by those of all ranks together.

    Every sample counts alike, and a metric that is no mean is that of all the data;
    see `tfdist.callbacks.MetricAverage`. (Horovod takes the mean of the ranks'
    numbers.) If a metric of the user's own does not say how it is combined, all
    metrics are the means of the ranks' numbers, as in Horovod, and a warning says so.
    In `evaluate`, where Horovod's does nothing, they then stay those of each rank.

    Args:
        device: has no meaning here; a warning says so.

    Raises:
        tfdist.MismatchError: at the end of an epoch, if the ranks' logs have
            different names.

    Example:
        >>> import keras
        >>> import tfdist.horovod.keras as hvd
        >>> callbacks = [hvd.callbacks.MetricAverageCallback(),
        ...              keras.callbacks.ReduceLROnPlateau()]
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        warn_unused_device("device", device)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Looks whether the metrics can be combined exactly."""
        RankCallback.on_train_begin(self, logs)
        self._look_at_metrics("of the epoch are the plain means of the ranks' numbers")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """As there; in `evaluate` those that cannot be combined stay each rank's."""
        if not self._in_epoch:
            self._look_at_metrics("of model.evaluate stay those of each rank")
            if not self._combines_states:
                return
        super().on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Combines them at the last step of `evaluate`."""
        if self._combines_states:
            super().on_test_batch_end(batch, logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Looks whether that step came."""
        if self._combines_states:
            super().on_test_end(logs)

    def _look_at_metrics(self, otherwise: str) -> None:
        self._combines_states = True
        try:
            check_metrics(self.model)
        except ValueError as error:
            self._combines_states = False
            if runtime.rank() == 0:
                _logger.warning(
                    "MetricAverageCallback: the metrics %s. %s", otherwise, error
                )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in `logs`."""
        if self._combines_states:
            super().on_epoch_end(epoch, logs)
            return
        self._in_epoch = False
        if logs is None:
            return
        shared = exchange_logs(logs, {}, self._ranks)
        for key in shared[0]["numbers"]:
            logs[key] = float(np.mean([own["numbers"][key] for own in shared]))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far to a file that is named later.

    Args:
        monitor: what is compared; default "val_loss".
        verbose: 0 or 1.
        save_weights_only: whether only weights are saved.
        mode: "auto", "min" or "max".
        save_freq: "epoch", or a number of batches.

    Set `filepath` before `fit`, on one rank (`if hvd.rank() == 0:`): a name that ends
    in ".keras" or ".h5", or in ".weights.h5" for weights.

    Raises:
        ValueError: at the start of `fit`, if there is no `filepath`.

    Example:
        >>> import tfdist.horovod.keras as hvd
        >>> best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        >>> best.filepath = "best.keras"
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath="unnamed.weights.h5" if save_weights_only else "unnamed.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses to train without a place to save to."""
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file to write to. Set its filepath before "
                "fit, e.g. checkpoint.filepath = 'best.keras'."
            )
