"""What an exception that ends the program says to the other ranks: pure functions."""

from __future__ import annotations

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
