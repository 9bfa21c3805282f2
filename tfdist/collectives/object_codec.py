"""Encodes plain data as bytes: None, numbers, text, arrays, and structures of these.

The format is msgpack, with bounds on depth, items and bytes. Other objects raise an
error that shows where they are in the structure. No code is ever sent.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np
import tensorflow as tf

MAX_DEPTH = 16
MAX_ITEMS = 100_000
MAX_BYTES = 1 << 20

# msgpack extension types.
_TUPLE, _ARRAY, _SCALAR = 1, 2, 3
_DTYPE = re.compile(r"[<>|=](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32))\Z")
# TensorFlow dtypes that have no NumPy code ("<V1"), or whose code NumPy cannot read
# ("<f1"). They are sent by name. Each is a dtype of all supported TensorFlow versions.
_BY_NAME = {
    dtype.name: np.dtype(dtype.as_numpy_dtype)
    for dtype in (
        tf.bfloat16,
        tf.dtypes.experimental.float8_e5m2,
        tf.dtypes.experimental.float8_e4m3fn,
        tf.dtypes.experimental.int4,
        tf.dtypes.experimental.uint4,
    )
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def encode(obj: Any, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Encodes plain data as bytes.

    Args:
        obj: None, bool, int (64 bits), float, str, bytes, NumPy array or scalar of
            numbers (also bfloat16, float8_e5m2, float8_e4m3fn, int4, uint4), or a list,
            tuple or dict of these. At most 16 levels deep and 100,000 items, or one
            item for every 16 of `max_bytes` if these are more.
        max_bytes: largest size of the result, in bytes; default 1 MiB.

    Returns:
        The bytes, for `decode`.

    Raises:
        TypeError: an object is not plain data; the message shows where it is.
        ValueError: too many levels, items or bytes.

    Example:
        >>> decode(encode({"step": 3, "shape": (2, 2)}))
        {'step': 3, 'shape': (2, 2)}
    """
    packer = _Packer(_max_items(max_bytes))
    data = msgpack.packb(packer.plain(obj, "object", 0), use_bin_type=True)
    if len(data) > max_bytes:
        raise ValueError(
            f"Expected an object of at most {max_bytes} bytes, got {len(data)} bytes. "
            "Raise max_bytes on all ranks, or send arrays with tfdist.broadcast() or "
            "tfdist.allgather()."
        )
    return data


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """Decodes bytes from `encode`, with the same bounds.

    Raises:
        ValueError: the bytes are not an encoded object, or exceed a bound.
    """
    if len(data) > max_bytes:
        raise ValueError(f"Expected at most {max_bytes} bytes, got {len(data)} bytes.")
    try:
        return _Unpacker(max_bytes).value(data, 0)
    except (msgpack.exceptions.UnpackException, RecursionError, TypeError) as error:
        raise ValueError(f"Expected an encoded object, got: {error}") from None


