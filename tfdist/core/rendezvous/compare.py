"""Publishes a record of this rank, and compares the records of all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.core.rendezvous import same_host, settings_check
from tfdist.core.rendezvous.errors import invalid, mismatch
from tfdist.core.rendezvous.exchange import exchange
from tfdist.core.rendezvous.links import LinkCredentials, Peer
from tfdist.core.rendezvous.mesh_types import Settings
from tfdist.core.rendezvous.store import SESSION, StoreClient


async def link_credentials(store: StoreClient, settings: Settings) -> LinkCredentials:
    """Returns the credentials for this rank's links, which are bound to this store."""
    (session,) = await store.wait([SESSION], settings.left_s)
    return LinkCredentials(
        secret=settings.secret,
        job=f"{settings.job} {session}",
        generation=settings.generation,
        rank=settings.placement.rank,
        frames=str(settings.settings.get("TFDIST_TCP_MAC", "")),
        size=settings.placement.size,
        sockets=settings.sockets,
    )


def own_record(
    settings: Settings, host: str, listening: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the record that this rank publishes.

    Args:
        settings: settings of this start.
        host: name of this machine, for messages.
        listening: addresses on which the rank listens (`mesh_links.MeshLinks.listen`).
    """
    placement = settings.placement
    return {
        **listening,
        "host": host,
        "pid": os.getpid(),
        "size": placement.size,
        "claim": same_host.claim(),
        "local_rank": placement.local_rank,
        "local_size": placement.local_size,
        "processors": settings_check.processors(),
        "versions": settings_check.versions(),
        "settings": settings.settings,
        "tuning": settings.tuning,
    }


async def exchange_records(
    store: StoreClient, settings: Settings, record: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Publishes this rank's record, waits for all records, and compares the sizes.

    Raises:
        RendezvousError: two processes have the same rank, a rank is missing, or the
            ranks were started with different sizes.
    """
    placement = settings.placement
    started = f"{settings.generation}/started/{placement.rank}"
    processes = await store.add(started)
    if processes != 1:
        raise invalid(
            f"{processes} processes call themselves rank {placement.rank} "
            f"({placement.variables}); start each rank once"
        )
    records = await exchange(
        store,
        settings,
        "rank",
        record,
        complaint=f"of {placement.size} did not call tfdist.init() within "
        f"{settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S); look at the "
        "output of those ranks, or allow more time",
    )
    sizes = [record["size"] for record in records]
    if any(size != placement.size for size in sizes):
        raise mismatch(f"the ranks were given different sizes: {sizes}", str(sizes))
    return records


def peers_of(records: Sequence[Mapping[str, Any]]) -> list[Peer]:
    """Returns all ranks as peers, created from their records."""
    return [
        Peer(
            rank=rank,
            host=record["host"],
            pid=record["pid"],
            address=(record["address"][0], record["address"][1]),
            unix_name=record["unix_name"],
        )
        for rank, record in enumerate(records)
    ]
