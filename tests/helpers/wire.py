"""Messages between a test and its worker processes: msgpack with NumPy arrays."""

from __future__ import annotations

import socket
import struct
from typing import Any

import ml_dtypes  # noqa: F401  gives NumPy the type "bfloat16"
import msgpack
import numpy as np

_LENGTH = struct.Struct("<Q")
_ARRAY = "__array__"


def send(channel: socket.socket, message: Any) -> None:
    """Sends one message."""
    body = msgpack.packb(message, default=_pack, strict_types=True)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> Any:
    """Receives one message; EOFError when the other end is gone."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    return msgpack.unpackb(
        _read(channel, length), object_hook=_unpack, strict_map_key=False
    )


def _read(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count > 0:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other end of the channel is closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return {_ARRAY: [array.dtype.name, list(array.shape), array.tobytes()]}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, int):  # an enumeration
        return int(value)
    raise TypeError(f"cannot send a {type(value).__name__} between processes")


def _unpack(value: dict[Any, Any]) -> Any:
    if _ARRAY not in value:
        return value
    dtype, shape, data = value[_ARRAY]
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