def _max_items(max_bytes: int) -> int:
    return max(MAX_ITEMS, max_bytes // 16)


class _Packer:
    """Converter of plain data to msgpack's types; checks the bounds."""

    def __init__(self, max_items: int) -> None:
        self._items = 0
        self._max_items = max_items

    def plain(self, obj: Any, path: str, depth: int) -> Any:
        self._items += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"Expected at most {MAX_DEPTH} levels, got more: {path}.")
        if self._items > self._max_items:
            raise ValueError(
                f"Expected at most {self._max_items} items, got more: {path}."
            )
        kind = type(obj)
        if kind in (type(None), bool, float, bytes):
            return obj
        if kind is int:
            return self._integer(obj, path)
        if kind is str:
            return self._text(obj, path)
        if kind is list:
            return [self.plain(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(obj)]
        if kind is tuple:
            inner = [
                self.plain(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(obj)
            ]
            return msgpack.ExtType(_TUPLE, msgpack.packb(inner, use_bin_type=True))
        if kind is dict:
            return {
                self._key(k, path): self.plain(v, f"{path}[{k!r}]", depth + 1)
                for k, v in obj.items()
            }
        # Subclasses are rejected: they have more than numbers, e.g. a mask.
        if kind in (np.ndarray, np.memmap):
            return msgpack.ExtType(_ARRAY, _pack_array(obj, path))
        if isinstance(obj, np.generic) and kind is obj.dtype.type:
            return msgpack.ExtType(_SCALAR, _pack_array(np.asarray(obj), path))
        raise TypeError(_refusal(obj, path))

    def _key(self, key: Any, path: str) -> Any:
        if type(key) not in (str, bytes, int, float, bool, type(None)):
            raise TypeError(
                f"Expected keys of type str, bytes, int, float, bool or None in {path},"
                f" got {type(key).__name__}: {key!r}."
            )
        return self.plain(key, f"the key {key!r} of {path}", 0)

    def _integer(self, value: int, path: str) -> int:
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(
                f"Expected an integer of 64 bits at {path}, got {value}. Send it as a "
                "string."
            )
        return value

    def _text(self, value: str, path: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Expected valid Unicode at {path}, got: {error}."
            ) from None
        return value


def _refusal(obj: Any, path: str) -> str:
    if isinstance(obj, tf.Tensor | tf.Variable) or hasattr(obj, "numpy"):
        advice = "use tfdist.broadcast() or allgather(), or pass its numpy()"
    elif isinstance(obj, np.ndarray):
        advice = (
            "send np.asarray() of it, and any other contents (a mask, names of fields)"
            " separately"
        )
    else:
        advice = (
            "send plain data (numbers, str, bytes, list, tuple, dict, NumPy arrays) and"
            " build the object from it on the receiving ranks"
        )
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    return f"Expected plain data at {path}, got {kind}: {advice}."


def _pack_array(array: np.ndarray, path: str) -> bytes:
    if not can_encode(array.dtype):
        raise TypeError(
            f"Expected an array of numbers at {path}, got dtype {array.dtype}. Use a "
            "list for strings and objects; cast numbers to a NumPy type, bfloat16, "
            "float8_e5m2, float8_e4m3fn, int4 or uint4."
        )
    name = _NAMES.get(array.dtype) or array.dtype.str
    return msgpack.packb([name, list(array.shape), array.tobytes()], use_bin_type=True)


def can_encode(dtype: np.dtype) -> bool:
    """Returns whether arrays of this type can be encoded.

    Example:
        >>> from tfdist.collectives.object_codec import can_encode
        >>> can_encode(np.dtype("f4")), can_encode(np.dtype("U1"))
        (True, False)
    """
    return _is_known(_NAMES.get(dtype) or dtype.str)


def _is_known(name: str) -> bool:
    return name in _BY_NAME or bool(_DTYPE.match(name))


class _Unpacker:
    """Decoder that checks the bounds again: the sender may run a different version."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_items = _max_items(max_bytes)

    def value(self, data: bytes, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:  # contents of a tuple or array at the last level
            raise ValueError(f"Expected at most {MAX_DEPTH} levels, got more.")
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            ext_hook=lambda code, body: self._extension(code, body, depth),
            max_array_len=self._max_items,
            max_map_len=self._max_items,
            max_str_len=self._max_bytes,
            max_bin_len=self._max_bytes,
            max_ext_len=self._max_bytes,
        )

    def _extension(self, code: int, body: bytes, depth: int) -> Any:
        if code == _TUPLE:
            return tuple(self.value(body, depth + 1))
        if code in (_ARRAY, _SCALAR):
            name, shape, raw = self.value(body, depth + 1)
            array = _unpack_array(name, shape, raw)
            return array if code == _ARRAY else array[()]
        raise ValueError(f"Expected an extension type of 1..3, got {code}.")


def _unpack_array(name: Any, shape: Any, raw: Any) -> np.ndarray:
    if not isinstance(name, str) or not _is_known(name):
        raise ValueError(f"Expected the dtype of an array of numbers, got {name!r}.")
    dtype = _BY_NAME[name] if name in _BY_NAME else np.dtype(name)
    if any(type(dim) is not int or dim < 0 for dim in shape) or (
        math.prod(shape) * dtype.itemsize != len(raw)
    ):
        raise ValueError(f"Expected {shape} items of {name}, got {len(raw)} bytes.")
    return np.frombuffer(raw, dtype).reshape(shape).copy()
