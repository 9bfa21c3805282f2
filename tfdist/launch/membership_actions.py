"""Requests that members of an elastic job send to tfdistrun, and its decisions."""

from __future__ import annotations

from dataclasses import dataclass

START_FAILURES = 3  # newcomers in a row that end before they are ready: no more start


@dataclass(frozen=True)
class Request:
    """Request for a place in the next generation.

    Attributes:
        member: number of the sender.
        generation: generation that has ended for the sender; 0 if the sender is a
            newcomer that is ready to join.
        committed: number of steps that the sender has committed; -1 if the sender was
            started as a newcomer and has not received the state of the training yet.
        failed: ranks of this generation that the sender knows to have failed.
        program: hash of everything that must be equal on all members, such as versions
            and the model; "" if it is not known.
    """

    member: int
    generation: int
    committed: int
    failed: tuple[int, ...] = ()
    program: str = ""


@dataclass(frozen=True)
class Start:
    """Start a newcomer under this number."""

    member: int


@dataclass(frozen=True)
class Kill:
    """Kill the process with SIGKILL; it may have ended already."""

    member: int
    reason: str


@dataclass(frozen=True)
class Answer:
    """Answer the member's request with its place in the next generation.

    Attributes:
        member: number of the member.
        generation: number of the new generation.
        rank: rank of the member in this generation, 0 to size - 1.
        size: number of ranks of this generation.
        is_last: whether it runs no steps: its members save, and end.
    """

    member: int
    generation: int
    rank: int
    size: int
    is_last: bool = False


@dataclass(frozen=True)
class Refuse:
    """Answer the member's request with an error; the member has to end."""

    member: int
    reason: str


@dataclass(frozen=True)
class Dismiss:
    """Answer the member's request: it has left the job, and may end."""

    member: int


@dataclass(frozen=True)
class AskStep:
    """Ask the members of this generation how many steps they have committed.

    From then on, each of them waits at its next commit for `EndAt`.
    """

    generation: int


@dataclass(frozen=True)
class EndAt:
    """Notify the members of a generation of its end.

    Attributes:
        generation: number of the generation.
        committed: number of commits from which on a member requests its next place.
    """

    generation: int
    committed: int


@dataclass(frozen=True)
class Announce:
    """Notify the members of this generation that newcomers are ready to join."""

    generation: int


@dataclass(frozen=True)
class Fail:
    """Notify the members of a generation that one of them has ended.

    A member that is still connecting must not wait for it.

    Attributes:
        generation: number of the generation.
        member: number of the member that has ended.
        rank: rank of this member in the generation.
    """

    generation: int
    member: int
    rank: int


@dataclass(frozen=True)
class Stop:
    """End all processes, since the job cannot continue."""

    reason: str


Action = (
    Start | Kill | Answer | Refuse | Dismiss | AskStep | EndAt | Announce | Fail | Stop
)
