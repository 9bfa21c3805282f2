"""The placement of a process in its job, read from the variables of a launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.core.rendezvous.errors import invalid

MAX_SIZE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of a process in its job, according to its launcher.

    Attributes:
        rank: index of this process.
        size: number of processes.
        local_rank: index among the processes of this host; None if unknown.
        local_size: number of processes of this host; None if unknown.
        cross_rank: index among the processes with equal local_rank; None if unknown.
        cross_size: number of processes with equal local_rank; None if unknown.
        source: name of the rule that matched.
        rendezvous: "host:port" of the store; None if unknown.
        job: name that distinguishes the job from other jobs of this user on this host.
            None if the processes have only their parent process in common.
        launcher_runs_store: whether the launcher runs the store. If not, rank 0 runs
            it.
        variables: the variables from which rank and size were read, with their values,
            as text for messages.
    """

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    source: str = "single"
    rendezvous: str | None = None
    job: str | None = None
    launcher_runs_store: bool = False
    variables: str = ""


def integer(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, maximum: int = MAX_SIZE
) -> int | None:
    """Returns the value of a variable; None if it is not set, or empty.

    Raises:
        RendezvousError: the value is not a whole number in this range.
    """
    text = environ.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not minimum <= int(text) <= maximum:
        raise invalid(
            f"{name}={text!r} is not a whole number from {minimum} to {maximum}; "
            f"correct it, or unset it to start without that launcher"
        )
    return int(text)


def first_integer(
    environ: Mapping[str, str], *names: str, minimum: int = 0
) -> int | None:
    """Returns the value of the first variable that is set."""
    for name in names:
        found = integer(environ, name, minimum=minimum)
        if found is not None:
            return found
    return None


def build(
    environ: Mapping[str, str],
    source: str,
    rank_name: str,
    size_name: str,
    *,
    local_rank: tuple[str, ...] = (),
    local_size: tuple[str, ...] = (),
    rendezvous: str | None = None,
    job: str | None = None,
) -> Placement | None:
    """Returns a placement if the variables of rank and size are set.

    Raises:
        RendezvousError: a variable is malformed, or the variables contradict each
            other.
    """
    rank = integer(environ, rank_name)
    size = integer(environ, size_name, minimum=1)
    if rank is None or size is None:
        return None
    variables = f"{rank_name}={rank} and {size_name}={size}"
    if rank >= size:
        raise invalid(f"{variables}: the rank must be below the size")
    placement = Placement(
        rank=rank,
        size=size,
        local_rank=first_integer(environ, *local_rank),
        local_size=first_integer(environ, *local_size, minimum=1),
        source=source,
        rendezvous=rendezvous,
        job=job,
        variables=variables,
    )
    return _checked_local(placement, local_rank, local_size)


def _checked_local(
    placement: Placement, rank_names: tuple[str, ...], size_names: tuple[str, ...]
) -> Placement:
    local_rank, local_size = placement.local_rank, placement.local_size
    if local_size is not None and local_size > placement.size:
        raise invalid(
            f"{'/'.join(size_names)}={local_size} with {placement.variables}: "
            "a host cannot hold more ranks than the job"
        )
    if local_rank is not None and local_rank >= (local_size or placement.size):
        raise invalid(
            f"{'/'.join(rank_names)}={local_rank} with "
            f"{'/'.join(size_names) or 'size'}={local_size or placement.size}: "
            "the local rank must be below the local size"
        )
    return placement
