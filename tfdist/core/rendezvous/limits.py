"""Open files: enough for the links of a rank, or an error that says how many."""

from __future__ import annotations

import os
import resource

from tfdist.core.rendezvous.errors import invalid

# Listeners, store, loop and doorbells of the rendezvous, and what a program may still
# open while the ranks connect.
_OTHERS = 64
# While a link is made: socket, memory, window, doorbell; then socket and, in a full
# mesh of shared memory, doorbell and process.
_FILES_A_LINK = 4


def need(links: int, sockets: int = 1) -> int:
    """Descriptors that this process has open when it has `links` links.

    Args:
        links: how many.
        sockets: connections of each, where it is TCP.

    Example:
        >>> from tfdist.core.rendezvous import limits
        >>> limits.need(15) - limits.need(0)
        60
    """
    each = max(_FILES_A_LINK, sockets)
    return len(os.listdir("/proc/self/fd")) + _OTHERS + each * links


def make_room(links: int, sockets: int = 1, later: int = 0) -> None:
    """Raises the soft limit on open files up to the hard one, if it must be.

    Args:
        links: that this rank is about to make.
        sockets: connections of each, where it is TCP.
        later: links that may follow, as far as the hard limit allows.

    Raises:
        RendezvousError: the hard limit is too low as well.
    """
    wanted, most = need(links, sockets), need(links + later, sockets)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or most <= soft:
        return
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise invalid(
            f"{links} links need {wanted} open files, but the limit of this process is "
            f"{hard}; raise it (ulimit -Hn {wanted}, as the administrator), or lower "
            "TFDIST_MESH_RANKS" + (" or TFDIST_TCP_SOCKETS" if sockets > 1 else "")
        )
    target = most if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
