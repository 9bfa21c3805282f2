"""Purposes of a connection to the store, and keys shared by server and clients."""

from __future__ import annotations

import re

# Purpose of a connection, claimed in its handshake: requests, or presence of a rank.
PURPOSE = "store"
MEMBER = "member"
# Key of this store's random name, which is part of every link's handshake.
SESSION = "session"


def prefix_of_generation(generation: int) -> str:
    """Returns the prefix of all keys that belong to one generation."""
    return f"{generation}/"


def failure_key(generation: int) -> str:
    """Returns the key for the first failure during the start of a generation."""
    return f"{prefix_of_generation(generation)}failed"


# Requests of the members of an elastic job for their place in the next generation.
REQUESTS = "elastic/request/"


def request_key(member: int, number: int) -> str:
    """Returns the key for a member's request; its requests are numbered from 1."""
    return f"{REQUESTS}{member}/{number}"


def answer_key(member: int, number: int) -> str:
    """Returns the key for the answer of tfdistrun to a member's request."""
    return f"elastic/answer/{member}/{number}"


def join_key(generation: int) -> str:
    """Returns the key that is set when this generation is to end to admit newcomers."""
    return f"{prefix_of_generation(generation)}join"


def change_key(generation: int) -> str:
    """Returns the key that is set when the ranks of this generation are to change.

    Newcomers want to join, or members have to leave because the job shrinks. The key is
    used by programs that do not hand over at an agreed step.
    """
    return f"{prefix_of_generation(generation)}change"


_BEGUN = "begun"


def begun_key(generation: int) -> str:
    """Returns the key that is set when the steps of this generation begin.

    At that time, its ranks are connected and have the training state.
    """
    return f"{prefix_of_generation(generation)}{_BEGUN}"


# Members of an elastic job that have asked to leave, or to be replaced.
LEAVES = "elastic/leave/"
SLOW = "slow"  # value of `leave_key` of a member that is to be replaced


def leave_key(member: int) -> str:
    """Returns the key that a leaving member sets, to True or SLOW."""
    return f"{LEAVES}{member}"


def ask_step_key(generation: int) -> str:
    """Returns the key that is set when a generation is to end after a step."""
    return f"{prefix_of_generation(generation)}ask-step"


_STEP = re.compile(r"(\d+)/step/(\d+)")


def step_key(generation: int, member: int) -> str:
    """Returns the key of a member's number of commits, its answer to `ask_step_key`."""
    return f"{prefix_of_generation(generation)}step/{member}"


def step_of(key: str) -> tuple[int, int] | None:
    """Returns generation and member of a `step_key`; None for another key.

    Example:
        >>> from tfdist.core.rendezvous.store.keys import step_key, step_of
        >>> step_of(step_key(3, member=1))
        (3, 1)
    """
    found = _STEP.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


def end_key(generation: int) -> str:
    """Returns the key for the number of commits at which a generation ends."""
    return f"{prefix_of_generation(generation)}end"


def is_for_launcher(key: str) -> bool:
    """Returns whether a key that a rank has set is a message to tfdistrun."""
    if key.startswith((REQUESTS, LEAVES)) or step_of(key) is not None:
        return True
    return key.endswith(f"/{_BEGUN}")
