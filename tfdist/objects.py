"""broadcast_object, allgather_object: small Python values between ranks.

Values travel as msgpack with bounds on depth, items and bytes. No code travels:
what is not plain data is refused with its place in the object.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np
import tensorflow as tf

from tfdist import _runtime, collectives, errors
from tfdist._process_sets import ProcessSet, check_root, members_of

MAX_DEPTH = 16
MAX_ITEMS = 100_000
MAX_BYTES = 1 << 20

# msgpack extension types.
_TUPLE, _ARRAY, _SCALAR = 1, 2, 3
_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}\Z|bfloat16\Z")
_HEADER_WORDS = 3  # rank, status, length in bytes
_OK, _REFUSED = 0, 1


def encode(obj: Any, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Turns plain data into bytes.

    Args:
        obj: None, bool, int (64 bits), float, str, bytes, NumPy array or scalar of
            numbers, or list, tuple, dict of such; at most 16 deep, 100,000 items.
        max_bytes: bound on the result, in bytes; default 1 MiB.

    Returns:
        The bytes, for `decode`.

    Raises:
        TypeError: something else; the message names its place.
        ValueError: too deep, too many items, or too many bytes.

    Example:
        >>> decode(encode({"step": 3, "shape": (2, 2)}))
        {'step': 3, 'shape': (2, 2)}
    """
    data = msgpack.packb(_Packer().plain(obj, "object", 0), use_bin_type=True)
    if len(data) > max_bytes:
        raise ValueError(
            f"Expected an object of at most {max_bytes} bytes, got {len(data)} bytes. "
            "Raise max_bytes on all ranks, or send arrays with tfdist.broadcast() or "
            "tfdist.allgather()."
        )
    return data


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """Turns bytes of `encode` back into the value, with the same bounds.

    Raises:
        ValueError: the bytes are no such value, or exceed a bound.
    """
    if len(data) > max_bytes:
        raise ValueError(f"Expected at most {max_bytes} bytes, got {len(data)} bytes.")
    try:
        return _Unpacker(max_bytes).value(data, 0)
    except (msgpack.exceptions.UnpackException, RecursionError, TypeError) as error:
        raise ValueError(f"Expected an encoded object, got: {error}") from None


class _Packer:
    """Replaces tuples and arrays by extension types and checks the bounds."""

    def __init__(self) -> None:
        self._items = 0

    def plain(self, obj: Any, path: str, depth: int) -> Any:
        self._items += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"Expected at most {MAX_DEPTH} levels, got more: {path}.")
        if self._items > MAX_ITEMS:
            raise ValueError(f"Expected at most {MAX_ITEMS} items, got more: {path}.")
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
        if isinstance(obj, np.ndarray):
            return msgpack.ExtType(_ARRAY, _pack_array(obj, path))
        if isinstance(obj, np.generic):
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
    else:
        advice = (
            "send plain data (numbers, str, bytes, list, tuple, dict, NumPy arrays) and"
            " build the object from it on the other side"
        )
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    return f"Expected plain data at {path}, got {kind}: {advice}."


def _pack_array(array: np.ndarray, path: str) -> bytes:
    name = "bfloat16" if array.dtype.name == "bfloat16" else array.dtype.str
    if not _DTYPE.match(name):
        raise TypeError(
            f"Expected an array of numbers at {path}, got dtype {array.dtype}. Use a "
            "list for strings and objects."
        )
    return msgpack.packb([name, list(array.shape), array.tobytes()], use_bin_type=True)


