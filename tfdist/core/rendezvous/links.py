"""Links between two ranks: the higher rank connects, the lower rank listens.

On one host (`same_host`), the two ranks first try an AF_UNIX socket with shared memory.
The higher rank proves that they share memory: it creates a sealed memory file, writes a
nonce into it and passes the file. The lower rank must find the nonce there, erase it
and send it back. In all other cases, and on failure, the link is one TCP connection or
several (TFDIST_TCP_SOCKETS).
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.core import native
from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import Channel, close_all, close_channels, patience

SHM = "shm"
TCP = "tcp"
LINK = "link"  # purposes of a connection between two ranks
PROOF = "host"  # proves a common host, see `tfdist.core.rendezvous.same_host`
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NONCE_BYTES = 16
_LINK_TIMEOUT_S = 10.0
_tries = itertools.count()  # number of TCP links that this process has tried to open


class ShmFailedError(Exception):
    """Shared memory does not work between two ranks; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Information that a rank has published about itself in the store."""

    rank: int
    host: str
    pid: int
    address: tuple[str, int]
    unix_name: str

    @property
    def description(self) -> str:
        """Returns a description of the rank for messages."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class LinkCredentials:
    """Credentials of all links of a rank during one initialization.

    Attributes:
        secret: secret of the job.
        job: name of the job, followed by the random name of its store.
        generation: number of the initialization.
        rank: this rank.
        frames: how the core authenticates frames (TFDIST_TCP_MAC).
        size: number of ranks.
        sockets: number of connections of one TCP link (TFDIST_TCP_SOCKETS).
    """

    secret: bytes = field(repr=False)
    job: str
    generation: int
    rank: int
    frames: str
    size: int = 1
    sockets: int = 1

    @property
    def timeout_s(self) -> float:
        """Time limit in seconds for creating one link."""
        return _LINK_TIMEOUT_S * patience(self.size)

    def claims(
        self, transport: str, acceptor: int, purpose: str = LINK
    ) -> dict[str, Any]:
        """Returns the claims that this rank sends when it connects to a lower rank."""
        return {**self._common(transport, purpose), "from": self.rank, "to": acceptor}

    def _common(self, transport: str, purpose: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "purpose": purpose,
            "job": self.job,
            "generation": self.generation,
            "transport": transport,
            "frames": f"hmac-sha256 {self.frames}",
        }
        if (transport, purpose) == (TCP, LINK):
            found["sockets"] = self.sockets
        return found

    def refusal(
        self, transport: str, size: int, claims: dict[str, Any], purpose: str = LINK
    ) -> str:
        """Returns why a connection with these claims is refused, or "" if accepted."""
        expected = {**self._common(transport, purpose), "to": self.rank}
        found = auth.difference(expected, claims, {"to": "target rank"})
        initiator = claims.get("from")
        if not found and (
            type(initiator) is not int or not self.rank < initiator < size
        ):
            found = f"rank {initiator!r:.20} does not connect to rank {self.rank}"
        index, link = claims.get("socket", 0), claims.get("link", 0)
        if not found and not (type(index) is int and 0 <= index < self.sockets):
            found = f"socket {index!r:.20} of {self.sockets}"
        if not found and type(link) is not int:
            found = f"link {link!r:.20}"
        return found and f"rank {self.rank} refused a link: {found}"


def link_end(
    peer: Peer,
    channels: Sequence[Channel],
    *,
    initiator: bool,
    shared: list[int] | None = None,
) -> native.LinkEnd:
    """Converts connected channels to a `LinkEnd` for the core; detaches the sockets.

    Args:
        peer: the rank at the other end.
        channels: connected and authenticated channels. Several channels mean TCP.
        initiator: whether this rank opened the connection.
        shared: descriptors of the link's memory, the peer's window and optionally the
            peer's doorbell; None for TCP.
    """
    memory, window, doorbell = [*(shared or []), -1, -1, -1][:3]
    return native.LinkEnd(
        peer=peer.rank,
        transport=SHM if shared else TCP,
        host=peer.host,
        pid=peer.pid,
        socket_fd=channels[0].detach(),
        more_socket_fds=tuple(channel.detach() for channel in channels[1:]),
        memory_fd=memory,
        peer_doorbell_fd=doorbell,
        window_fd=window,
        initiator=initiator,
        key=b"" if shared else b"".join(channel.link_key for channel in channels),
    )


