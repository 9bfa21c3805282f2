"""Connects the ranks, after all have told and compared who they are.

Every pair of a small world; else each rank with its neighbours (`overlay`), and with
others later, when data needs it (`on_demand_links`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from typing import Any

from tfdist.core import native, tuning
from tfdist.core.rendezvous import limits, links, overlay, same_host, settings_check
from tfdist.core.rendezvous.address import bind, join_address
from tfdist.core.rendezvous.auth import AuthenticationError, RefusedError
from tfdist.core.rendezvous.channel import Channel, close_channels
from tfdist.core.rendezvous.errors import (
    RendezvousError,
    invalid,
    mismatch,
    numbers,
    rank_failed,
    timeout,
)
from tfdist.core.rendezvous.links import SHM, TCP, LinkCredentials, Peer, ShmFailedError
from tfdist.core.rendezvous.listener import Listener
from tfdist.core.rendezvous.mesh_types import Mesh, Settings, close_ends
from tfdist.core.rendezvous.on_demand_links import OnDemandLinks
from tfdist.core.rendezvous.store import (
    SESSION,
    Membership,
    MissingKeysError,
    StoreClient,
    StoreLostError,
    failure_key,
)

_log = logging.getLogger("tfdist")
_RETRY_S = 0.05
_LAST_WORDS_S = 2.0
_IS_THE_WAY_OPEN = "is the address right (TFDIST_ADDRESS), and is there a firewall?"


class _Builder:
    """One start of one rank; every coroutine of it runs on one loop."""

    def __init__(self, settings: Settings, first: list[int]) -> None:
        self.settings = settings
        self.first = first  # the ranks to link with
        self.rank = settings.placement.rank
        self.size = settings.placement.size
        self.host = socket.gethostname()
        self.doorbell_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.window = links.Window(0)  # sized when the hosts are known
        self.peers: list[Peer] = []
        self.records: list[dict[str, Any]] = []
        self.host_of: tuple[int, ...] = ()
        self.made: dict[int, native.LinkEnd] = {}
        self.accepting: set[int] = set()
        self.gathering: dict[int, links.Gathering] = {}
        self.changed = asyncio.Event()
        self.listeners: list[Listener] = []
        self.compared = asyncio.Event()  # who the others are
        self.placed = asyncio.Event()  # and where
        self.credentials: LinkCredentials | None = None
        self.late: OnDemandLinks | None = None
        self.complete = False
        self.tuning: tuning.Tuning | None = None

    # ---- telling and comparing ----

    def _listen(self, own_host: str) -> dict[str, Any]:
        tcp = bind(self.settings.address or own_host, 0)
        address = tcp.getsockname()[:2]
        local, unix_name = links.unix_listener()
        sockets = {TCP: tcp, SHM: local}
        for transport, sock in sockets.items():
            listener = Listener(
                sock,
                secret=self.settings.secret,
                refusal=functools.partial(self._refusal, transport),
                serve=self._accept,
                size=self.size,
            )
            listener.start()
            self.listeners.append(listener)
        if self.size > self.settings.mesh_ranks:
            self.late = OnDemandLinks(
                rank=self.rank,
                listeners=self.listeners,
                gathering=self.gathering,
                connect=self._connect_late,
                describe=lambda rank: self.peers[rank].described,
                timeout_s=self.settings.timeout_s,
                window=self.window,
            )
        return {"address": list(address), "unix_name": unix_name}

    async def tell(self, store: StoreClient) -> None:
        """Publishes this rank's record, waits for all others, compares them."""
        (session,) = await store.wait([SESSION], self.settings.left_s)
        self.credentials = LinkCredentials(
            secret=self.settings.secret,
            job=f"{self.settings.job} {session}",
            generation=self.settings.generation,
            rank=self.rank,
            frames=str(self.settings.settings.get("TFDIST_TCP_MAC", "")),
            size=self.size,
            sockets=self.settings.sockets,
        )
        placement, generation = self.settings.placement, self.settings.generation
        record = {
            **self._listen(store.own_host),
            "host": self.host,
            "pid": os.getpid(),
            "size": self.size,
            "claim": same_host.claim(),
            "local_rank": placement.local_rank,
            "local_size": placement.local_size,
            "processors": settings_check.processors(),
            "versions": settings_check.versions(),
            "settings": self.settings.settings,
            "tuning": self.settings.tuning,
        }
        taken = await store.add(f"{generation}/started/{self.rank}")
        if taken != 1:
            raise invalid(
                f"{taken} processes call themselves rank {self.rank} "
                f"({placement.variables}); start each rank once"
            )
        await store.set(f"{generation}/rank/{self.rank}", record)
        keys = [f"{generation}/rank/{rank}" for rank in range(self.size)]
        try:
            self.records = await store.wait(keys, self.settings.left_s)
        except MissingKeysError as error:
            missing = [int(key.rpartition("/")[2]) for key in error.keys]
            raise self._missing(missing) from None
        sizes = [record["size"] for record in self.records]
        if any(size != self.size for size in sizes):
            raise mismatch(f"the ranks were told different sizes: {sizes}", str(sizes))
        self.peers = [
            Peer(
                rank=rank,
                host=record["host"],
                pid=record["pid"],
                address=(record["address"][0], record["address"][1]),
                unix_name=record["unix_name"],
            )
            for rank, record in enumerate(self.records)
        ]
        settings_check.check_agreement(self.records)
        self.tuning = settings_check.tuning_of(self.records)
        self.compared.set()

    async def find_hosts(self, store: StoreClient) -> None:
        """Proves which ranks share this one's host; all ranks get the same answer."""
        settings, generation = self.settings, self.settings.generation
        claims = [record["claim"] for record in self.records]
        reached = self.rank
        for other in same_host.candidates(self.rank, claims):
            if await same_host.reaches(
                self.peers[other].unix_name,
                secret=settings.secret,
                claims=self._credentials.claims(SHM, other, links.PROOF),
                described=self.peers[other].described,
                deadline=settings.deadline,
                size=self.size,
            ):
                reached = other
                break
        await store.set(f"{generation}/host/{self.rank}", reached)
        keys = [f"{generation}/host/{rank}" for rank in range(self.size)]
        try:
            found = await store.wait(keys, settings.left_s + _LAST_WORDS_S)
        except MissingKeysError as error:
            missing = [int(key.rpartition("/")[2]) for key in error.keys]
            raise timeout(
                f"{numbers(missing)} did not tell where they are within "
                f"{settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S)",
                f"missing ranks: {', '.join(map(str, missing))}",
            ) from None
        self.host_of = same_host.numbered(found)
        others = self.host_of.count(self.host_of[self.rank]) - 1
        self.window.size = others * settings.window_bytes
        self.placed.set()

    def _missing(self, missing: list[int]) -> RendezvousError:
        return timeout(
            f"{numbers(missing)} of {self.size} did not call tfdist.init() within "
            f"{self.settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S); look at the "
            "output of those ranks, or allow more time",
            f"missing ranks: {', '.join(map(str, missing))}",
        )

    # ---- links with higher ranks, which connect to this one ----

    def _refusal(self, transport: str, claims: dict[str, Any]) -> str:
        if self.credentials is None:
            return f"rank {self.rank} is not ready"
        if transport == SHM and claims.get("purpose") == links.PROOF:
            return self.credentials.refusal(SHM, self.size, claims, links.PROOF)
        why = self.credentials.refusal(transport, self.size, claims)
        if not why and claims["from"] in self.accepting:
            # No refusal for good: its first connection may have broken, it tries again.
            raise AuthenticationError(f"a second link from rank {claims['from']}")
        return why

    async def _accept(self, channel: Channel) -> None:
        if channel.claims["purpose"] == links.PROOF:  # the handshake was all
            channel.close()
            return
        transport, rank = channel.claims["transport"], channel.claims["from"]
        channels = [channel]
        if transport == TCP:
            gathering = self.gathering.setdefault(
                rank, links.Gathering(self._credentials.sockets)
            )
            channels = gathering.add(channel) or []
            if not channels:  # more are to come
                return
        if rank in self.accepting:  # a second one, just now
            close_channels(channels)
            return
        if rank in self.made:
            if self.complete:  # the core has it
                close_channels(channels)
                return
            # It gave up the first one, at the very end of its handshake.
            close_ends([self.made.pop(rank)])
        self.accepting.add(rank)
        try:
            # The peer may have read the records before this rank did.
            await (self.placed if transport == SHM else self.compared).wait()
            peer, late = self.peers[rank], self._late_for(rank)
            if transport == SHM:
                end = await links.accept_shm(
                    channel,
                    peer,
                    shm_bytes=self.settings.shm_bytes,
                    window=self.window,
                    doorbell_fd=self._passed_doorbell,
                    timeout_s=self._credentials.timeout_s,
                )
            else:
                # A first link that was given up is replaced by the next, see above. A
                # late one is the core's as soon as it is made.
                if late is not None and not await links.confirm_tcp(
                    channels, self._credentials.timeout_s
                ):
                    return
                for one in channels:
                    one.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end = links.link_end(peer, channels, initiator=False)
            if late is not None:
                await late.accepted(end)
                return
            self.made[rank] = end
            self.changed.set()
        except ShmFailedError as error:
            _log.debug("no shared memory with rank %d: %s", rank, error)
        except asyncio.CancelledError:
            close_channels(channels)
            raise
        finally:
            self.accepting.discard(rank)

    # ---- links with lower ranks, to which this one connects ----

    @property
    def _passed_doorbell(self) -> int | None:
        """Doorbell descriptor that is passed to peers.

        With late links it is None, and peers ring the socket, so that a link has one
        descriptor.
        """
        return self.doorbell_fd if self.late is None else None

    async def _connect(self, peer: Peer) -> str:
        """Makes one link; returns why it is not shared memory, "" when all is well."""
        self.made[peer.rank], why = await self._link_to(peer)
        return why

    async def _connect_late(self, rank: int) -> native.LinkEnd:
        end, why = await self._link_to(self.peers[rank])
        if why:
            _log.warning("no shared memory with %s; using TCP", why)
        return end

    async def _link_to(self, peer: Peer) -> tuple[native.LinkEnd, str]:
        shares_host = self.host_of[peer.rank] == self.host_of[self.rank]
        why = ""
        if self.settings.transport != TCP and (
            shares_host or self.settings.transport == SHM
        ):
            try:
                end = await links.connect_shm(
                    self._credentials,
                    peer,
                    shm_bytes=self.settings.shm_bytes,
                    window=self.window,
                    doorbell_fd=self._passed_doorbell,
                )
                return end, ""
            except ShmFailedError as error:
                why = f"{peer.described}: {error}"
                if self.settings.transport == SHM:
                    raise invalid(
                        f"TFDIST_TRANSPORT=shm, but there is no shared memory with "
                        f"{why}; use TFDIST_TRANSPORT=auto"
                    ) from error
        return await self._connect_tcp(peer), why

    @property
    def _credentials(self) -> LinkCredentials:
        if self.credentials is None:
            raise RuntimeError("a link before the store was asked (a bug in tfdist)")
        return self.credentials

    def _late_for(self, rank: int) -> OnDemandLinks | None:
        """Returns the on-demand links for a rank not linked at the start, else None."""
        return None if rank in self.first else self.late

    async def _connect_tcp(self, peer: Peer) -> native.LinkEnd:
        while True:
            try:
                return await links.connect_tcp(
                    self._credentials,
                    peer,
                    confirms=self._late_for(peer.rank) is not None,
                )
            except RefusedError as error:
                raise invalid(f"no link with {peer.described}: {error}") from error
            except (OSError, AuthenticationError, TimeoutError) as error:
                # A late link has a deadline of its own (on_demand_links).
                if peer.rank in self.first and self.settings.left_s <= _RETRY_S:
                    raise self._unreachable(peer, str(error)) from error
                await asyncio.sleep(_RETRY_S)

    async def link(self) -> None:
        """Makes the links that this rank starts with."""
        try:
            async with asyncio.timeout(self.settings.left_s):
                reasons = await asyncio.gather(
                    *(
                        self._connect(self.peers[rank])
                        for rank in self.first
                        if rank < self.rank
                    )
                )
                while len(self.made) < len(self.first):
                    await self.changed.wait()
                    self.changed.clear()
        except TimeoutError:
            raise self._missing_links() from None
        failed = [reason for reason in reasons if reason]
        if failed:
            _log.warning(
                "no shared memory with %s; using TCP%s",
                failed[0],
                f" (and with {len(failed) - 1} more ranks)" if len(failed) > 1 else "",
            )

    def _missing_links(self) -> RendezvousError:
        rest = sorted(set(self.first) - set(self.made))
        within = f"{self.settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S)"
        detail = f"missing ranks: {', '.join(map(str, rest))}"
        far = [r for r in rest if self.host_of[r] != self.host_of[self.rank]]
        if not far:
            return timeout(
                f"rank {self.rank} has no link to {numbers(rest)} after {within}",
                detail,
            )
        if far[0] < self.rank:
            return self._unreachable(self.peers[far[0]], f"no answer within {within}")
        where = join_address(*self.peers[self.rank].address)
        return timeout(
            f"{numbers(far)} did not connect to rank {self.rank} at {where} within "
            f"{within}; {_IS_THE_WAY_OPEN}",
            detail,
        )

    def _unreachable(self, peer: Peer, reason: str) -> RendezvousError:
        where = join_address(*peer.address)
        return timeout(
            f"rank {self.rank} cannot connect to {peer.described} at {where}: "
            f"{reason or 'no answer'}; {_IS_THE_WAY_OPEN}",
            f"missing link: {self.rank} to {peer.rank}",
        )

    async def await_others(self, store: StoreClient) -> None:
        """Waits until all ranks have all their links."""
        generation = self.settings.generation
        await store.set(f"{generation}/linked/{self.rank}", True)
        keys = [f"{generation}/linked/{rank}" for rank in range(self.size)]
        try:
            # Longer than any rank's own deadline: its reason says more than this one.
            await store.wait(keys, self.settings.left_s + _LAST_WORDS_S)
        except MissingKeysError as error:
            missing = [int(key.rpartition("/")[2]) for key in error.keys]
            raise timeout(
                f"{numbers(missing)} had not all links after "
                f"{self.settings.timeout_s:g} s (TFDIST_START_TIMEOUT_S)",
                f"missing ranks: {', '.join(map(str, missing))}",
            ) from None

    async def run(self) -> None:
        """Everything, as one rank."""
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
            await self.tell(store)
            await self.find_hosts(store)
            await self.link()
            await self.await_others(store)
            self.complete = True
        except RendezvousError as error:
            await self._tell_failure(store, error)
            raise
        finally:
            store.close()

    async def _tell_failure(self, store: StoreClient, error: RendezvousError) -> None:
        """Tells the others why this rank gives up, unless they all find it too."""
        if error.payload.get("kind") == "mismatch" or error.known_to_all:
            return
        who = {"rank": self.rank, "host": self.host, "pid": os.getpid()}
        told = {**error.payload, **who, "cause": error.message}
        try:
            key = failure_key(self.settings.generation)
            if await store.add(f"{key}/count", timeout_s=2.0) == 1:
                await store.set(key, told, timeout_s=2.0)
        except RendezvousError as lost:
            _log.debug("the others could not be told: %s", lost)

    async def close(self, *, keep_links: bool) -> None:
        """Ends the listeners; closes the links as well unless they are to stay."""
        if self.late is None or not keep_links:
            for listener in self.listeners:
                await listener.close()
            for gathering in self.gathering.values():
                gathering.close()
        if not keep_links:
            if self.late is not None:
                os.close(self.late.wanted_fd)
            close_ends(list(self.made.values()))
            self.made.clear()
            self.window.close()
            os.close(self.doorbell_fd)