class _Unpacker:
    """The way back, with the bounds checked again: peers may be of another version."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def value(self, data: bytes, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"Expected at most {MAX_DEPTH} levels, got more.")
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            ext_hook=lambda code, body: self._extension(code, body, depth),
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
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
    if not isinstance(name, str) or not _DTYPE.match(name):
        raise ValueError(f"Expected the dtype of an array of numbers, got {name!r}.")
    dtype = tf.bfloat16.as_numpy_dtype if name == "bfloat16" else name
    itemsize = np.dtype(dtype).itemsize
    if any(type(dim) is not int or dim < 0 for dim in shape) or (
        math.prod(shape) * itemsize != len(raw)
    ):
        raise ValueError(f"Expected {shape} items of {name}, got {len(raw)} bytes.")
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def broadcast_object(
    obj: Any = None,
    root: int = 0,
    *,
    name: str | None = None,
    max_bytes: int = MAX_BYTES,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Gives every rank the object of rank `root`.

    Args:
        obj: plain data, see `encode`; looked at on `root` only.
        root: rank whose object all ranks get; default 0.
        name: identifies the call across ranks; default: by its order.
        max_bytes: bound on the encoded object, in bytes; default 1 MiB.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        The object, equal on all ranks; on `root` a copy.

    Raises:
        TypeError: on `root`: the object is not plain data.
        ValueError: on `root`: a bound is exceeded; anywhere: `root` is not a rank, or
            not one of `process_set`.
        tfdist.RankFailedError: a rank failed, or `root` could not send its object.
        tfdist.MismatchError: `root` has joined (`tfdist.join`).

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.broadcast_object({"run": "a7", "seed": 3})
        {'run': 'a7', 'seed': 3}
    """
    check_root(root, process_set)
    sends = _runtime.rank() == root
    objects = _exchange(
        obj, sends, name or "broadcast_object", max_bytes, timeout_s, process_set
    )
    if root not in objects:
        raise errors.MismatchError(
            f"broadcast_object: its root, rank {root}, has joined and has nothing to "
            "broadcast. Take the rank that tfdist.join() returns, when all have joined."
        )
    return objects[root]


def allgather_object(
    obj: Any,
    *,
    name: str | None = None,
    max_bytes: int = MAX_BYTES,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Gives every rank the objects of all ranks.

    Args:
        obj: plain data, see `encode`; may differ between ranks.
        name: identifies the call across ranks; default: by its order.
        max_bytes: bound on each encoded object, in bytes; default 1 MiB.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: the ranks that take part, which alone call it; default all.

    Returns:
        `size()` objects, that of rank r at index r; equal on all ranks. Of a process
        set as many as it has members, in the order of their ranks. None for a rank
        that has joined (`tfdist.join`).

    Raises:
        TypeError: this rank's object is not plain data.
        ValueError: this rank's object exceeds a bound.
        tfdist.RankFailedError: a rank failed, or could not send its object.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.allgather_object({"rank": tfdist.rank()})
        [{'rank': 0}]
    """
    objects = _exchange(
        obj, True, name or "allgather_object", max_bytes, timeout_s, process_set
    )
    return [objects.get(rank) for rank in members_of(process_set)]


def _exchange(
    obj: Any,
    sends: bool,
    name: str,
    max_bytes: int,
    timeout_s: float | None,
    process_set: ProcessSet | None,
) -> dict[int, Any]:
    """One allgather of messages; a refusal travels too, so that nobody waits.

    Returns:
        Rank → its object; without the ranks that have joined.
    """
    refusal: Exception | None = None
    message = b""
    status = _OK
    if sends:
        try:
            message = encode(obj, max_bytes=max_bytes)
        except (TypeError, ValueError) as error:
            refusal, status = error, _REFUSED
            message = str(error).encode("utf-8", "replace")[:4096]
    words = collectives.allgather(
        tf.constant(_to_words(_runtime.rank(), status, message)),
        name=name,
        timeout_s=timeout_s,
        process_set=process_set,
    ).numpy()
    if refusal is not None:
        raise refusal
    objects = {}
    for rank, status, data in _messages(words):
        if status != _OK:
            text = data.decode("utf-8", "replace")
            raise errors.RankFailedError(
                f"rank {rank} could not send its object: {text}",
                errors.ErrorRecord(kind="rank_failed", rank=rank, cause=text),
            )
        objects[rank] = decode(data, max_bytes=max_bytes) if data else None
    return objects


def _to_words(rank: int, status: int, message: bytes) -> np.ndarray:
    header = np.array([rank, status, len(message)], "<i4")
    padded = message + b"\0" * (-len(message) % 4)
    return np.concatenate([header, np.frombuffer(padded, "<i4")]).astype(np.int32)


def _messages(words: np.ndarray) -> list[tuple[int, int, bytes]]:
    """Splits the gathered words: each message says its own length."""
    found = []
    position = 0
    while position < len(words):
        start = position + _HEADER_WORDS
        rank, status, length = (int(word) for word in words[position:start])
        position = start + -(-length // 4)
        data = words[start:position].astype("<i4").tobytes()[:length]
        found.append((rank, status, data))
    return found
