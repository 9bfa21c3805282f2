"""The position of an elastic `fit` in the training data, and its batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.callbacks._fit_place import Place, place_of_validation
from tfdist.callbacks.progress import Progress
from tfdist.core import runtime
from tfdist.data._global_batches import Source


class FitPosition(NamedTuple):
    """The progress of `fit`, equal on all ranks before a step.

    Attributes:
        calls: number of completed calls of the train function.
        samples: number of samples of the epoch that were used or skipped.
    """

    calls: int
    samples: int

    def after_call(self, total: int, step_size: int, per_call: int) -> FitPosition:
        """Returns the position after the next call of the train function.

        Args:
            total: number of samples of an epoch.
            step_size: samples of all ranks in one step.
            per_call: steps of a call (`steps_per_execution`); there may be fewer at the
                end of an epoch.

        Returns:
            The position. `calls` is unchanged if too few samples are left for a step.
            `samples` is `total` if too few samples are left for another step.

        Example:
            >>> from tfdist.callbacks._fit_position import FitPosition
            >>> FitPosition(0, 0).after_call(10, 4, 1)
            FitPosition(calls=1, samples=4)
            >>> FitPosition(1, 4).after_call(10, 4, 2)
            FitPosition(calls=2, samples=10)
            >>> FitPosition(1, 4).after_call(10, 8, 1)
            FitPosition(calls=1, samples=10)
        """
        left = (total - self.samples) // step_size
        done = min(left, per_call)
        samples = self.samples + done * step_size if left > done else total
        return FitPosition(self.calls + (done > 0), samples)


class FitBatches:
    """The batches of an elastic `fit`, which depend on the epoch and on the ranks.

    Args:
        callbacks: the callback list of `fit`.
        source: the batches, from `tfdist.data.global_batches`.
        step_size: variable that traced functions read: samples in a step, and ranks.
    """

    def __init__(
        self,
        callbacks: keras.callbacks.CallbackList,
        source: Source,
        step_size: tf.Variable,
    ) -> None:
        self._list = callbacks
        self._source = source
        self._step_size = step_size
        self._iterator: Any = None  # for the current ranks, if they have changed
        self._needs_iterator = False
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Sets the epoch."""
        self._epoch = epoch
        # The dataset that `fit` reads asserts a fixed number of steps.
        self._iterator, self._needs_iterator = None, self._source.steps_vary
        self.set_step_size()

    def set_step_size(self) -> None:
        """Sets the variable to the values for the current ranks."""
        size = runtime.size()
        self._step_size.assign([self._source.step_size(self._epoch, size), size])

    def renew(self) -> None:
        """Gives the next step an iterator for the current ranks and its position."""
        self._needs_iterator = True

    def iterator(self, samples: int, iterator: Any) -> Any:
        """Returns the iterator for a step.

        Args:
            samples: number of samples of the epoch that were used before the step.
            iterator: the iterator of Keras, which is returned if nothing has changed.
        """
        if self._needs_iterator:
            self._source.seek(self._epoch, samples)
            self._iterator = iter(self._source.dataset)
            self._needs_iterator = False
        return self._iterator or iterator

    def after_step(self, position: FitPosition) -> FitPosition:
        """Returns the position after the step that begins at a position."""
        return position.after_call(
            self._source.total,
            self._source.step_size(self._epoch, runtime.size()),
            self._list.model.steps_per_execution,
        )

    def announce_steps(self, place: Place, samples: int) -> None:
        """Tells the callbacks the number of steps, if it may differ between epochs.

        Args:
            place: the place of this rank in `fit`.
            samples: number of samples of the epoch that were used.
        """
        source, size = self._source, runtime.size()
        if not source.steps_vary or place >= place_of_validation(self._epoch):
            return
        done = place.batches_done(self._list.model.steps_per_execution)
        steps = done + source.steps_left(self._epoch, samples, size)
        self._list.set_params({**self._list.params, "steps": steps})
        for callback in self._list.callbacks:
            if isinstance(callback, Progress) and callback.global_batch:
                callback.global_batch = source.step_size(self._epoch, size)
            bar = getattr(callback, "progbar", None)  # of a ProgbarLogger, in an epoch
            if bar is not None:
                bar.target = steps
