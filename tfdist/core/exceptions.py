"""The error classes of `tfdist.errors`, and the conversion of core errors to them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import tensorflow as tf

from tfdist.core import engines, failed_rank
from tfdist.core.native import CoreError

_PAYLOAD = "tfdist.error"


@dataclasses.dataclass(frozen=True)
class ErrorRecord:
    """The machine-readable part of an error.

    Attributes:
        kind: "mismatch", "rank_failed", "shutdown", "evicted", "no_majority",
            "threads", "timeout", "not_initialized", "cancelled", "invalid_argument"
            or "internal".
        rank: rank at fault, or None.
        host: host of the rank at fault; "" if unknown.
        pid: process id of the rank at fault; None if unknown.
        tensor: name of the tensor or gradient list concerned, or "".
        cause: description of what happened.
        detail: details, such as both values of a mismatch or the missing ranks.
        committed_step: with `TFDIST_ATOMIC_STEPS=1`, the last gradient step that every
            surviving rank has applied completely; None if unknown.
    """

    kind: str
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    tensor: str = ""
    cause: str = ""
    detail: str = ""
    committed_step: int | None = None


class _WithRecord:
    """Adds `record` to a TensorFlow error class."""

    KIND = "internal"
    ag_pass_through = True  # AutoGraph then raises it unchanged
    _keras_call_info_injected = True  # so do Keras layers

    def __init__(self, message: str, record: ErrorRecord | None = None) -> None:
        # node_def and op are None: the node does not help to understand the error.
        super().__init__(None, None, message)  # type: ignore[call-arg]
        self.record = record or ErrorRecord(kind=self.KIND, cause=message)
        rank = self.record.rank
        if self.record.kind in ("rank_failed", "shutdown") and rank is not None:
            first_line = message.partition("\n")[0]
            failed_rank.record(rank, f"{type(self).__name__}: {first_line}")

    def __repr__(self) -> str:
        # For TensorFlow's errors, repr shows only the class.
        return f"{type(self).__name__}({self.message!r})"  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.record))  # type: ignore[attr-defined]


class MismatchError(_WithRecord, tf.errors.FailedPreconditionError):
    """The ranks differ in a shape, dtype, operation, root or list of variables.

    The message names the tensor, the ranks and both values.
    """

    KIND = "mismatch"


class RankFailedError(_WithRecord, tf.errors.AbortedError):
    """A rank died, failed or left; the message and `record` name the rank.

    The failed step may have updated only some of the weights: restart from the last
    checkpoint.
    """

    KIND = "rank_failed"


class EvictedError(RankFailedError):
    """This running rank was, or may have been, removed from the job, and must exit.

    There are two kinds. "evicted": the other ranks decided without this rank, because
    it was stopped (SIGSTOP) or cut off from them. "no_majority": this rank has lost
    contact with so many ranks that it cannot know their decision, as some of them may
    be alive; `record` names the first rank that it lost.
    """

    KIND = "evicted"


class ThreadError(_WithRecord, tf.errors.FailedPreconditionError):
    """Two threads of this rank use operations of the same name.

    Calls with the same name on different ranks are matched by their order. This order
    is the same on all ranks only if one thread makes the calls. The job ends.
    """

    KIND = "threads"


class TimeoutError(_WithRecord, tf.errors.DeadlineExceededError):  # noqa: A001
    """A rank missed a deadline; the message names the rank and the tensor, if any."""

    KIND = "timeout"


class NotInitializedError(_WithRecord, tf.errors.FailedPreconditionError):
    """A function of tfdist was used before `tfdist.init()`."""

    KIND = "not_initialized"


for _public in (
    ErrorRecord,
    MismatchError,
    RankFailedError,
    EvictedError,
    ThreadError,
    TimeoutError,
    NotInitializedError,
):
    _public.__module__ = "tfdist.errors"  # for tracebacks and pickles

# The only table that maps the kind of a record to the class that Python raises. Other
# kinds (cancelled, invalid_argument, internal) keep TensorFlow's class.
_CLASSES: dict[str, type[_WithRecord]] = {
    "mismatch": MismatchError,
    "rank_failed": RankFailedError,
    "shutdown": RankFailedError,
    "evicted": EvictedError,
    "no_majority": EvictedError,
    "threads": ThreadError,
    "timeout": TimeoutError,
    "not_initialized": NotInitializedError,
}


def from_tf(error: BaseException) -> Exception | None:
    """Returns the tfdist error inside a TensorFlow error.

    Args:
        error: exception raised by a `tf.function`, `model.fit` or an operation.

    Returns:
        `MismatchError`, `RankFailedError`, `EvictedError`, `ThreadError`,
        `TimeoutError` or `NotInitializedError` with its `record`. If `error` is already
        one of these, returns `error`. None if the error does not come from tfdist or
        has no class in `tfdist.errors`.
    """
    if isinstance(error, _WithRecord):
        return error  # type: ignore[return-value]
    error = _before_keras(error)
    payload = _payload(getattr(error, "experimental_payloads", None) or {})
    if not payload and isinstance(error, tf.errors.OpError):
        payload = _payload_in_text(error.message)
    record = _record(payload)
    cls = _CLASSES.get(record.kind)
    if cls is None:
        return _of_engine(error)
    return cls(str(payload.get("message") or error), record)  # type: ignore[return-value]


def _before_keras(error: BaseException) -> BaseException:
    """Returns the error that a Keras layer has recreated without its payloads.

    An eager layer adds its arguments to the message of an error in its `call`. Returns
    other errors unchanged.
    """
    original = error.__context__
    is_recreated = getattr(error, "_keras_call_info_injected", False)
    if is_recreated and isinstance(original, tf.errors.OpError):
        return original
    return error


def _of_engine(error: BaseException) -> Exception | None:
    """Returns the tfdist error for an error of another engine's operation."""
    engine = engines.chosen()
    found = engine.to_core_error(error) if engine is not None else None
    return from_core(found) if found is not None else None


