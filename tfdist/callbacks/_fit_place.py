"""Places in a `fit`, in the order in which it reaches them."""

from __future__ import annotations

from typing import NamedTuple

EPOCH_BEGIN, STEPS, VALIDATION, EPOCH_END = range(4)  # parts of an epoch
BEFORE, STEP, AFTER = range(3)  # moments of a step
_END_OF_FIT = 1 << 40  # larger than any epoch


class Place(NamedTuple):
    """A step, a validation, or one callback's call of a hook. Later ones are larger.

    Attributes:
        epoch: counted from 0; very large at the end of `fit`.
        part: part of the epoch.
        step: number of the first batch of the step; 0 outside of the steps.
        moment: moment of the step; 0 outside of the steps.
        callback: position of the callback in the list; 0 if it is no hook.
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
    """Returns the place of a callback's call of a hook.

    Args:
        hook: name of the hook.
        epoch: current epoch, ignored by `on_train_end`.
        step: first batch of the current step, ignored outside of the steps.
        callback: position of the callback in the list.

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
