"""Rank and size of this process, before `hvd.init()`."""

from __future__ import annotations

import os

from tfdist.core.rendezvous.environment import detect

__all__ = ["get_env_rank_and_size"]


def get_env_rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks, as set by its launcher.

    Uses HOROVOD_RANK and HOROVOD_SIZE if both are set; otherwise the variables of the
    launcher (such as tfdistrun, mpirun or srun) that `hvd.init()` would use.

    Returns:
        Rank and size; 0 and 1 without a launcher.

    Raises:
        ValueError: HOROVOD_RANK or HOROVOD_SIZE is not a number.
        tfdist.core.native.CoreError: a launcher's variable is malformed, or variables
            contradict each other.

    Example:
        >>> from tfdist.horovod.runner.common.util.env import get_env_rank_and_size
        >>> get_env_rank_and_size()
        (0, 1)
    """
    rank, size = (os.environ.get(name) for name in ("HOROVOD_RANK", "HOROVOD_SIZE"))
    if not (rank and size):
        place = detect(os.environ)
        return place.rank, place.size
    if not (rank.isdecimal() and size.isdecimal()):
        raise ValueError(
            f"Expected HOROVOD_RANK and HOROVOD_SIZE to be numbers, got {rank!r} and "
            f"{size!r}. Unset them, or start the program with tfdistrun --horovod."
        )
    return int(rank), int(size)
