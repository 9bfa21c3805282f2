"""Horovod's elastic state and callbacks for Keras; see `common.elastic`."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """State of a Keras model, its optimizer, and plain values as attributes.

    Args:
        model: a built model.
        optimizer: the optimizer, which is built if necessary; default: the model's.
        **kwargs: name and initial value of each attribute, e.g. `epoch=0, batch=0`.

    Raises:
        ValueError: the model is not built.

    Example:
        >>> import keras
        >>> import tfdist.horovod.keras as hvd
        >>> hvd.init()
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> state = hvd.elastic.KerasState(model, epoch=0)
        >>> state.epoch = 3
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(
        self, model: keras.Model, optimizer: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
    """Calls `state.commit()` after a number of batches, and after each epoch.

    In an elastic job, `commit` may interrupt `fit` with a `HostsUpdatedInterrupt`,
    which `hvd.elastic.run` handles.

    Args:
        state: an elastic state.
        batches_per_commit: number of batches per commit; default 1. A commit copies
            all weights.

    Raises:
        ValueError: `batches_per_commit` is below 1.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(
                "Expected batches_per_commit to be at least 1, got "
                f"{batches_per_commit}."
            )
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the number of batches until the next commit."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Commits after every `batches_per_commit` batches."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits changes made since the last batch, such as the epoch number."""
        self.commit()

    def commit(self) -> None:
        """Commits the state now, and restarts the count of batches."""
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the batch index after each batch, and to 0 after an epoch.

    Put it before `CommitStateCallback` in the list.

    Args:
        state: an elastic state with the attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Records the batch index."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the batch index for the next epoch."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of completed epochs, at the end of each epoch.

    The epochs of `fit`, which must start at 0 as in
    `model.fit(..., epochs=EPOCHS - state.epoch)`, are added to the value of
    `state.epoch` at the start of `fit`. Put this callback before `CommitStateCallback`
    in the list.

    Args:
        state: an elastic state with the attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch from which `fit` continues."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the number of completed epochs."""
        self.state.epoch = self.initial_epoch + epoch + 1
