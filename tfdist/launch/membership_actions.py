"""Requests that members of an elastic job send to tfdistrun, and its decisions."""

from __future__ import annotations

from dataclasses import dataclass

# No more newcomers are started after this many in a row exited before becoming ready.
START_FAILURES = 3


@dataclass(frozen=True)
class Request:
    """A member's request for its rank in the next generation of an elastic job.

    Attributes:
        member: member number of the sender.
        generation: generation that the sender has left; 0 if it is a newcomer that is
            ready to join.
        committed: number of steps that the sender has committed; -1 if it was started
            as a newcomer and has not received the training state yet.
        failed: ranks of that generation that the sender knows to have failed.
        program: hash of everything that must be equal on all members, such as versions
            and the model; "" if the hash is not known.
    """

    member: int
    generation: int
    committed: int
    failed: tuple[int, ...] = ()
    program: str = ""


@dataclass(frozen=True)
class Start:
    """Start a newcomer.

    Attributes:
        member: member number of the newcomer.
        in_background: whether it gets a smaller share of the CPUs than the ranks, since
            no place is vacant for it. `Prioritize` ends this after at most a minute.
    """

    member: int
    in_background: bool = False


@dataclass(frozen=True)
class Prioritize:
    """Give a newcomer the same share of the CPUs as the ranks.

    It is needed now, or has been in the background for a minute.
    """

    member: int


@dataclass(frozen=True)
class Kill:
    """Kill the process with SIGKILL; it may have exited already."""

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
        is_last: whether the new generation runs no steps: its members save, and exit.
    """

    member: int
    generation: int
    rank: int
    size: int
    is_last: bool = False


@dataclass(frozen=True)
class Refuse:
    """Answer the member's request with an error; the member has to exit."""

    member: int
    reason: str


@dataclass(frozen=True)
class Dismiss:
    """Answer the member's request: the member has left the job, and may exit."""

    member: int


@dataclass(frozen=True)
class AskStep:
    """Ask the members of this generation how many steps they have committed.

    From then on, each of these members waits at its next commit for `EndAt`.
    """

    generation: int


@dataclass(frozen=True)
class EndAt:
    """Tell the members of a generation after which step the generation ends.

    Attributes:
        generation: number of the generation.
        committed: number of commits at which a member requests its next place.
    """

    generation: int
    committed: int


@dataclass(frozen=True)
class Announce:
    """Notify the members of this generation that newcomers are ready to join."""

    generation: int


@dataclass(frozen=True)
class Fail:
    """Notify the members of a generation that one of them has exited.

    A member that is still connecting must not wait for the one that has exited.

    Attributes:
        generation: number of the generation.
        member: number of the member that has exited.
        rank: rank of that member in the generation.
    """

    generation: int
    member: int
    rank: int


@dataclass(frozen=True)
class Stop:
    """Terminate all processes, since the job cannot continue."""

    reason: str


Action = (
    Start
    | Prioritize
    | Kill
    | Answer
    | Refuse
    | Dismiss
    | AskStep
    | EndAt
    | Announce
    | Fail
    | Stop
)
