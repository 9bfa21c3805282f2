"""Key-value spaces of launchers, in which the ranks of several hosts find each other.

Rank 0 stores the address and the secret of the job in the space, and the other ranks
read them there. So a job under such a launcher needs neither TFDIST_RENDEZVOUS nor
TFDIST_SECRET_FILE. A space is opened once and stays open until the process ends,
because launchers do not allow a second connection.

| module | launchers | means |
|---|---|---|
| pmi | MPICH, Intel MPI, PALS, srun --mpi=pmi2 | a socket, PMI_FD |
| pmix | Open MPI, srun --mpi=pmix | libpmix, which comes with them |
| munge | srun without --mpi | a port of the first host, and MUNGE |
| tfdist.core.mpi | all that start MPI, with `TFDIST_ENGINE=mpi` | a broadcast |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tfdist.core import mpi
from tfdist.core.rendezvous.placement import Placement
from tfdist.core.rendezvous.spaces import munge, pmi, pmix


class Space(Protocol):
    """Interface of a key-value space, for one rank of a job."""

    def exchange(self, key: str, value: str | None, deadline: float) -> str:
        """Returns the value of rank 0; all ranks call this with the same key.

        Args:
            key: a name that was not used before, of at most 60 characters.
            value: on rank 0, at most 1000 characters without spaces; None on the other
                ranks.
            deadline: time by which all ranks must have called this, on the
                time.monotonic() clock.

        Raises:
            RendezvousError: a rank did not call this in time, or the launcher failed.
        """


_open: dict[str, Space] = {}  # by module


def find(
    environ: Mapping[str, str], placement: Placement, deadline: float
) -> Space | None:
    """Returns the space of this job's launcher; None if there is none.

    It is also None if all ranks are on one host. The result must be the same on all
    ranks of a job. It depends on the launcher, on whether there are ranks on other
    hosts, and on the libraries of the host.

    Args:
        environ: the environment variables of this rank.
        placement: placement of this rank.
        deadline: time by which the launcher must answer, on the time.monotonic() clock.

    Raises:
        RendezvousError: the launcher has a space but does not answer.
    """
    if placement.local_size == placement.size:
        return None  # the ranks of one host meet without it
    if environ.get("TFDIST_ENGINE") == mpi.NAME:
        return mpi
    for module in (pmi, pmix, munge):
        name = module.__name__
        if name in _open:
            return _open[name]
        if open_space := module.opening(environ, placement):
            _open[name] = open_space(deadline)
            return _open[name]
    return None
