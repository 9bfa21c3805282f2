"""Framed, authenticated messages over one non-blocking stream socket.

The handshake (`core.rendezvous.auth`) reads at most 1122 bytes from an unknown client
and parses no JSON among them. After the handshake, a frame is a 4-byte length (big
endian) followed by that many bytes: MAC and JSON, at most 1 MiB. No bytes are read
ahead, so the socket can be passed to the core afterwards. File descriptors are sent
with a frame over AF_UNIX sockets (SCM_RIGHTS).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.address import connected_to_itself
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.version import __version__

MAX_BYTES_AFTER_AUTH = 1 << 20
HANDSHAKE_TIMEOUT_S = 2.0
_LENGTH_BYTES = 4
_FD_BYTES = array.array("i").itemsize


def patience(size: int) -> float:
    """Returns the factor by which deadlines are extended if `size` ranks start at once.

    The ranks may share the cores of one machine, so a rank that needs a millisecond to
    answer may first have to wait for the others.

    Example:
        >>> from tfdist.core.rendezvous import channel
        >>> channel.patience(8), channel.patience(256)
        (1.0, 4.0)
    """
    return max(1.0, size / 64)


def close_channels(channels: Sequence[Channel]) -> None:
    """Closes unused connections."""
    for channel in channels:
        channel.close()


class ChannelClosed(ConnectionError):
    """The other side closed the connection."""


def close_all(fds: list[int]) -> None:
    """Closes unused descriptors."""
    for fd in fds:
        os.close(fd)


async def _ready(sock: socket.socket, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    event = loop.create_future()
    add, remove = (
        (loop.add_writer, loop.remove_writer)
        if write
        else (loop.add_reader, loop.remove_reader)
    )

    def wake() -> None:
        if not event.done():
            event.set_result(None)

    add(sock, wake)
    try:
        await event
    finally:
        remove(sock)


class Channel:
    """One end of a connection; owns the socket until `detach`, `release` or `close`."""

    def __init__(self, sock: socket.socket, *, size: int = 1) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._handshake_s = HANDSHAKE_TIMEOUT_S * patience(size)
        self.claims: dict[str, Any] = {}  # of the client, after authentication
        self.link_key = b""  # for the core's frames on this socket
        self._send: auth.Sealer | None = None
        self._receive: auth.Sealer | None = None

    def close(self) -> None:
        """Closes the socket; has no effect if it is closed or detached."""
        self.sock.close()

    def detach(self) -> int:
        """Returns the descriptor, which the caller then owns."""
        return self.sock.detach()

    def release(self) -> tuple[socket.socket, auth.Sealer, auth.Sealer]:
        """Returns the socket, which the caller then owns, and the two sealers."""
        if self._send is None or self._receive is None:
            raise AuthenticationError("the handshake is not complete")
        return self.sock, self._send, self._receive

    async def until_readable(self) -> None:
        """Waits until the other side sends something, or closes the connection."""
        await _ready(self.sock, write=False)

    async def _write(self, data: bytes, fds: list[int]) -> None:
        view = memoryview(data)
        ancillary = []
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while view:
            try:
                sent = self.sock.sendmsg([view], ancillary)
            except BlockingIOError:
                await _ready(self.sock, write=True)
                continue
            ancillary = []
            view = view[sent:]

    async def _read(self, count: int, fds: list[int], max_fds: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part, ancillary, flags, _ = self.sock.recvmsg(
                    count - len(data),
                    socket.CMSG_SPACE(max_fds * _FD_BYTES) if max_fds else 0,
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                await _ready(self.sock, write=False)
                continue
            for level, kind, body in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    size = len(body) - len(body) % _FD_BYTES
                    fds.extend(array.array("i", body[:size]))
            if flags & socket.MSG_CTRUNC:
                raise AuthenticationError("a message carried too many descriptors")
            if not part:
                raise ChannelClosed("the connection was closed by the other side")
            data += part
        return bytes(data)

    async def _send_frame(self, body: bytes, fds: list[int]) -> None:
        await self._write(len(body).to_bytes(_LENGTH_BYTES, "big") + body, fds)

    async def _receive_frame(self, fds: list[int], max_fds: int) -> bytes:
        header = await self._read(_LENGTH_BYTES, fds, max_fds)
        length = int.from_bytes(header, "big")
        if length > MAX_BYTES_AFTER_AUTH:
            raise AuthenticationError(
                f"a message of {length} bytes is above the limit of "
                f"{MAX_BYTES_AFTER_AUTH}"
            )
        return await self._read(length, fds, max_fds)

    async def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Sends a message after the handshake, with descriptors attached."""
        await self.send_encoded(auth.encode(message), fds)

    async def send_encoded(self, body: bytes, fds: tuple[int, ...] = ()) -> None:
        """As `send`, for a message encoded by `auth.encode`."""
        if self._send is None:
            raise AuthenticationError("the handshake is not complete")
        if len(body) + auth.MAC_BYTES > MAX_BYTES_AFTER_AUTH:
            raise ValueError(
                f"a message of {len(body)} bytes is above the limit of "
                f"{MAX_BYTES_AFTER_AUTH - auth.MAC_BYTES}"
            )
        await self._send_frame(self._send.seal(body), list(fds))

    async def receive(self) -> dict[str, Any]:
        """Receives a message after the handshake."""
        message, _ = await self.receive_with_fds(0)
        return message

    async def receive_with_fds(self, count: int) -> tuple[dict[str, Any], list[int]]:
        """Receives a message and at most `count` descriptors, which the caller owns."""
        if self._receive is None:
            raise AuthenticationError("the handshake is not complete")
        fds: list[int] = []
        try:
            frame = await self._receive_frame(fds, count)
            return auth.decode(self._receive.open(frame)), fds
        except BaseException:
            close_all(fds)
            raise

    async def handshake_as_client(self, secret: bytes, claims: dict[str, Any]) -> None:
        """Proves this side's identity and checks the identity of the other side.

        Args:
            secret: secret of the job.
            claims: claims of this connection; the server must agree with them.

        Raises:
            AuthenticationError: the server does not know the secret, or uses a
                different protocol.
            RefusedError: the server has the secret but does not agree with the claims.
            ChannelClosed: the server closed the connection.
            TimeoutError: the handshake took more than 2 s, times `patience`.
        """
        async with asyncio.timeout(self._handshake_s):
            hello = auth.hello(__version__, auth.new_nonce(), claims)
            await self._write(hello, [])
            head = await self._read(auth.PREAMBLE_BYTES, [], 0)
            auth.check_preamble(head, __version__)
            rest = await self._read(auth.ANSWER_BYTES - auth.PREAMBLE_BYTES, [], 0)
            nonce, proof = rest[: auth.NONCE_BYTES], rest[auth.NONCE_BYTES :]
            session = auth.Session.derive(secret, hello, head + nonce)
            auth.check_proof("server", session.server_proof, proof)
            await self._write(session.client_proof, [])
            self._authenticated(session, claims)
            self._send = auth.Sealer(session.client_key)
            self._receive = auth.Sealer(session.server_key)
            verdict = await self.receive()
            if verdict.get("ok") is not True:
                raise auth.RefusedError(f"{verdict.get('why')!s:.500}")

    async def handshake_as_server(self, secret: bytes) -> dict[str, Any]:
        """Checks the client, proves this side's identity, returns the client's claims.

        The caller must compare the claims with the expected ones, then `accept` or
        `refuse`.

        Raises:
            AuthenticationError, ChannelClosed, TimeoutError: as for the client.
        """
        async with asyncio.timeout(self._handshake_s):
            # Read the magic first: other protocols are refused after eight bytes.
            head = await self._read(len(auth.MAGIC), [], 0)
            if head != auth.MAGIC:
                raise AuthenticationError("the received bytes are not a tfdist hello")
            own = auth.preamble(__version__)
            head += await self._read(auth.PREAMBLE_BYTES - len(head), [], 0)
            try:
                auth.check_preamble(head, __version__)
            except AuthenticationError:
                await self._write(
                    own, []
                )  # so that the other side can report both versions
                raise
            head += await self._read(auth.HELLO_BYTES - len(head), [], 0)
            length = int.from_bytes(head[-2:], "big")
            if length > auth.MAX_CLAIMS_BYTES:
                raise AuthenticationError(
                    f"the claims of a hello have {length} bytes, at most "
                    f"{auth.MAX_CLAIMS_BYTES} are allowed"
                )
            body = await self._read(length, [], 0)
            answer = own + auth.new_nonce()
            session = auth.Session.derive(secret, head + body, answer)
            await self._write(answer + session.server_proof, [])
            proof = await self._read(auth.MAC_BYTES, [], 0)
            auth.check_proof("client", session.client_proof, proof)
            self._send = auth.Sealer(session.server_key)
            self._receive = auth.Sealer(session.client_key)
            self._authenticated(session, auth.decode(body))
            return self.claims

    def _authenticated(self, session: auth.Session, claims: dict[str, Any]) -> None:
        self.claims = claims
        self.link_key = session.link_key

    async def accept(self) -> None:
        """Accepts the client's claims, which completes the handshake."""
        async with asyncio.timeout(self._handshake_s):
            await self.send({"ok": True})

    async def refuse(self, why: str) -> None:
        """Refuses a client that has the secret, and sends it the reason."""
        async with asyncio.timeout(self._handshake_s):
            await self.send({"ok": False, "why": why})


