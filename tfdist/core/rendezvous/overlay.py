"""Selects the ranks that are connected from the start.

Up to TFDIST_MESH_RANKS ranks form a full mesh. In a larger world, a rank starts with
links to the ranks at a distance of a power of two in both directions. The core relays
control messages to the other ranks (tfdist_ops/transport/overlay.h); links for data are
opened later (`on_demand_links`).
"""

from __future__ import annotations


def neighbours(rank: int, size: int) -> list[int]:
    """Returns the ranks to which `rank` is connected in an overlay, ascending.

    Mirrors `OverlayNeighbours` of tfdist_ops/transport/routes.cc. The core does not
    start with other links.

    Example:
        >>> from tfdist.core.rendezvous import overlay
        >>> overlay.neighbours(0, 32)
        [1, 2, 4, 8, 16, 24, 28, 30, 31]
    """
    jumps = [1 << k for k in range((size - 1).bit_length())]
    return sorted({(rank + jump * way) % size for jump in jumps for way in (1, -1)})


def first_peers(rank: int, size: int, mesh_ranks: int) -> list[int]:
    """Returns the ranks to which `rank` is connected from the start, ascending.

    Example:
        >>> from tfdist.core.rendezvous import overlay
        >>> overlay.first_peers(1, 4, 16)
        [0, 2, 3]
    """
    if size > mesh_ranks:
        return neighbours(rank, size)
    return [other for other in range(size) if other != rank]