def create_memory(size: int) -> int:
    """Returns a zeroed memory file with allocated pages and a fixed size.

    Raises:
        ShmFailedError: there is not enough memory in the cgroup or the machine.
    """
    try:
        fd = os.memfd_create("tfdist-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ShmFailedError(
            f"cannot create a memory file: {error.strerror}"
        ) from error
    try:
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ShmFailedError(
            f"cannot allocate {size} bytes of shared memory: {error.strerror}"
        ) from error
    return fd


def check_memory(fd: int, size: int) -> None:
    """Raises if the sender could shrink a memory file, or if its size is wrong."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ShmFailedError(
            f"the other rank did not send a sealed shared-memory file: {error}"
        ) from error
    found = os.fstat(fd).st_size
    if seals & _SEALS != _SEALS or found != size:
        raise ShmFailedError(
            f"the memory file has {found} bytes and seals {seals:#x}; expected {size} "
            f"bytes and {_SEALS:#x}"
        )


def exchange_nonce(fd: int, size: int, write: bytes | None) -> bytes:
    """Returns the nonce stored in the memory, and overwrites it.

    The nonce is at the start of the memory. `write` replaces it; None writes zeros.
    """
    with mmap.mmap(fd, size) as memory:
        found = memory[:_NONCE_BYTES]
        memory[:_NONCE_BYTES] = write or bytes(_NONCE_BYTES)
    return found


class Window:
    """Shared memory of this rank, from which the other ranks on its host read.

    Attributes:
        size: size in bytes, equal for all ranks of the host.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = -1

    def take(self) -> int:
        """Returns the memory file, which the window owns; creates it if needed.

        Raises:
            ShmFailedError: there is not enough memory, or no other rank is on the host.
        """
        if self.size == 0:
            raise ShmFailedError("the two ranks are on different hosts")
        if self.fd < 0:
            self.fd = create_memory(self.size)
        return self.fd

    def close(self) -> None:
        """Closes the file; existing mappings remain valid."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


async def connect_shm(
    credentials: LinkCredentials,
    peer: Peer,
    *,
    shm_bytes: int,
    window: Window,
    doorbell_fd: int | None,
) -> native.LinkEnd:
    """Creates the shared-memory link to a lower rank.

    Args:
        credentials: credentials of this rank.
        peer: the lower rank.
        shm_bytes: size of the memory in bytes.
        window: window of this rank.
        doorbell_fd: eventfd that the peer signals. None on both sides if the peers
            signal over the link's socket instead.

    Raises:
        ShmFailedError: shared memory does not work between the two ranks; TCP may work.
    """
    channel = Channel(
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), size=credentials.size
    )
    memory = -1
    fds: list[int] = []
    try:
        async with asyncio.timeout(credentials.timeout_s):
            await asyncio.get_running_loop().sock_connect(
                channel.sock, "\0" + peer.unix_name
            )
            await channel.handshake_as_client(
                credentials.secret, credentials.claims(SHM, peer.rank)
            )
            own = window.take()
            memory = create_memory(shm_bytes)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            exchange_nonce(memory, shm_bytes, nonce)
            bells = () if doorbell_fd is None else (doorbell_fd,)
            await channel.send({"memory": shm_bytes}, (memory, own, *bells))
            answer, fds = await channel.receive_with_fds(1 + len(bells))
            rest = exchange_nonce(memory, shm_bytes, None)
            _check_answer(answer, len(fds) - len(bells) - 1, nonce, rest)
            check_memory(fds[0], window.size)
            await channel.send({"ready": True})
        return link_end(peer, [channel], initiator=True, shared=[memory, *fds])
    except (OSError, AuthenticationError, TimeoutError, ShmFailedError) as error:
        channel.close()
        close_all([*fds, *([memory] if memory >= 0 else [])])
        raise ShmFailedError(str(error) or "no answer in time") from error
    except BaseException:
        channel.close()
        close_all([*fds, *([memory] if memory >= 0 else [])])
        raise


def _check_answer(
    answer: dict[str, Any], surplus: int, nonce: bytes, rest: bytes
) -> None:
    if "error" in answer:
        raise ShmFailedError(f"{answer['error']!s:.200}")
    if surplus != 0:
        raise ShmFailedError("the peer passed no window, or no doorbell")
    if auth.decode_bytes(answer, "nonce", _NONCE_BYTES) != nonce or any(rest):
        raise ShmFailedError("the two processes do not see the same memory")


async def accept_shm(
    channel: Channel,
    peer: Peer,
    *,
    shm_bytes: int,
    window: Window,
    doorbell_fd: int | None,
    timeout_s: float = _LINK_TIMEOUT_S,
) -> native.LinkEnd:
    """Accepts the shared-memory link of a higher rank; owns the channel.

    Args:
        channel: connection from the higher rank.
        peer: the higher rank.
        shm_bytes: size of the memory in bytes.
        window: window of this rank.
        doorbell_fd: as for `connect_shm`.
        timeout_s: time limit in seconds for the whole exchange.

    Raises:
        ShmFailedError: shared memory does not work; the peer also sees this, and uses
            TCP unless TFDIST_TRANSPORT=shm.
    """
    fds: list[int] = []
    try:
        async with asyncio.timeout(timeout_s):
            bells = () if doorbell_fd is None else (doorbell_fd,)
            _, fds = await channel.receive_with_fds(2 + len(bells))
            try:
                if len(fds) != 2 + len(bells):
                    raise ShmFailedError("the peer passed no memory")
                check_memory(fds[0], shm_bytes)
                check_memory(fds[1], window.size)
                own = window.take()
                nonce = exchange_nonce(fds[0], shm_bytes, None)
            except (OSError, ValueError, ShmFailedError) as error:
                await channel.send({"error": str(error)})
                raise
            await channel.send({"nonce": nonce.hex()}, (own, *bells))
            await channel.receive()
        return link_end(peer, [channel], initiator=False, shared=fds)
    except (OSError, ValueError, AuthenticationError, TimeoutError) as error:
        channel.close()
        close_all(fds)
        raise ShmFailedError(str(error) or "no answer in time") from error
    except BaseException:
        channel.close()
        close_all(fds)
        raise


async def connect_tcp(
    credentials: LinkCredentials, peer: Peer, *, confirms: bool = False
) -> native.LinkEnd:
    """Creates the TCP link to a lower rank.

    Args:
        credentials: credentials of this rank.
        peer: the lower rank.
        confirms: whether this rank confirms the link at the end (`confirm_tcp`).

    Raises:
        OSError, AuthenticationError, TimeoutError: the connection failed.
    """
    loop = asyncio.get_running_loop()
    host, port = peer.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    link = next(_tries)
    channels: list[Channel] = []
    try:
        for index in range(credentials.sockets):
            sock = socket.socket(family, socket.SOCK_STREAM)
            channel = Channel(sock, size=credentials.size)
            channels.append(channel)
            async with asyncio.timeout(credentials.timeout_s):
                await loop.sock_connect(sock, (host, port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                own = {"link": link, "socket": index}
                claims = {**credentials.claims(TCP, peer.rank), **own}
                await channel.handshake_as_client(credentials.secret, claims)
        if confirms:
            async with asyncio.timeout(credentials.timeout_s):
                await channels[0].send({"ready": True})
        return link_end(peer, channels, initiator=True)
    except BaseException:
        close_channels(channels)
        raise


async def confirm_tcp(channels: Sequence[Channel], timeout_s: float) -> bool:
    """Returns whether the higher rank still holds the connections of a link.

    The handshake of the higher rank has a deadline, which may have passed before this
    rank saw the end of the handshake. In that case, closes the connections.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await channels[0].receive()
    except (OSError, AuthenticationError, TimeoutError):
        close_channels(channels)
        return False
    return True


class Gathering:
    """Collects the connections of one TCP link as they arrive from a higher rank.

    Args:
        sockets: number of connections.
    """

    def __init__(self, sockets: int) -> None:
        self._sockets = sockets
        self._link = -1
        self._channels: dict[int, Channel] = {}

    def add(self, channel: Channel) -> list[Channel] | None:
        """Adds a connection; returns all of them, in order, once the link is complete.

        Closes connections of an earlier attempt, which the peer has given up.
        """
        link, index = channel.claims.get("link", 0), channel.claims.get("socket", 0)
        if link > self._link:
            self.close()
            self._link = link
        if link < self._link or index in self._channels:
            channel.close()
            return None
        self._channels[index] = channel
        if len(self._channels) < self._sockets:
            return None
        found = [self._channels[index] for index in range(self._sockets)]
        self._channels.clear()
        return found

    def close(self) -> None:
        """Closes connections that have not become a link."""
        close_channels([*self._channels.values()])
        self._channels.clear()


def unix_listener() -> tuple[socket.socket, str]:
    """Returns a socket with a random abstract name, which needs no file to clean up."""
    name = f"tfdist-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    return sock, name
