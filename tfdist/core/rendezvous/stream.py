"""Messages with much data beside them, over an authenticated socket, for threads.

After the handshake (`core.rendezvous.channel`) both sides use blocking calls. A message
has the same form as there: a length, a MAC, JSON. Data may follow, with a MAC of their
own; the message has their size. So the size is authenticated before memory is
allocated, and the data are authenticated before they are used. Between two processes of
one host, as in shared memory, data have no MAC: no other process can write to an
AF_UNIX socket.
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
_MOST_BUFFERS = 512  # of one sendmsg; the kernel allows 1024
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """One end of a connection. One thread may send while another receives.

    Args:
        channel: after its handshake; the stream owns its socket from here on.
        send_timeout_s: seconds for which the other side may take nothing.
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
        """Sends a message, and bytes behind it.

        Raises:
            OSError: the connection has ended, or the other side takes nothing.
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
        """Waits for a message or the end; False if none has come in time."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def receive(self) -> dict[str, Any]:
        """Waits for the next message.

        Raises:
            OSError: the connection has ended.
            AuthenticationError: what came is forged, repeated or too long.
        """
        length = int.from_bytes(self._read(_LENGTH_BYTES), "big")
        if length > MAX_BYTES_AFTER_AUTH:
            raise AuthenticationError(
                f"a message of {length} bytes is above the limit of "
                f"{MAX_BYTES_AFTER_AUTH}"
            )
        return auth.decode(self._opener.open(self._read(length)))

    def receive_data(self, room: memoryview) -> None:
        """Waits for the bytes behind a message; `room` is as long as they are.

        Raises:
            OSError: the connection has ended.
            AuthenticationError: they are not the bytes that were sent.
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
        """Ends the connection, also for a thread that waits for it. From any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first

    def close(self) -> None:
        """Closes the socket; by the thread that receives."""
        self.hang_up()
        self._sock.close()

    def abandon(self) -> None:
        """Closes the descriptor of a forked child; the parent's connection goes on."""
        self._sock.close()


def _abandon_all() -> None:
    for stream in list(_streams):
        stream.abandon()


os.register_at_fork(after_in_child=_abandon_all)
