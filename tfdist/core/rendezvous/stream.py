"""Sends messages with large data over an authenticated socket, for use by threads.

After the handshake (`core.rendezvous.channel`), both sides use blocking calls. A
message has the same form as in `channel`: a length, a MAC, JSON. Data may follow, with
a separate MAC; the message states their size. So the size is authenticated before
memory is allocated, and the data are authenticated before they are used. Between two
processes on one host, data have no MAC, as in shared memory: no other process can write
to their AF_UNIX connection.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.auth import AuthenticationError
from tfdist.core.rendezvous.channel import MAX_BYTES_AFTER_AUTH, Channel, ChannelClosed

_LENGTH_BYTES = 4
_MOST_BUFFERS = 512  # for one sendmsg; the kernel allows 1024
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """One end of a connection. One thread may send while another thread receives.

    Args:
        channel: channel after its handshake; the stream then owns its socket.
        send_timeout_s: time in seconds after which `send` fails if the other side reads
            nothing.
    """

    def __init__(self, channel: Channel, *, send_timeout_s: float) -> None:
        self._sock, self._sealer, self._opener = channel.release()
        self._sock.setblocking(True)
        self._local = self._sock.family == socket.AF_UNIX
        seconds = int(send_timeout_s)
        limit = struct.pack("ll", seconds, int((send_timeout_s - seconds) * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if not self._local:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _streams.add(self)

    def send(self, message: dict[str, Any], data: Sequence[memoryview] = ()) -> None:
        """Sends a message, followed by the bytes of `data`.

        Raises:
            OSError: the connection has ended, or the other side reads nothing.
        """
        body = self._sealer.seal(auth.encode(message))
        if len(body) > MAX_BYTES_AFTER_AUTH:
            raise ValueError(f"a message of {len(body)} bytes is too long")
        parts = [memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)]
        if data:
            mac = b"" if self._local else self._sealer.mac_of(data)
            parts += [*data, memoryview(mac)]
        self._write(parts)

    def _write(self, parts: list[memoryview]) -> None:
        first = 0
        while first < len(parts):
            sent = self._sock.sendmsg(parts[first : first + _MOST_BUFFERS])
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]

    def has_input(self, timeout_s: float) -> bool:
        """Waits for a message or the end of the connection; False on timeout."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def receive(self) -> dict[str, Any]:
        """Waits for the next message.

        Raises:
            OSError: the connection has ended.
            AuthenticationError: the message is forged, repeated or too long.
        """
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > MAX_BYTES_AFTER_AUTH:
            raise AuthenticationError(
                f"a message of {length} bytes is above the limit of "
                f"{MAX_BYTES_AFTER_AUTH}"
            )
        return auth.decode(self._opener.open(self._read(length)))

    def receive_data(self, room: memoryview) -> None:
        """Reads the data after a message into the buffer `room`, of the same length.

        Raises:
            OSError: the connection has ended.
            AuthenticationError: the bytes are not the bytes that were sent.
        """
        self._fill(room)
        if self._local:
            return
        if not hmac.compare_digest(
            self._opener.mac_of([room]), self._read(auth.MAC_BYTES)
        ):
            raise AuthenticationError("data are forged or out of order")

    def _read(self, count: int) -> bytes:
        room = bytearray(count)
        self._fill(memoryview(room))
        return bytes(room)

    def _fill(self, room: memoryview) -> None:
        while room:
            count = self._sock.recv_into(room)
            if not count:
                raise ChannelClosed("the connection was closed by the other side")
            room = room[count:]

    def hang_up(self) -> None:
        """Ends the connection and wakes a waiting thread. Called from any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side ended it first

    def close(self) -> None:
        """Closes the socket. Called by the thread that receives."""
        self.hang_up()
        self._sock.close()

    def abandon(self) -> None:
        """Closes the descriptor in a forked child; the parent keeps the connection."""
        self._sock.close()


def _abandon_all() -> None:
    for stream in list(_streams):
        stream.abandon()


os.register_at_fork(after_in_child=_abandon_all)
