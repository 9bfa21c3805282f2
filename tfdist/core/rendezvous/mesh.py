"""Connects the ranks after they have published and compared their records.

In a job of at most TFDIST_MESH_RANKS ranks, every pair of ranks is connected. In a
larger job, each rank starts with links to its neighbors (`overlay`) and opens other
links when data needs them (`on_demand_links`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

from tfdist.core import tuning
from tfdist.core.rendezvous import open_files, overlay, settings_check
from tfdist.core.rendezvous.address import join_address
from tfdist.core.rendezvous.compare import (
    exchange_records,
    link_credentials,
    own_record,
    peers_of,
)
from tfdist.core.rendezvous.errors import RendezvousError, rank_failed, timeout
from tfdist.core.rendezvous.exchange import exchange
from tfdist.core.rendezvous.links import LinkCredentials
from tfdist.core.rendezvous.locate import find_hosts
from tfdist.core.rendezvous.mesh_links import MeshLinks
from tfdist.core.rendezvous.mesh_types import GRACE_S, Mesh, Settings
from tfdist.core.rendezvous.store import (
    Membership,
    StoreClient,
    StoreLostError,
    failure_key,
)

_log = logging.getLogger("tfdist")


class _Builder:
    """Connects one rank, once. All coroutines run on one loop."""

    def __init__(self, settings: Settings, first_peers: list[int]) -> None:
        self.settings = settings
        self.rank = settings.placement.rank
        self.size = settings.placement.size
        self.host = socket.gethostname()
        self.links = MeshLinks(settings, first_peers)
        self.records: list[dict[str, Any]] = []
        self.credentials: LinkCredentials | None = None
        self.tuning: tuning.Tuning | None = None

    async def run(self) -> None:
        """Compares the records, finds ranks on the same host and connects the ranks."""
        settings = self.settings
        store = await StoreClient.connect(
            settings.store,
            settings.secret,
            deadline=settings.deadline,
            job=settings.job,
            generation=settings.generation,
            size=self.size,
        )
        try:
            await self._connect_ranks(store)
        except RendezvousError as error:
            await self._report_failure(store, error)
            raise
        finally:
            store.close()

    async def _connect_ranks(self, store: StoreClient) -> None:
        settings = self.settings
        credentials = await link_credentials(store, settings)
        self.credentials = credentials
        listening = self.links.listen(credentials, store.own_host)
        self.records = await exchange_records(
            store, settings, own_record(settings, self.host, listening)
        )
        peers = peers_of(self.records)
        settings_check.check_agreement(self.records)
        self.tuning = settings_check.tuning_of(self.records)
        self.links.set_peers(peers)
        host_of = await find_hosts(
            store, settings, records=self.records, peers=peers, credentials=credentials
        )
        self.links.set_hosts(host_of)
        await self.links.link()
        await exchange(
            store,
            settings,
            "linked",
            True,
            # Longer than the deadline of each rank, because a rank's own error is more
            # precise.
            grace_s=GRACE_S,
            complaint="did not have all links after "
            f"{settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S)",
        )
        self.links.complete = True

    async def _report_failure(self, store: StoreClient, error: RendezvousError) -> None:
        """Reports this rank's failure to the others, unless all of them detect it."""
        if error.payload.get("kind") == "mismatch" or error.known_to_all:
            return
        who = {"rank": self.rank, "host": self.host, "pid": os.getpid()}
        report = {**error.payload, **who, "cause": error.message}
        try:
            key = failure_key(self.settings.generation)
            if await store.add(f"{key}/count", timeout_s=2.0) == 1:
                await store.set(key, report, timeout_s=2.0)
        except RendezvousError as lost:
            _log.debug("could not report the failure to the other ranks: %s", lost)


async def build(settings: Settings) -> Mesh:
    """Connects this rank with all other ranks.

    Raises:
        RendezvousError: a rank is missing (timeout), another rank failed (rank_failed),
            the ranks do not agree (mismatch), or a setting cannot be used
            (invalid_argument). In the first two cases, the message names the rank.
    """
    size = settings.placement.size
    peers = overlay.first_peers(settings.placement.rank, size, settings.mesh_ranks)
    open_files.raise_limit(len(peers), settings.sockets, later=size - 1 - len(peers))
    builder = _Builder(settings, peers)
    links = builder.links
    membership: Membership | None = None
    keep = False
    left = False
    try:
        membership = await Membership.join(
            settings.store,
            settings.secret,
            member={"rank": builder.rank, "host": builder.host, "pid": os.getpid()},
            deadline=settings.deadline,
            generation=settings.generation,
            job=settings.job,
            size=builder.size,
        )
        await _race(builder.run(), membership)
        keep = left = True
    except StoreLostError as lost:
        left = True
        if settings.placement.launcher_runs_store or builder.rank == 0:
            raise
        raise rank_failed(
            f"rank 0, which runs the store at {join_address(*settings.store)}, failed "
            f"while the ranks were connecting: {lost.message}",
            rank=0,
            cause=lost.message,
        ) from lost
    except RendezvousError:
        left = True
        raise
    finally:
        await links.close(keep_links=keep)
        if membership is not None:
            if left:
                await membership.leave()
            else:
                membership.close()
    topology = settings_check.topology(
        settings.placement, builder.records, links.host_of
    )
    sharing = settings_check.sharing(topology, builder.records)
    return Mesh(
        topology=topology,
        host=builder.host,
        generation=settings.generation,
        own_doorbell_fd=links.doorbell_fd,
        links=[links.ends[rank] for rank in sorted(links.ends)],
        hosts=[peer.host for peer in links.peers],
        pids=[peer.pid for peer in links.peers],
        sharing=sharing,
        on_demand=links.on_demand,
        window=links.window,
        credentials=builder.credentials,
        address=links.peers[builder.rank].address[0],
        tuning=builder.tuning,
    )


async def _race(running: Any, membership: Membership) -> None:
    """Waits for `running`, or until the store reports that a rank failed."""
    work = asyncio.create_task(running)
    watch = asyncio.create_task(membership.first_failure())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return
        failed = watch.result()
        if failed.get("kind") == "timeout":  # the reporting rank has not failed itself
            raise timeout(str(failed["cause"]), str(failed.get("detail", "")))
        raise rank_failed(
            f"rank {failed['rank']} ({failed['host']}, process {failed['pid']}) failed "
            f"while the ranks were connecting: {failed['cause']}",
            rank=int(failed["rank"]),
            host=str(failed["host"]),
            pid=int(failed["pid"]),
            cause=str(failed["cause"]),
        )
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
