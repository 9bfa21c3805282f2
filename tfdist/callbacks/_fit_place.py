"""Places: points in the course of `fit`, ordered by time."""

from __future__ import annotations

from typing import NamedTuple

EPOCH_BEGIN, STEPS, VALIDATION, EPOCH_END = range(4)  # parts of an epoch
BEFORE, STEP, AFTER = range(3)  # the hooks before a step, the step, the hooks after it
_END_OF_FIT = 1 << 40  # larger than any epoch


class Place(NamedTuple):
    """A point in the course of `fit`; later points compare greater than earlier ones.

    It is a training step, a validation, or the call of one callback's hook.

    Attributes:
        epoch: index of the epoch, from 0; at the end of `fit`, a number larger than any
            epoch.
        part: part of the epoch: EPOCH_BEGIN, STEPS, VALIDATION or EPOCH_END.
        step: index of the first batch of the step; 0 unless `part` is STEPS.
        moment: BEFORE (`on_train_batch_begin`), STEP, or AFTER (`on_train_batch_end`);
            0 unless `part` is STEPS.
        callback: index of the callback in the list; 0 for a step or a validation.
    """

    epoch: int
    part: int
    step: int
    moment: int
    callback: int

    @property
    def is_of_step(self) -> bool:
        """Whether the place is a step, or a hook before or after a step."""
        return self.part == STEPS

    def batches_done(self, per_step: int) -> int:
        """Returns how many batches of the epoch were used before this place.

        Args:
            per_step: batches in a step (`steps_per_execution`).

        Example:
            >>> from tfdist.callbacks._fit_place import place_of_hook, place_of_step
            >>> place_of_step(1, 4).batches_done(2)
            4
            >>> place_of_hook("on_train_batch_end", 1, 4, 0).batches_done(2)
            6
        """
        return self.step + (per_step if self.moment == AFTER else 0)


def place_of_step(epoch: int, step: int) -> Place:
    """Returns the place of a step.

    Example:
        >>> from tfdist.callbacks._fit_place import place_of_hook, place_of_step
        >>> place_of_step(1, 4) < place_of_hook("on_train_batch_end", 1, 4, 0)
        True
    """
    return Place(epoch, STEPS, step, STEP, 0)


def place_of_validation(epoch: int) -> Place:
    """Returns the place of the validation of an epoch.

    Example:
        >>> from tfdist.callbacks._fit_place import place_of_step, place_of_validation
        >>> place_of_step(1, 4) < place_of_validation(1) < place_of_step(2, 0)
        True
    """
    return Place(epoch, VALIDATION, 0, 0, 0)


def place_of_hook(hook: str, epoch: int, step: int, callback: int) -> Place:
    """Returns the place at which a hook of one callback is called.

    Args:
        hook: name of the hook.
        epoch: index of the current epoch; ignored for `on_train_end`.
        step: index of the first batch of the current step; used only for the hooks of
            a step.
        callback: index of the callback in the list.

    Example:
        >>> from tfdist.callbacks._fit_place import place_of_hook
        >>> hooks = ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
        ...          "on_epoch_end", "on_train_end"]
        >>> places = [place_of_hook(hook, 3, 7, 1) for hook in hooks]
        >>> places == sorted(places)
        True
    """
    if hook == "on_train_end":
        return Place(_END_OF_FIT, EPOCH_BEGIN, 0, 0, callback)
    if hook == "on_train_batch_begin":
        return Place(epoch, STEPS, step, BEFORE, callback)
    if hook == "on_train_batch_end":
        return Place(epoch, STEPS, step, AFTER, callback)
    part = EPOCH_BEGIN if hook == "on_epoch_begin" else EPOCH_END
    return Place(epoch, part, 0, 0, callback)
