"""Creates one rank's links: accepts from higher ranks, connects to lower ranks."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from tfdist.core import native
from tfdist.core.rendezvous import links
from tfdist.core.rendezvous.address import bind, join_address
from tfdist.core.rendezvous.auth import AuthenticationError, RefusedError
from tfdist.core.rendezvous.channel import Channel, close_channels
from tfdist.core.rendezvous.errors import RendezvousError, invalid, numbers, timeout
from tfdist.core.rendezvous.links import SHM, TCP, LinkCredentials, Peer, ShmFailedError
from tfdist.core.rendezvous.listener import Listener
from tfdist.core.rendezvous.mesh_types import Settings, close_ends
from tfdist.core.rendezvous.on_demand_links import OnDemandLinks

_log = logging.getLogger("tfdist")
_RETRY_S = 0.05
_IS_THE_WAY_OPEN = "is the address right (TFDIST_ADDRESS), and is there a firewall?"


class MeshLinks:
    """The links of one rank. All coroutines run on one loop.

    A peer may connect before this rank knows the peers and their hosts. Such
    connections wait until `set_peers` and `set_hosts` are called.

    Args:
        settings: settings of this start.
        first_peers: ranks to link with at the start.
    """

    def __init__(self, settings: Settings, first_peers: list[int]) -> None:
        self.settings = settings
        self.first_peers = first_peers
        self.rank = settings.placement.rank
        self.size = settings.placement.size
        self.doorbell_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.window = links.Window(0)  # `set_hosts` sets the size
        self.peers: Sequence[Peer] = ()
        self.host_of: tuple[int, ...] = ()
        self.ends: dict[int, native.LinkEnd] = {}
        self.on_demand: OnDemandLinks | None = None
        self.complete = False  # whether all ranks have their first links
        self._credentials_or_none: LinkCredentials | None = None
        self._accepting: set[int] = set()
        self._gathering: dict[int, links.Gathering] = {}
        self._link_added = asyncio.Event()
        self._peers_known = asyncio.Event()
        self._hosts_known = asyncio.Event()
        self._listeners: list[Listener] = []

    def listen(self, credentials: LinkCredentials, own_host: str) -> dict[str, Any]:
        """Starts to listen; returns the addresses as entries of this rank's record.

        Args:
            credentials: credentials of this rank's links.
            own_host: address of this machine to listen on if none is configured.
        """
        self._credentials_or_none = credentials
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
            self._listeners.append(listener)
        if self.size > self.settings.mesh_ranks:
            self.on_demand = OnDemandLinks(
                rank=self.rank,
                listeners=self._listeners,
                gathering=self._gathering,
                connect=self._connect_on_demand,
                describe=lambda rank: self.peers[rank].description,
                timeout_s=self.settings.timeout_s,
                window=self.window,
            )
        return {"address": list(address), "unix_name": unix_name}

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Sets the peers, in rank order, as soon as they are known."""
        self.peers = peers
        self._peers_known.set()

    def set_hosts(self, host_of: tuple[int, ...]) -> None:
        """Sets the index of each rank's host, as soon as it is known."""
        self.host_of = host_of
        others = host_of.count(host_of[self.rank]) - 1
        self.window.size = others * self.settings.window_bytes
        self._hosts_known.set()

    # ---- links with higher ranks, which connect to this one ----

    def _refusal(self, transport: str, claims: dict[str, Any]) -> str:
        if transport == SHM and claims.get("purpose") == links.PROOF:
            return self._credentials.refusal(SHM, self.size, claims, links.PROOF)
        why = self._credentials.refusal(transport, self.size, claims)
        if not why and claims["from"] in self._accepting:
            # This is not a final refusal: the first connection may have broken, and the
            # peer tries again.
            raise AuthenticationError(f"a second link from rank {claims['from']}")
        return why

    async def _accept(self, channel: Channel) -> None:
        if channel.claims["purpose"] == links.PROOF:  # the handshake is the proof
            channel.close()
            return
        transport, rank = channel.claims["transport"], channel.claims["from"]
        channels = [channel]
        if transport == TCP:
            gathering = self._gathering.setdefault(
                rank, links.Gathering(self._credentials.sockets)
            )
            channels = gathering.add(channel) or []
            if not channels:  # more connections will follow
                return
        if rank in self._accepting:  # a second link at the same time
            close_channels(channels)
            return
        if rank in self.ends:
            if self.complete:  # the link is in use, or will be
                close_channels(channels)
                return
            # The peer gave up the first link at the end of its handshake.
            close_ends([self.ends.pop(rank)])
        self._accepting.add(rank)
        try:
            # The peer may have read the records before this rank did.
            await (self._hosts_known if transport == SHM else self._peers_known).wait()
            peer, on_demand = self.peers[rank], self._on_demand_for(rank)
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
                # At the start, a link that the peer has given up is replaced with the
                # peer's next link (see above). A link on demand is passed to the core
                # at once, so the peer must confirm it first.
                if on_demand is not None and not await links.confirm_tcp(
                    channels, self._credentials.timeout_s
                ):
                    return
                for one in channels:
                    one.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end = links.link_end(peer, channels, initiator=False)
            if on_demand is not None:
                await on_demand.take_accepted(end)
                return
            self.ends[rank] = end
            self._link_added.set()
        except ShmFailedError as error:
            _log.debug("no shared memory with rank %d: %s", rank, error)
        except asyncio.CancelledError:
            close_channels(channels)
            raise
        finally:
            self._accepting.discard(rank)

    # ---- links with lower ranks, to which this rank connects ----

    @property
    def _passed_doorbell(self) -> int | None:
        """Returns the doorbell descriptor that is passed to peers.

        It is None if there are links on demand. Peers then signal over the link's
        socket, so that a link needs only one descriptor.
        """
        return self.doorbell_fd if self.on_demand is None else None

    async def _connect(self, peer: Peer) -> str:
        """Creates one link; returns why shared memory failed, or "" if it did not."""
        self.ends[peer.rank], why = await self._link_to(peer)
        return why

    async def _connect_on_demand(self, rank: int) -> native.LinkEnd:
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
                why = f"{peer.description}: {error}"
                if self.settings.transport == SHM:
                    raise invalid(
                        f"TFDIST_TRANSPORT=shm, but there is no shared memory with "
                        f"{why}; use TFDIST_TRANSPORT=auto"
                    ) from error
        return await self._connect_tcp(peer), why

    @property
    def _credentials(self) -> LinkCredentials:
        if self._credentials_or_none is None:
            raise RuntimeError(
                "a link was used before `listen` was called (this is a bug in tfdist)"
            )
        return self._credentials_or_none

    def _on_demand_for(self, rank: int) -> OnDemandLinks | None:
        """Returns `on_demand` for a rank that is not in `first_peers`, else None."""
        return None if rank in self.first_peers else self.on_demand

    async def _connect_tcp(self, peer: Peer) -> native.LinkEnd:
        while True:
            try:
                return await links.connect_tcp(
                    self._credentials,
                    peer,
                    confirms=self._on_demand_for(peer.rank) is not None,
                )
            except RefusedError as error:
                raise invalid(f"no link with {peer.description}: {error}") from error
            except (OSError, AuthenticationError, TimeoutError) as error:
                # A link on demand has its own deadline (on_demand_links).
                if peer.rank in self.first_peers and self.settings.left_s <= _RETRY_S:
                    raise self._unreachable(peer, str(error)) from error
                await asyncio.sleep(_RETRY_S)

    async def link(self) -> None:
        """Creates the links to `first_peers`."""
        try:
            async with asyncio.timeout(self.settings.left_s):
                reasons = await asyncio.gather(
                    *(
                        self._connect(self.peers[rank])
                        for rank in self.first_peers
                        if rank < self.rank
                    )
                )
                while len(self.ends) < len(self.first_peers):
                    await self._link_added.wait()
                    self._link_added.clear()
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
        rest = sorted(set(self.first_peers) - set(self.ends))
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
            f"rank {self.rank} cannot connect to {peer.description} at {where}: "
            f"{reason or 'no answer'}; {_IS_THE_WAY_OPEN}",
            f"missing link: {self.rank} to {peer.rank}",
        )

    async def close(self, *, keep_links: bool) -> None:
        """Closes the listeners, and also the links unless `keep_links`."""
        if self.on_demand is None or not keep_links:
            for listener in self._listeners:
                await listener.close()
            for gathering in self._gathering.values():
                gathering.close()
        if not keep_links:
            if self.on_demand is not None:
                os.close(self.on_demand.wanted_fd)
            close_ends(list(self.ends.values()))
            self.ends.clear()
            self.window.close()
            os.close(self.doorbell_fd)
