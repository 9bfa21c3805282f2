"""Messages that explain why an elastic job refuses a process, or stops."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.core.rendezvous.errors import numbers
from tfdist.launch.membership_actions import START_FAILURES

_RESUME = "Start the job again. It resumes only if the program restores a checkpoint."
SLOT_REMOVED = "the discovery script has removed its slot"
_FIND = "The output of the processes that failed shows the cause. "


def no_place(member: int, generation: int) -> str:
    """Describes a request for a generation in which the member has no place."""
    return (
        f"process {member} of the job asked for its place after generation "
        f"{generation}, but it has no place in that generation. Please report this as "
        "a bug of tfdist."
    )


def other_program() -> str:
    """Describes a newcomer whose program differs from the members' program."""
    return (
        "this replacement cannot join: its versions of TensorFlow or tfdist, the "
        "number of its steps, or the variables in its State (paths, shapes, dtypes) "
        "differ from those of the running ranks. Undo changes that were made to the "
        "program, its options or its environment since the job was started, or start "
        "the whole job again."
    )


def surplus(size: int) -> str:
    """Describes a newcomer that is no longer needed."""
    noun = "rank" if size == 1 else "ranks"
    return f"it is no longer needed, since the job can only have {size} {noun} now"


def all_failed(generation: int, failed_ranks: Sequence[int]) -> str:
    """Describes a generation all of whose members failed."""
    return (
        f"{numbers(list(failed_ranks))}, the last ranks of generation {generation}, "
        f"failed: the state of the training is lost. {_FIND}{_RESUME}"
    )


def failed_at_end(generation: int, failed_ranks: Sequence[int]) -> str:
    """Describes members that failed while the other members exited with code 0."""
    return (
        f"{numbers(list(failed_ranks))} of generation {generation} failed, and the "
        "other ranks have finished: a rank cannot be replaced after the end of "
        f"training (of fit, or of the loop). {_FIND}"
    ).rstrip()


def state_lost(generation: int) -> str:
    """Describes a generation whose live members have not received the state."""
    return (
        f"all ranks that had the training state exited before generation {generation} "
        "was connected; the ranks that are left have not received the state. "
        f"{_FIND}{_RESUME}"
    )


def no_progress(committed: int) -> str:
    """Describes failures that repeat without a newly committed step."""
    return (
        f"ranks were lost again and again after commit {committed}, and no step was "
        f"completed in between: the same failure seems to repeat. {_FIND}{_RESUME}"
    )


def no_start(max_restarts: int, start_failures: int) -> str:
    """Describes why no further replacement is started.

    Args:
        max_restarts: limit for the number of replacements.
        start_failures: number of consecutive newcomers that exited before they were
            ready to join.
    """
    if start_failures >= START_FAILURES:
        return f"{start_failures} replacements in a row ended before they joined"
    allows = "no replacements" if max_restarts == 0 else "no more replacements"
    return f"--max-restarts {max_restarts} allows {allows}"


def too_few(
    left: int,
    min_size: int,
    *,
    have_others_finished: bool,
    room: int,
    max_restarts: int,
    start_failures: int,
) -> str:
    """Describes a job that cannot reach min_size any more.

    Args:
        left: number of members and ready newcomers together.
        min_size: smallest size of a generation.
        have_others_finished: whether so many members have exited with code 0 that fewer
            than `min_size` are left.
        room: number of ranks that can run on the remaining hosts.
        max_restarts: limit for the number of replacements.
        start_failures: number of consecutive newcomers that exited before they were
            ready to join.
    """
    advice = ""
    cause = no_start(max_restarts, start_failures)
    if have_others_finished:
        cause = "the other ranks have finished with exit code 0"
    elif room < min_size:
        noun = "rank" if room == 1 else "ranks"
        cause = f"the remaining hosts have room for only {room} {noun}"
        advice = "A smaller --min-np lets a job continue with fewer ranks."
    elif start_failures < START_FAILURES:
        advice = (
            "A smaller --min-np lets a job continue with fewer ranks; a larger "
            "--max-restarts replaces more of them."
        )
    noun = "rank is" if left == 1 else "ranks are"
    return (
        f"{left} {noun} left, but --min-np is {min_size}, and {cause}. "
        f"{_FIND}{_RESUME} {advice}"
    ).rstrip()
