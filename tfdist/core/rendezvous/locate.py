"""Determines which ranks share a host, using the proofs of `same_host`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.core.rendezvous import links, same_host
from tfdist.core.rendezvous.exchange import exchange
from tfdist.core.rendezvous.links import LinkCredentials, Peer
from tfdist.core.rendezvous.mesh_types import GRACE_S, Settings
from tfdist.core.rendezvous.store import StoreClient


async def find_hosts(
    store: StoreClient,
    settings: Settings,
    *,
    records: Sequence[Mapping[str, Any]],
    peers: Sequence[Peer],
    credentials: LinkCredentials,
) -> tuple[int, ...]:
    """Returns for each rank the index of its host; the same result on all ranks.

    Args:
        store: store at which the ranks meet.
        settings: settings of this start.
        records: one record for each rank, in rank order, each with "claim".
        peers: all ranks, in rank order.
        credentials: credentials of this rank's links.

    Raises:
        RendezvousError: a rank of this host does not answer, or a rank did not publish
            its host in time.
    """
    rank, size = settings.placement.rank, settings.placement.size
    claims = [record["claim"] for record in records]
    reached = rank
    for other in same_host.candidates(rank, claims):
        if await same_host.reaches(
            peers[other].unix_name,
            secret=settings.secret,
            claims=credentials.claims(links.SHM, other, links.PROOF),
            description=peers[other].description,
            deadline=settings.deadline,
            size=size,
        ):
            reached = other
            break
    found = await exchange(
        store,
        settings,
        "host",
        reached,
        grace_s=GRACE_S,
        complaint="did not report their host within "
        f"{settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S)",
    )
    return same_host.number_hosts(found)
