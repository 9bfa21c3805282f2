"""Errors of the rendezvous, with the same codes and payloads as errors of the core."""

from __future__ import annotations

from typing import Any

from tfdist.core import native


class RendezvousError(native.CoreError):
    """The ranks could not connect; `payload` has the cause and, if known, the rank.

    Attributes:
        known_to_all: whether every rank detects the same error independently.
    """

    known_to_all = False


def invalid(message: str) -> RendezvousError:
    """Returns the error for an invalid setting, detected on this rank only."""
    return RendezvousError(
        native.INVALID_ARGUMENT, message, {"kind": "invalid_argument", "cause": message}
    )


def mismatch(message: str, detail: str) -> RendezvousError:
    """Returns the error for a setting that differs between the ranks."""
    return RendezvousError(
        native.FAILED_PRECONDITION,
        message,
        {"kind": "mismatch", "cause": message, "detail": detail},
    )


def timeout(message: str, detail: str = "") -> RendezvousError:
    """Returns the error for ranks that are missing at the deadline."""
    payload: dict[str, Any] = {"kind": "timeout", "cause": message}
    if detail:
        payload["detail"] = detail
    return RendezvousError(native.DEADLINE_EXCEEDED, message, payload)


def rank_failed(
    message: str, *, rank: int = -1, host: str = "", pid: int = 0, cause: str = ""
) -> RendezvousError:
    """Returns the error for a rank that failed while the ranks were connecting."""
    payload: dict[str, Any] = {"kind": "rank_failed", "cause": cause or message}
    if rank >= 0:
        payload["rank"] = rank
    if host:
        payload["host"] = host
    if pid > 0:
        payload["pid"] = pid
    return RendezvousError(native.ABORTED, message, payload)


def numbers(ranks: list[int], what: str = "rank") -> str:
    """Lists ranks as text: rank 3; ranks 1 and 3; ranks 0, 1, ..., 7 and 9 more.

    Args:
        ranks: ranks to list.
        what: singular noun.
    """
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        shown.append(f"{len(ranks) - 8} more")
    if len(shown) == 1:
        return f"{what} {shown[0]}"
    return f"{what}s {', '.join(shown[:-1])} and {shown[-1]}"