async def build(settings: Settings) -> Mesh:
    """Connects this rank with all others.

    Raises:
        RendezvousError: a rank is missing (timeout, naming it), another one failed
            (rank_failed, naming it), or the ranks do not agree (mismatch).
    """
    size = settings.placement.size
    first = overlay.first_peers(settings.placement.rank, size, settings.mesh_ranks)
    limits.make_room(len(first), settings.sockets, later=size - 1 - len(first))
    builder = _Builder(settings, first)
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
        if settings.placement.served or builder.rank == 0:
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
        await builder.close(keep_links=keep)
        if membership is not None:
            if left:
                await membership.leave()
            else:
                membership.close()
    topology = settings_check.topology(
        settings.placement, builder.records, builder.host_of
    )
    sharing = settings_check.sharing(topology, builder.records)
    builder.records.clear()  # late links keep the builder
    return Mesh(
        topology=topology,
        host=builder.host,
        generation=settings.generation,
        own_doorbell_fd=builder.doorbell_fd,
        links=[builder.made[rank] for rank in sorted(builder.made)],
        hosts=[peer.host for peer in builder.peers],
        pids=[peer.pid for peer in builder.peers],
        sharing=sharing,
        late=builder.late,
        window=builder.window,
        credentials=builder.credentials,
        address=builder.peers[builder.rank].address[0],
        tuning=builder.tuning,
    )


async def _race(running: Any, membership: Membership) -> None:
    """Runs until done, or until the store tells that some rank failed."""
    work = asyncio.create_task(running)
    watch = asyncio.create_task(membership.first_failure())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return
        failed = watch.result()
        if failed.get("kind") == "timeout":  # who waited in vain has not failed itself
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
