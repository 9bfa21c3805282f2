"""Horovod's callbacks, based on tfdist's, except those for the learning rate."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import keras
import numpy as np

from tfdist import errors
from tfdist.callbacks import BroadcastInitialState, MetricAverage
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks.metric_average import as_number, exchange_logs
from tfdist.collectives.local_variables import identity, is_variable
from tfdist.collectives.objects import gather_from_all
from tfdist.collectives.per_rank_variables import declare
from tfdist.core import runtime
from tfdist.horovod._keras.all_ranks import OfAllRanks, trains_in_subset
from tfdist.horovod._warnings import warn_unused_device
from tfdist.training.metric_states import check_metrics
from tfdist.training.model_optimizers import optimizers_of, slots_of

_logger = logging.getLogger("tfdist")
# Models that a BroadcastGlobalVariablesCallback has broadcast.
_sent: weakref.WeakSet[keras.Model] = weakref.WeakSet()


class BroadcastGlobalVariablesCallback(OfAllRanks, BroadcastInitialState):
    """Broadcasts the model's weights and the optimizer's state from one rank to all.

    The broadcast takes place before the first step. (Horovod broadcasts after the first
    step, in which the weights still differ.) Ranks outside the optimizer's process set
    are included, but only in the first `fit` of a model: afterwards the ranks of a set
    have trained a model of their own, and nothing is broadcast. Layers draw different
    random numbers on each rank; see `tfdist.callbacks.BroadcastInitialState`.

    Args:
        root_rank: rank that sends its state to all other ranks.
        device: ignored, with a warning.
        local_variables: a variable or a list of variables that keep their own values on
            each rank, together with their optimizer state.

    Raises:
        ValueError: an entry of `local_variables` is not a variable; or, at the start of
            `fit`, the model's optimizer does not reduce gradients.
        tfdist.MismatchError: at the start of `fit`, the paths, shapes or dtypes of the
            ranks' variables, or the state of their preprocessing layers, differ; or
            it is the first `fit` of a model on some ranks only, in process sets.

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
        """Excludes a variable from the broadcast: each rank keeps its own value.

        Raises:
            ValueError: `var` is not a variable.
        """
        if not is_variable(var):
            raise ValueError(
                "All local variables must be variables of Keras or TensorFlow, got "
                f"{type(var).__name__}: {var!r}."
            )
        self._local.append(var)
        declare([var])

    def _broadcast(self, why_unbuilt: Exception | None = None) -> None:
        name = type(self).__name__
        own = self.model in _sent and trains_in_subset(self.model)
        shared = gather_from_all(own, name, name=f"{name} at the start of fit")
        if len(set(shared)) > 1:
            again = [rank for rank, before in enumerate(shared) if before]
            raise errors.MismatchError(
                f"{name} expected either the first fit of a model on every rank or a "
                f"later one on every rank, but the models of ranks {again} alone were "
                "broadcast before. Train new models on all ranks, or broadcast within "
                "a set with hvd.broadcast_variables(..., process_set=...)."
            )
        if not own:
            super()._broadcast(why_unbuilt)
            _sent.add(self.model)

    def _variables(self) -> list[Any]:
        everything = super()._variables()
        if not self._local:
            return everything
        kept = {identity(v) for v in self._local}
        for optimizer in optimizers_of(self.model):
            kept |= {identity(v) for v in slots_of(optimizer, kept)}
        return [v for v in everything if identity(v) not in kept]


class MetricAverageCallback(OfAllRanks, MetricAverage):
    """Replaces the epoch's metrics with metrics over the data of all ranks.

    Each sample has the same weight, and a metric that is not a mean is computed from
    the data of all ranks; see `tfdist.callbacks.MetricAverage`. (Horovod averages the
    ranks' results.) In `evaluate`, where Horovod's callback does nothing, the metrics
    are combined in the same way.

    If a custom metric does not define how its states are combined, a warning is logged.
    All metrics of the epoch are then the means of the ranks' results, as in Horovod,
    and `evaluate` returns each rank's own metrics.

    Args:
        device: ignored, with a warning.

    Raises:
        tfdist.MismatchError: at the end of an epoch, the ranks' logs have different
            names.
        ValueError: at the end of an epoch, an earlier callback has changed the metrics
            or the logs.
        NotImplementedError: in `evaluate`, as in `tfdist.callbacks.MetricAverage`.

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
        """Checks whether the metrics can be combined exactly."""
        RankCallback.on_train_begin(self, logs)
        self._look_at_metrics("of the epoch are the plain means of the ranks' numbers")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks in `evaluate` whether the metrics can be combined exactly."""
        if not self._in_epoch:
            self._look_at_metrics("of model.evaluate remain each rank's own")
            if not self._combines_states:
                return
        super().on_test_begin(logs)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Combines the metrics at the last step of `evaluate`."""
        if self._combines_states:
            super().on_test_batch_end(batch, logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks in `evaluate` that the metrics were combined at the last step."""
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
        for key, value in logs.items():
            if as_number(value) is not None:
                values = [own["numbers"].get(key, np.nan) for own in shared]
                if len(set(values)) > 1:  # else an integer stays one
                    logs[key] = float(np.mean(values))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far to a file whose name is set after construction.

    Set `filepath` before `fit`, on one rank (`if hvd.rank() == 0:`). The name must end
    in ".keras" or ".h5", or in ".weights.h5" if only the weights are saved.

    Args:
        monitor: name of the metric to compare; default "val_loss".
        verbose: 0 or 1.
        save_weights_only: whether to save only the weights.
        mode: "auto", "min" or "max".
        save_freq: "epoch", or a number of batches.

    Raises:
        ValueError: at the start of `fit`, `filepath` is not set.

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
        """Raises ValueError if `filepath` is not set."""
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file to write to. Set its filepath before "
                "fit, e.g. checkpoint.filepath = 'best.keras'."
            )
