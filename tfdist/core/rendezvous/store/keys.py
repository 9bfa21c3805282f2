"""Purposes of a connection to the store, and keys shared by server and clients."""

from __future__ import annotations

# Purpose of a connection, claimed in its handshake: requests, or presence of a rank.
PURPOSE = "store"
MEMBER = "member"
# Key of this store's random name, which is part of every link's handshake.
SESSION = "session"


def failure_key(generation: int) -> str:
    """Returns the key for the first failure during the start of a generation."""
    return f"{generation}/failed"


# Requests of the members of an elastic job for their place in the next generation.
REQUESTS = "elastic/request/"


def request_key(member: int, number: int) -> str:
    """Returns the key for a member's request; its requests are numbered from 1."""
    return f"{REQUESTS}{member}/{number}"


def answer_key(member: int, number: int) -> str:
    """Returns the key for the answer of tfdistrun to a member's request."""
    return f"elastic/answer/{member}/{number}"


def join_key(generation: int) -> str:
    """Returns the key that is set when newcomers want to join this generation."""
    return f"elastic/join/{generation}"


def change_key(generation: int) -> str:
    """Returns the key that is set when the ranks of this generation are to change.

    Newcomers want to join it, or members have to leave because the job shrinks. It is
    for programs that do not hand over at an agreed step.
    """
    return f"elastic/change/{generation}"


# Generations whose ranks are connected and have the state of the training.
BEGUN = "elastic/begun/"


def begun_key(generation: int) -> str:
    """Returns the key that is set when the steps of this generation begin."""
    return f"{BEGUN}{generation}"


# Members of an elastic job that have asked to leave, or to be replaced.
LEAVES = "elastic/leave/"
SLOW = "slow"  # value of `leave_key` of a member that is to be replaced


def leave_key(member: int) -> str:
    """Returns the key that a member sets when it wants to leave: to True, or SLOW."""
    return f"{LEAVES}{member}"


def ask_step_key(generation: int) -> str:
    """Returns the key that is set when a generation is to end after a step."""
    return f"elastic/ask-step/{generation}"


# Numbers of commits of the members, in answer to `ask_step_key`.
STEPS = "elastic/step/"


def step_key(generation: int, member: int) -> str:
    """Returns the key for a member's number of commits, in answer to the question."""
    return f"{STEPS}{generation}/{member}"


def end_key(generation: int) -> str:
    """Returns the key for the number of commits at which a generation ends."""
    return f"elastic/end/{generation}"
