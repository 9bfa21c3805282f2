"""The error classes of `tfdist.errors`, and conversion of core errors to them."""

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
    """The machine-readable half of an error.

    Attributes:
        kind: "mismatch", "rank_failed", "shutdown", "evicted", "no_majority",
            "threads", "timeout", "not_initialized", "cancelled", "invalid_argument"
            or "internal".
        rank: the rank at fault; None when there is none.
        host: its host; "" when unknown.
        pid: its process; None when unknown.
        tensor: name of the tensor or gradient list concerned; "" for none.
        cause: what happened, in words.
        detail: more: both values of a mismatch, the ranks that are missing.
        committed_step: with `TFDIST_ATOMIC_STEPS=1`: the last step of gradients, which
            every surviving rank has applied as a whole; None when that is not known.
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
    """Adds `record` to an error class of TensorFlow."""

    KIND = "internal"
    ag_pass_through = True  # AutoGraph then raises it unchanged

    def __init__(self, message: str, record: ErrorRecord | None = None) -> None:
        # No node_def and op: the node does not help to understand the error.
        super().__init__(None, None, message)  # type: ignore[call-arg]
        self.record = record or ErrorRecord(kind=self.KIND, cause=message)
        rank = self.record.rank
        if self.record.kind in ("rank_failed", "shutdown") and rank is not None:
            first_line = message.partition("\n")[0]
            failed_rank.record(rank, f"{type(self).__name__}: {first_line}")

    def __repr__(self) -> str:
        # TensorFlow's errors show nothing but their class here.
        return f"{type(self).__name__}({self.message!r})"  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.record))  # type: ignore[attr-defined]


class MismatchError(_WithRecord, tf.errors.FailedPreconditionError):
    """The ranks do not agree on a shape, type, operation, root or list of variables.

    The message names the tensor, the ranks and both values.
    """

    KIND = "mismatch"


class RankFailedError(_WithRecord, tf.errors.AbortedError):
    """A rank died, failed or left; the message and `record` name it.

    The weights of this step may be torn: restart from the last checkpoint.
    """

    KIND = "rank_failed"


class EvictedError(RankFailedError):
    """This rank is out of the job, although it runs, and must end.

    The other ranks decided without it: it was stopped, or cut off from them (kind
    "evicted"). Or it has lost contact with so many ranks, some of which may be alive,
    that it cannot know their decision (kind "no_majority"; `record` then names the rank
    that it lost first).
    """

    KIND = "evicted"


class ThreadError(_WithRecord, tf.errors.FailedPreconditionError):
    """Two threads of this rank use operations of the same name.

    The ranks pair calls of one name by their order, which is only the same on all ranks
    if one thread makes them. The job ends.
    """

    KIND = "threads"


class TimeoutError(_WithRecord, tf.errors.DeadlineExceededError):  # noqa: A001
    """A living rank did not come in time; the message names it and the tensor."""

    KIND = "timeout"


class NotInitializedError(_WithRecord, tf.errors.FailedPreconditionError):
    """Something of tfdist was used before `tfdist.init()`."""

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

# The one table from the kind of a record to the class that Python raises. Other kinds
# (cancelled, invalid_argument, internal) keep the class of TensorFlow.
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
    """Returns the tfdist error inside an error of TensorFlow.

    Args:
        error: exception of a `tf.function`, `model.fit` or an operation.

    Returns:
        `MismatchError`, `RankFailedError`, `EvictedError`, `ThreadError`,
        `TimeoutError` or `NotInitializedError` with its `record`; `error` itself if it
        is one of these; None if the error does not come from tfdist or has no
        class in `tfdist.errors`.
    """
    if isinstance(error, _WithRecord):
        return error  # type: ignore[return-value]
    payload = _payload(getattr(error, "experimental_payloads", None) or {})
    if not payload and isinstance(error, tf.errors.OpError):
        payload = _payload_in_text(error.message)
    record = _record(payload)
    cls = _CLASSES.get(record.kind)
    if cls is None:
        return _of_engine(error)
    return cls(str(payload.get("message") or error), record)  # type: ignore[return-value]


def _of_engine(error: BaseException) -> Exception | None:
    """Returns our error for an error of another engine's operation."""
    engine = engines.chosen()
    found = engine.to_core_error(error) if engine is not None else None
    return from_core(found) if found is not None else None


def from_core(error: CoreError) -> Exception:
    """Returns the public exception for an error of the core or the rendezvous."""
    record = _record(error.payload)
    cls = _CLASSES.get(record.kind)
    if cls is not None:
        return cls(error.message, record)  # type: ignore[return-value]
    tf_cls = tf.compat.v1.errors.exception_type_from_error_code(error.code)
    return tf_cls(None, None, error.message)


class translate:  # noqa: N801 - reads as a function, and is entered by every eager call
    """Converts errors of the core and of operations inside the block to our classes."""

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
    """Converts an error of the core that has no class in tfdist; keeps its message."""
    message = _payload(getattr(error, "experimental_payloads", None) or {}).get(
        "message"
    )
    return type(error)(None, None, message) if message else None


def _payload(payloads: Any) -> dict[str, Any]:
    """Returns our JSON object among the payloads of an error; empty if there is none.

    If Keras has recreated the error, they are a number.
    """
    for key, value in getattr(payloads, "items", dict)():
        if (key.decode() if isinstance(key, bytes) else key) == _PAYLOAD:
            with contextlib.suppress(ValueError, TypeError):
                return dict(json.loads(value))
    return {}


def _payload_in_text(text: str) -> dict[str, Any]:
    """The same for an error that passed through XLA, which keeps only the text.

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
