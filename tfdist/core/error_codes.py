"""Error codes of the native core, and the exception class that has such a code."""

from __future__ import annotations

from typing import Any

# These are TensorFlow's codes (tfdist_ops/base/status.h).
CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
FAILED_PRECONDITION = 9
ABORTED = 10
INTERNAL = 13


class CoreError(RuntimeError):
    """An error of the core or of the rendezvous.

    Attributes:
        code: TensorFlow's error code, e.g. 10 (ABORTED).
        message: description of the error.
        payload: the machine-readable record with "kind", "rank", "host", "pid",
            "tensor", "cause", "detail" and "committed_step". Empty fields are omitted.
    """

    def __init__(
        self, code: int, message: str, payload: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.payload = payload or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.message, self.payload))
