"""Byte streams in both directions between tfdistrun and its agents on other hosts.

`SshConnection` starts a command, by default ssh, and uses its standard streams.
`SealedConnection` uses a TCP socket, after the handshake of `core.rendezvous.auth`. An
agent that was started through ssh uses a plain `Connection` over its standard streams.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from typing import Any

from tfdist.core.rendezvous.auth import MAC_BYTES, AuthenticationError, Sealer

_READ_BYTES = 256 << 10
_LENGTH_BYTES = 4
_MOST_SEALED_BYTES = 256 << 10  # of data in one message
_EXIT_S = 0.5
# A dead connection on which nothing is sent ends after 20 s.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
}


class Connection:
    """A connection over two descriptors, which are made non-blocking.

    Args:
        reading: descriptor from which bytes are read.
        writing: descriptor to which bytes are written.

    Attributes:
        reading, writing: the descriptors.
        waiting: bytes that are queued, and not written yet.
        errors: descriptor from which messages for the user are read; None if there is
            none.
        pid: ID of the process that runs the command; None if there is none.
    """

    errors: int | None = None
    pid: int | None = None

    def __init__(self, reading: int, writing: int) -> None:
        self.reading = reading
        self.writing = writing
        self.waiting = bytearray()
        for fd in (reading, writing):
            os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        """Queues bytes for `flush`."""
        self.waiting += data

    def flush(self) -> None:
        """Writes as many of the queued bytes as the descriptor accepts.

        Raises:
            OSError: the connection is broken.
        """
        try:
            while self.waiting:
                del self.waiting[: os.write(self.writing, self.waiting[:_READ_BYTES])]
        except BlockingIOError:
            return

    def receive(self) -> bytes:
        """Returns the bytes that have arrived; b"" at the end of the connection.

        Raises:
            BlockingIOError: nothing has arrived.
            OSError: the connection is broken.
        """
        return os.read(self.reading, _READ_BYTES)


class AgentConnection(Connection):
    """The connection on tfdistrun's side, which decides when the connection ends."""

    def interrupt(self) -> None:
        """Ends the connection to an agent that takes too long to be ready."""

    def kill(self) -> None:
        """Ends the connection at once."""

    def wait(self) -> str:
        """Waits briefly until the command exits; returns how it ended, or ""."""
        return ""

    def close(self) -> None:
        """Closes the descriptors."""


class SshConnection(AgentConnection):
    """The standard streams of a command that runs a line on another host.

    Args:
        command: program and arguments, for example of ssh.
        host: name of the other host.
        line: command line for a shell on the other host.

    Raises:
        OSError: no process or descriptor is available.
    """

    errors: int
    pid: int

    def __init__(self, command: list[str], host: str, line: str) -> None:
        self._process = subprocess.Popen(
            [*command, host, line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is passed on as a message
            bufsize=0,
        )
        own = self._process
        pipes = (own.stdin, own.stdout, own.stderr)
        stdin, stdout, self.errors = (_descriptor(pipe) for pipe in pipes)
        os.set_blocking(self.errors, False)
        self.pid = own.pid
        super().__init__(stdout, stdin)

    def interrupt(self) -> None:
        """Ends the command with SIGTERM; ssh then reports what it was waiting for."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the command."""
        self._process.kill()

    def wait(self) -> str:
        """Waits until the command exits, and kills it after 0.5 s.

        Returns:
            How the command ended, for a message; "" if it was killed here.
        """
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2.0)
            return ""
        return f" with exit code {code}" if code >= 0 else f" by signal {-code}"

    def close(self) -> None:
        """Closes the descriptors; call `wait` first."""
        for fd in (self.writing, self.reading, self.errors):
            os.close(fd)


class SealedConnection(AgentConnection):
    """A TCP connection whose messages carry a MAC; the handshake is complete.

    A message is a length (4 bytes, big endian) followed by that many bytes: the MAC,
    which also covers the message's sequence number, and at most 256 KiB of data.

    Args:
        sock: the socket, which the connection owns.
        sending: seals the messages that this side sends.
        receiving: checks the messages that this side receives.
    """

    def __init__(self, sock: socket.socket, sending: Sealer, receiving: Sealer) -> None:
        self._sock = sock
        # Short messages must be sent at once, and not wait for acknowledgments.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = sending
        self._receiving = receiving
        self._arrived = bytearray()
        # With a second descriptor, a selector can wait for reading and writing
        # separately.
        super().__init__(sock.fileno(), os.dup(sock.fileno()))

    def send(self, data: bytes) -> None:
        """Queues bytes, as sealed messages."""
        for begin in range(0, len(data), _MOST_SEALED_BYTES):
            part = bytes(data[begin : begin + _MOST_SEALED_BYTES])
            message = self._sending.seal(part)
            self.waiting += len(message).to_bytes(_LENGTH_BYTES, "big") + message

    def receive(self) -> bytes:
        """Returns the data of all messages that are complete.

        Raises:
            BlockingIOError: no message is complete.
            OSError: the connection is broken, or a message was changed on its way.
        """
        data = super().receive()
        if not data:
            return b""
        self._arrived += data
        found = bytearray()
        while len(self._arrived) >= _LENGTH_BYTES:
            length = int.from_bytes(self._arrived[:_LENGTH_BYTES], "big")
            if length > MAC_BYTES + _MOST_SEALED_BYTES:
                raise ConnectionError(
                    f"expected at most {MAC_BYTES + _MOST_SEALED_BYTES} bytes in a "
                    f"message, got {length}"
                )
            end = _LENGTH_BYTES + length
            if len(self._arrived) < end:
                break
            try:
                found += self._receiving.open(bytes(self._arrived[_LENGTH_BYTES:end]))
            except AuthenticationError as error:
                raise ConnectionError(str(error)) from error
            del self._arrived[:end]
        if not found:
            raise BlockingIOError
        return bytes(found)

    def interrupt(self) -> None:
        """Ends the connection at once."""
        self.kill()

    def finish(self, limit_s: float) -> None:
        """Sends the queued bytes, then ends the connection once they have arrived.

        The socket must not be closed earlier: if received data is unread when a socket
        is closed, the system discards data that it has not delivered yet.

        Args:
            limit_s: seconds to wait until the other side also ends the connection.
        """
        deadline = time.monotonic() + limit_s
        try:
            self._sock.settimeout(limit_s)
            self._sock.sendall(self.waiting)
            self._sock.shutdown(socket.SHUT_WR)
            while (left_s := deadline - time.monotonic()) > 0:
                self._sock.settimeout(left_s)
                if not self._sock.recv(_READ_BYTES):
                    break
        except OSError:  # the other side has ended the connection, or does not answer
            pass
        self.close()

    def kill(self) -> None:
        """Ends the connection at once; data that the socket has accepted still arrives.

        Queued data that the socket does not accept at once is lost.
        """
        try:
            self.flush()
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # it is broken
            return

    def close(self) -> None:
        """Closes the descriptors, if they are open."""
        if self._sock.fileno() >= 0:
            os.close(self.writing)
            self._sock.close()


def watch_for_loss(sock: socket.socket) -> None:
    """Enables TCP keep-alive, to detect that the other side has disappeared."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _descriptor(pipe: Any) -> int:
    """Returns a duplicate descriptor, which the Popen object does not close."""
    fd = os.dup(pipe.fileno())
    pipe.close()
    return fd
