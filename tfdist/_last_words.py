"""The end of a program: what its exception says, and whether it trained as one job."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

from tfdist import _core


def ours(error: BaseException) -> Exception | None:
    """Our error inside one of TensorFlow, which alone has payloads."""
    if not hasattr(error, "experimental_payloads"):
        return None
    from tfdist import errors

    return errors.from_tf(error)


def interrupted(error: BaseException, reason: str) -> bool:
    """Whether it is Ctrl-C that ends the program, here or on the rank at fault."""
    if isinstance(error, KeyboardInterrupt):
        return True
    # In the middle of a call of TensorFlow it becomes an error that mentions it.
    wrapped = "pybind11::error_already_set" in str(error)
    of_tensorflow = hasattr(error, "experimental_payloads")
    if wrapped or of_tensorflow or isinstance(error, _core.CoreError):
        return "KeyboardInterrupt" in (str(error) if wrapped else reason)
    return False


def blamed(error: BaseException) -> int | None:
    """The rank at fault, when the error is one of ours and names it."""
    payload = error.payload if isinstance(error, _core.CoreError) else {}
    return payload.get("rank", getattr(getattr(error, "record", None), "rank", None))


def unreduced_training(size: int, finished: int) -> str | None:
    """The warning for a program that trained, but reduced no gradients.

    Called at the end of a program in which no tape or optimizer of tfdist has reduced
    anything. Whether it trained is read from Keras's objects.

    Args:
        size: number of ranks.
        finished: operations that this rank has finished. A program that reduces its
            gradients by hand has at least one for each update.

    Returns:
        The text; None if there is nothing to say.
    """
    keras: Any = sys.modules.get("keras")
    if size == 1 or keras is None:
        return None
    updates, was_in_fit = 0, False
    for one in gc.get_objects():
        # Not isinstance, which asks the object itself; a weak proxy raises then.
        if issubclass(type(one), keras.optimizers.Optimizer):
            # The variables of a graph of TensorFlow 1 have no value here.
            with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
                updates = max(updates, int(one.iterations))
        elif issubclass(type(one), keras.Model):
            was_in_fit |= bool(getattr(getattr(one, "history", None), "epoch", None))
    # The optimizer of a model that was loaded has updates of another program.
    trained = updates > 0 and (was_in_fit or finished == 0)
    if not trained or finished >= updates:
        return None
    return (
        f"{size} ranks, and no gradient was reduced: every rank has trained a model of "
        "its own. Write model.compile(optimizer=tfdist.DistributedOptimizer(...), ...)"
        ", or take the gradients from a tfdist.DistributedGradientTape."
    )
