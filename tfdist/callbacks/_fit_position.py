"""The position of an elastic `fit` in the training data."""

from __future__ import annotations

from typing import NamedTuple

import keras

from tfdist.callbacks.progress import Progress


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


def announce_steps(
    callbacks: keras.callbacks.CallbackList, steps: int, step_size: int
) -> None:
    """Tells the callbacks in `fit` how many steps the current epoch has.

    Args:
        callbacks: the callback list of `fit`.
        steps: number of steps.
        step_size: samples of all ranks in one step.
    """
    callbacks.set_params({**callbacks.params, "steps": steps})
    for callback in callbacks.callbacks:
        if isinstance(callback, Progress) and callback.global_batch:
            callback.global_batch = step_size
        bar = getattr(callback, "progbar", None)  # of a ProgbarLogger, in an epoch
        if bar is not None:
            bar.target = steps
