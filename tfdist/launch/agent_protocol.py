"""Wire protocol between tfdistrun and its agent on another host.

The module only encodes and decodes: it opens no sockets.

A frame is its kind (one byte), a rank and a length (4 bytes each, big endian), and
that many bytes: what a rank printed, or a JSON object. The agent begins with a line of
its own, so that what a shell prints before it is told apart.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

GREETING = b"tfdist agent 1\n"
STDOUT, STDERR, MESSAGE = b"o", b"e", b"m"
SIGN_OF_LIFE_S = 1.0  # each side says something at least that often;
SILENCE_S = 30.0  # after so long without anything the other side is gone
MAX_FRAME_BYTES = 16 << 20
MAX_NOISE_BYTES = 64 << 10
_HEADER = struct.Struct(">cII")


class FrameError(ValueError):
    """Raised when received bytes do not follow the agent protocol."""


@dataclass(frozen=True)
class Frame:
    """One frame; `rank` has a meaning only for output."""

    kind: bytes
    rank: int
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        """The JSON object of a message."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise FrameError("a message is not JSON") from error
        if not isinstance(found, dict):
            raise FrameError("a message is not a JSON object")
        return found


def output(kind: bytes, rank: int, data: bytes) -> bytes:
    """A frame with what a rank printed; kind is STDOUT or STDERR."""
    return _HEADER.pack(kind, rank, len(data)) + data


def message(**fields: Any) -> bytes:
    """A frame with a JSON object."""
    body = json.dumps(fields).encode()
    return _HEADER.pack(MESSAGE, 0, len(body)) + body


def _of_terminal(line: bytes) -> bytes:
    """A line as a terminal passes it on."""
    return line.replace(b"\n", b"\r\n")


class Decoder:
    """Makes frames of what arrives.

    Args:
        greeting: what must come first; anything before it goes to `noise`.
    """

    def __init__(self, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.noise = b""
        self._data = bytearray()

    @property
    def greeted(self) -> bool:
        """Whether the greeting has come."""
        return not self.greeting

    def feed(self, data: bytes) -> list[Frame]:
        """Takes what came; returns the frames that are complete.

        Raises:
            FrameError: a frame is malformed, or no greeting comes.
        """
        self._data += data
        if self.greeting and not self._skip_noise():
            return []
        found = []
        while len(self._data) >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._data)
            if kind not in (STDOUT, STDERR, MESSAGE) or length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of kind {kind!r} with {length} bytes")
            end = _HEADER.size + length
            if len(self._data) < end:
                break
            found.append(Frame(kind, rank, bytes(self._data[_HEADER.size : end])))
            del self._data[:end]
        return found

    def _skip_noise(self) -> bool:
        before, greeting, after = self._data.partition(self.greeting)
        if not greeting:
            before, greeting, _ = self._data.partition(_of_terminal(self.greeting))
            if greeting:
                self.noise = bytes(before)
                raise FrameError(
                    "it came through a terminal, which changes it; the command must "
                    "make none (ssh without -t, docker exec -i, kubectl exec -i)"
                )
            if len(before) > MAX_NOISE_BYTES:
                raise FrameError(f"{len(before)} bytes came, but no greeting")
            self.noise = bytes(before)
            return False
        self.noise = bytes(before)
        self._data = after
        self.greeting = b""
        return True