def from_core(error: CoreError) -> Exception:
    """Converts an error of the C++ core or of the rendezvous to a public exception."""
    record = _record(error.payload)
    cls = _CLASSES.get(record.kind)
    if cls is not None:
        return cls(error.message, record)  # type: ignore[return-value]
    tf_cls = tf.compat.v1.errors.exception_type_from_error_code(error.code)
    return tf_cls(None, None, error.message)


class translate:  # noqa: N801 - reads as a function, and is entered by every eager call
    """A context manager that converts errors of the C++ core to tfdist errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        converted: Exception | None = None
        if isinstance(error, CoreError):
            converted = from_core(error)
        elif isinstance(error, tf.errors.OpError):
            converted = from_tf(error) or _bare(error)
        if converted is not None and converted is not error:
            raise converted from None


def _bare(error: tf.errors.OpError) -> Exception | None:
    """Converts a core error that has no class in tfdist; keeps the core's message."""
    message = _payload(getattr(error, "experimental_payloads", None) or {}).get(
        "message"
    )
    return type(error)(None, None, message) if message else None


def _payload(payloads: Any) -> dict[str, Any]:
    """Returns tfdist's JSON object among the payloads of an error, or an empty dict.

    If Keras has recreated the error, `payloads` is a number.
    """
    for key, value in getattr(payloads, "items", dict)():
        if (key.decode() if isinstance(key, bytes) else key) == _PAYLOAD:
            with contextlib.suppress(ValueError, TypeError):
                return dict(json.loads(value))
    return {}


def _payload_in_text(text: str) -> dict[str, Any]:
    """Returns the payload of an error that passed through XLA, which keeps only text.

    Example:
        >>> from tfdist.core.exceptions import _payload_in_text
        >>> text = 'in f: tfdist: it is gone [tfdist.error {"rank": 3}] (at g)'
        >>> _payload_in_text(text)
        {'rank': 3, 'message': 'it is gone'}
    """
    before, mark, after = text.partition(f" [{_PAYLOAD} ")
    if mark:
        with contextlib.suppress(ValueError, TypeError):
            record, _ = json.JSONDecoder().raw_decode(after)
            return {**record, "message": before.partition("tfdist: ")[2]}
    return {}


def _record(payload: dict[str, Any]) -> ErrorRecord:
    names = {field.name for field in dataclasses.fields(ErrorRecord)}
    known = {name: value for name, value in payload.items() if name in names}
    return ErrorRecord(**{"kind": "internal", **known})
