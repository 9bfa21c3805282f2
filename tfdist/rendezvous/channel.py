"""Framed, authenticated messages over one non-blocking stream socket.

A frame is a 4-byte length (big endian) and that many bytes: JSON during the handshake
(at most 64 KiB), MAC and JSON after it (at most 1 MiB). Reads never go past the
frame that was asked for, so the socket can be handed to the core afterwards.
Descriptors travel beside a frame over AF_UNIX sockets (SCM_RIGHTS).
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from typing import Any

from tfdist.rendezvous import auth
from tfdist.rendezvous.auth import AuthenticationError

MAX_BYTES_BEFORE_AUTH = 64 << 10
MAX_BYTES_AFTER_AUTH = 1 << 20
HANDSHAKE_TIMEOUT_S = 2.0
_MAGIC = "tfdist"
_LENGTH_BYTES = 4
_FD_BYTES = array.array("i").itemsize


class ChannelClosed(ConnectionError):
    """The other side closed the connection."""


def close_all(fds: list[int]) -> None:
    """Closes descriptors that nobody took."""
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
    """One end of a connection; owns the socket until `detach` or `close`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.purpose = ""
        self._send: auth.Sealer | None = None
        self._receive: auth.Sealer | None = None

    def close(self) -> None:
        """Closes the socket; harmless when it is closed or detached."""
        self.sock.close()

    def detach(self) -> int:
        """Gives the descriptor away."""
        return self.sock.detach()

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
                    whole = len(body) - len(body) % _FD_BYTES
                    fds.extend(array.array("i", body[:whole]))
            if flags & socket.MSG_CTRUNC:
                raise AuthenticationError("a message brought too many descriptors")
            if not part:
                raise ChannelClosed("the connection was closed by the other side")
            data += part
        return bytes(data)

    async def _send_frame(self, body: bytes, fds: list[int]) -> None:
        await self._write(len(body).to_bytes(_LENGTH_BYTES, "big") + body, fds)

    async def _receive_frame(self, fds: list[int], max_fds: int) -> bytes:
        limit = MAX_BYTES_AFTER_AUTH if self._receive else MAX_BYTES_BEFORE_AUTH
        header = await self._read(_LENGTH_BYTES, fds, max_fds)
        length = int.from_bytes(header, "big")
        if length > limit:
            raise AuthenticationError(
                f"a message of {length} bytes is above the limit of {limit}"
            )
        return await self._read(length, fds, max_fds)

    async def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Sends a message after the handshake, with descriptors beside it."""
        if self._send is None:
            raise AuthenticationError("the handshake is not complete")
        body = auth.encode(message)
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

    async def handshake_as_client(self, secret: bytes, purpose: str) -> None:
        """Proves this side, checks the other one.

        Raises:
            AuthenticationError: the server does not know the secret, or speaks
                another protocol.
            ChannelClosed: the server refused.
            TimeoutError: not done within 2 s.
        """
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            nonce = auth.new_nonce()
            hello = {
                "magic": _MAGIC,
                "protocol": auth.PROTOCOL,
                "purpose": purpose,
                "nonce": nonce.hex(),
            }
            await self._send_frame(auth.encode(hello), [])
            answer = auth.decode(await self._receive_frame([], 0))
            if answer.get("protocol") != auth.PROTOCOL:
                raise AuthenticationError(
                    f"the other side speaks protocol {answer.get('protocol')!r:.20}, "
                    f"this tfdist speaks {auth.PROTOCOL}; install the same version "
                    "on all hosts"
                )
            other = auth.decode_bytes(answer, "nonce", auth.NONCE_BYTES)
            seen = auth.transcript(purpose, nonce, other)
            received = auth.decode_bytes(answer, "proof", auth.MAC_BYTES)
            auth.check_proof(secret, "server", seen, received)
            mine = {"proof": auth.proof(secret, "client", seen).hex()}
            await self._send_frame(auth.encode(mine), [])
            self._send, self._receive = auth.sealers(secret, seen)
            self.purpose = purpose
            if (await self.receive()).get("ok") is not True:
                raise AuthenticationError("the other side refused the connection")

    async def handshake_as_server(self, secret: bytes) -> str:
        """Checks the client, proves this side; returns the client's purpose.

        The caller must compare the purpose with what it expects, then `accept`.

        Raises:
            AuthenticationError, ChannelClosed, TimeoutError: as for the client.
        """
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            hello = auth.decode(await self._receive_frame([], 0))
            if hello.get("magic") != _MAGIC:
                raise AuthenticationError("this is not a hello of tfdist")
            if hello.get("protocol") != auth.PROTOCOL:
                await self._send_frame(auth.encode({"protocol": auth.PROTOCOL}), [])
                raise AuthenticationError(
                    f"the client speaks protocol {hello.get('protocol')!r:.20}, "
                    f"this tfdist speaks {auth.PROTOCOL}"
                )
            purpose = hello.get("purpose")
            if not isinstance(purpose, str):
                raise AuthenticationError("the hello names no purpose")
            other = auth.decode_bytes(hello, "nonce", auth.NONCE_BYTES)
            nonce = auth.new_nonce()
            seen = auth.transcript(purpose, other, nonce)
            answer = {
                "protocol": auth.PROTOCOL,
                "nonce": nonce.hex(),
                "proof": auth.proof(secret, "server", seen).hex(),
            }
            await self._send_frame(auth.encode(answer), [])
            mine = auth.decode(await self._receive_frame([], 0))
            received = auth.decode_bytes(mine, "proof", auth.MAC_BYTES)
            auth.check_proof(secret, "client", seen, received)
            self._receive, self._send = auth.sealers(secret, seen)
            self.purpose = purpose
            return purpose

    async def accept(self) -> None:
        """Tells the client that its purpose is welcome; ends the handshake."""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await self.send({"ok": True})
