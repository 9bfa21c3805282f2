"""Wire protocol between tfdistrun and its agent on another host.

This module only encodes and decodes: it opens no sockets.

A frame consists of its kind (one byte), a rank and a length (4 bytes each, big endian),
followed by that many bytes: output of a rank, or a JSON object. The agent begins with a
greeting line, which separates the frames from earlier output of the remote shell.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

GREETING = b"tfdist agent 1\n"
STDOUT, STDERR, MESSAGE = b"o", b"e", b"m"
SIGN_OF_LIFE_S = 1.0  # each side sends something at least this often
SILENCE_S = 30.0  # after this time without data, the other side is considered gone
MAX_FRAME_BYTES = 16 << 20
MAX_NOISE_BYTES = 64 << 10
_HEADER = struct.Struct(">cII")


class FrameError(ValueError):
    """Raised when received bytes do not follow the agent protocol."""


@dataclass(frozen=True)
class Frame:
    """One frame; `rank` is used only for output."""

    kind: bytes
    rank: int
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        """Returns the JSON object of a message."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise FrameError("a message is not JSON") from error
        if not isinstance(found, dict):
            raise FrameError("a message is not a JSON object")
        return found


def output(kind: bytes, rank: int, data: bytes) -> bytes:
    """Returns a frame with output of a rank; kind is STDOUT or STDERR."""
    return _HEADER.pack(kind, rank, len(data)) + data


def message(**fields: Any) -> bytes:
    """Returns a frame with a JSON object."""
    body = json.dumps(fields).encode()
    return _HEADER.pack(MESSAGE, 0, len(body)) + body


def _of_terminal(line: bytes) -> bytes:
    """Returns a line as it appears after passing through a terminal."""
    return line.replace(b"\n", b"\r\n")


class Decoder:
    """Decodes frames from the received bytes.

    Args:
        greeting: line that must precede the frames. Bytes before it are kept in the
            attribute `noise`.
    """

    def __init__(self, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.noise = b""
        self._data = bytearray()

    @property
    def greeted(self) -> bool:
        """Whether the greeting has arrived."""
        return not self.greeting

    def feed(self, data: bytes) -> list[Frame]:
        """Adds received bytes; returns the frames that are complete.

        Raises:
            FrameError: a frame is malformed, or the greeting is missing.
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
                    "not create one (ssh without -t, docker exec -i, kubectl exec -i)"
                )
            if len(before) > MAX_NOISE_BYTES:
                raise FrameError(f"{len(before)} bytes arrived, but no greeting")
            self.noise = bytes(before)
            return False
        self.noise = bytes(before)
        self._data = after
        self.greeting = b""
        return True