async def connect_channel(
    address: tuple[str, int],
    secret: bytes,
    claims: dict[str, Any],
    deadline: float,
    size: int = 1,
) -> Channel:
    """Connects and authenticates; retries until the server is available.

    Each attempt looks up the host name again, because the name may be registered only
    when the server starts.

    Args:
        address: host and port of the server.
        secret: the job's secret.
        claims: claims of this connection.
        deadline: time limit on the time.monotonic() clock, in seconds.
        size: number of ranks that connect at once.

    Raises:
        RefusedError, AuthenticationError: see `Channel.handshake_as_client`.
        OSError, TimeoutError: there was no server before the deadline.
    """
    loop = asyncio.get_running_loop()
    pause_s = 0.01
    while True:
        try:
            async with asyncio.timeout_at(loop.time() + deadline - time.monotonic()):
                return await _try_to_connect(address, secret, claims, size)
        except (OSError, TimeoutError):
            if time.monotonic() + pause_s >= deadline:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


async def _try_to_connect(
    address: tuple[str, int], secret: bytes, claims: dict[str, Any], size: int
) -> Channel:
    """Connects to the first address of the name that answers, and authenticates."""
    found = await _resolve(address)
    for family, kind, proto, _, resolved in found[:-1]:
        channel = Channel(socket.socket(family, kind, proto), size=size)
        with contextlib.suppress(OSError):
            return await _connected(channel, resolved, secret, claims)
    family, kind, proto, _, resolved = found[-1]
    channel = Channel(socket.socket(family, kind, proto), size=size)
    return await _connected(channel, resolved, secret, claims)


async def _resolve(address: tuple[str, int]) -> list[Any]:
    """Returns the addresses of a host, as `socket.getaddrinfo`.

    asyncio looks up names in a thread, and Python starts no threads while it exits,
    which is when a rank reports its failure. An IP address needs no thread.
    """
    kind = socket.SOCK_STREAM
    try:
        return socket.getaddrinfo(*address, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        return await loop.getaddrinfo(*address, type=kind)


async def _connected(
    channel: Channel, resolved: Any, secret: bytes, claims: dict[str, Any]
) -> Channel:
    loop = asyncio.get_running_loop()
    try:
        # If the client connects to itself (see below), the server must still be able to
        # bind the port.
        channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await loop.sock_connect(channel.sock, resolved)
        if connected_to_itself(channel.sock):
            raise ConnectionRefusedError("no process listens on this port")
        channel.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await channel.handshake_as_client(secret, claims)
    except BaseException:
        channel.close()
        raise
    return channel
