"""Raises the limit on open files to the number that the links of a rank need."""

from __future__ import annotations

import os
import resource

from tfdist.core.rendezvous.errors import invalid

# Descriptors for listeners, store, loop and doorbells of the rendezvous, and for files
# that the program opens while the ranks connect.
_OTHERS = 64
# Descriptors while a link is created: socket, memory, window, doorbell. Afterwards:
# socket and, in a full mesh with shared memory, doorbell and pidfd.
_FILES_A_LINK = 4


def descriptors_needed(links: int, sockets: int = 1) -> int:
    """Returns how many open descriptors this process needs with `links` links.

    Args:
        links: number of links.
        sockets: number of connections of each TCP link.

    Example:
        >>> from tfdist.core.rendezvous import open_files
        >>> open_files.descriptors_needed(15) - open_files.descriptors_needed(0)
        60
    """
    each = max(_FILES_A_LINK, sockets + 1)  # 1: the timer of the MPI engine
    return len(os.listdir("/proc/self/fd")) + _OTHERS + each * links


def raise_limit(links: int, sockets: int = 1, later: int = 0) -> None:
    """Raises the soft limit on open files if needed.

    The new limit is the hard limit or, if there is none, the number of files needed.

    Args:
        links: number of links that this rank is about to create.
        sockets: number of connections of each TCP link.
        later: number of links that may follow; included as far as the hard limit
            allows.

    Raises:
        RendezvousError: the hard limit is also too low.
    """
    needed, at_most = (
        descriptors_needed(links, sockets),
        descriptors_needed(links + later, sockets),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or at_most <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise invalid(
            f"{links} links need {needed} open files, but the limit of this process is "
            f"{hard}; raise it (ulimit -Hn {needed}, as the administrator), or lower "
            "TFDIST_MESH_RANKS" + (" or TFDIST_TCP_SOCKETS" if sockets > 1 else "")
        )
    target = at_most if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
