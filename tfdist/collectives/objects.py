"""broadcast_object and allgather_object: send small Python objects between ranks.

Only plain data can be sent (`collectives.object_codec`), unless all ranks have set
TFDIST_OBJECTS=pickle (`core.pickling`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import collectives, errors
from tfdist.collectives.object_codec import MAX_BYTES, decode, encode
from tfdist.core import pickling, runtime
from tfdist.core.process_sets import ProcessSet, check_root, id_of, members_of

_HEADER_WORDS = 3  # rank, status, length in bytes
_HEADER_MAX_BYTES = (1 << 31) - 1  # largest length that the header can hold
_OK, _REFUSED, _PICKLED = 0, 1, 2
_CHOICE = (
    f"Or set {pickling.VARIABLE}=pickle for all ranks, which may then send any object "
    "(docs/security.md)."
)


def broadcast_object(
    obj: Any = None,
    root: int = 0,
    *,
    name: str | None = None,
    max_bytes: int = MAX_BYTES,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Sends the object of rank `root` to every rank.

    Args:
        obj: plain data (None, bool, int, float, str, bytes, NumPy arrays of numbers,
            and lists, tuples and dicts of these; see
            `tfdist.collectives.object_codec.encode`), or any object if all ranks have
            set `TFDIST_OBJECTS=pickle`. Used on `root` only.
        root: rank whose object is sent; default 0.
        name: operation name; calls with the same name on different ranks are matched.
            Default: calls are matched in program order.
        max_bytes: largest size of the encoded object, in bytes; default 1 MiB, at most
            2 GiB.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        The object, equal on all ranks. On `root`, it is a copy of `obj`.

    Raises:
        TypeError: on `root`, if the object is not plain data or cannot be pickled.
        ValueError: on `root`, if the object has too many bytes, items or levels; on any
            rank, if `root` is not a rank or not in `process_set`, or if this rank
            cannot load the pickled object.
        tfdist.RankFailedError: a rank failed, `root` could not send its object, or
            another rank could not load it.
        tfdist.MismatchError: `root` has joined (`tfdist.join`).
        RuntimeError: called in a `tf.function`.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.broadcast_object({"run": "a7", "seed": 3})
        {'run': 'a7', 'seed': 3}
    """
    check_root(root, process_set)
    sends = runtime.rank() == root
    objects = _exchange(
        obj, sends, name or "broadcast_object", max_bytes, timeout_s, process_set
    )
    if root not in objects:
        raise errors.MismatchError(
            f"broadcast_object: its root, rank {root}, has joined and has nothing to "
            "broadcast. To broadcast after tfdist.join(), use the rank that it returns "
            "as root."
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
    """Sends the objects of all ranks to every rank.

    Args:
        obj: plain data as in `broadcast_object`, or any object if all ranks have set
            `TFDIST_OBJECTS=pickle`. May differ between ranks.
        name: operation name; calls with the same name on different ranks are matched.
            Default: calls are matched in program order.
        max_bytes: largest size of each encoded object, in bytes; default 1 MiB, at most
            2 GiB.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.
        process_set: ranks that take part; only they make the call. Default: all ranks.

    Returns:
        List of `size()` objects, with the object of rank r at index r; equal on all
        ranks. For a process set, one object for each member, in rank order. A rank that
        has joined (`tfdist.join`) has the entry None.

    Raises:
        TypeError: this rank's object is not plain data, or cannot be pickled.
        ValueError: this rank's object has too many bytes, items or levels, or this rank
            cannot load a pickled object.
        tfdist.RankFailedError: a rank failed, could not send its object, or could not
            load the object of another rank.
        RuntimeError: called in a `tf.function`.

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


def gather_from_all(
    obj: Any,
    function: str,
    *,
    name: str,
    max_bytes: int = MAX_BYTES,
    timeout_s: float | None = None,
    process_set: ProcessSet | None = None,
) -> list[Any]:
    """Gathers objects as `allgather_object` does, but raises if a rank has joined.

    Args:
        obj: plain data.
        function: name of the function that the ranks call, for messages.
        name: operation name; calls with the same name on different ranks are matched.
        max_bytes: largest size of each encoded object, in bytes.
        timeout_s: seconds to wait for the slowest rank.
        process_set: ranks that take part.

    Returns:
        The objects in rank order.

    Raises:
        tfdist.MismatchError: on all ranks that call it, if a rank has joined
            (`tfdist.join`).
    """
    objects = _exchange(obj, True, name, max_bytes, timeout_s, process_set)
    for rank in members_of(process_set):
        if rank not in objects:
            text = (
                f"{function}: it needs every rank, and rank {rank} has joined. Call it "
                "on all ranks before the first rank joins, or after tfdist.join() has "
                "returned on all ranks."
            )
            raise errors.MismatchError(
                text,
                errors.ErrorRecord(kind="mismatch", rank=rank, tensor=name, cause=text),
            )
    return [objects[rank] for rank in members_of(process_set)]


def _exchange(
    obj: Any,
    sends: bool,
    name: str,
    max_bytes: int,
    timeout_s: float | None,
    process_set: ProcessSet | None,
) -> dict[int, Any]:
    """Gathers one message from each rank: its object, or the reason it cannot be sent.

    If an object was pickled, a second allgather reports whether all ranks could load
    it.

    Returns:
        Rank → object, for all ranks that have not joined.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{name}: Python objects cannot be sent in a tf.function, whose values are "
            "not known while it is traced. Make this call outside of the tf.function, "
            "or send tensors with tfdist.broadcast() or tfdist.allgather()."
        )
    call = f"{name} of process set {id_of(process_set)}"
    if runtime.is_rehearsing():  # as if all ranks had sent the same object
        own = (runtime.rank(), *_message_of(obj, call, max_bytes))
        return dict.fromkeys(members_of(process_set), _object_of(*own, call, max_bytes))

    def gather(
        step: str, status: int, message: bytes, refusal: Exception | None
    ) -> list[tuple[int, int, bytes]]:
        if refusal is not None:
            text = str(refusal) or type(refusal).__name__  # MemoryError has no message
            status, message = _REFUSED, text.encode("utf-8", "replace")[:4096]
        words = collectives.allgather(
            tf.constant(_pack_message(runtime.rank(), status, message)),
            name=name + step,
            timeout_s=timeout_s,
            process_set=process_set,
        ).numpy()
        if refusal is not None:
            raise refusal
        return _messages(words)

    refusal: Exception | None = None
    status, message = _OK, b""
    if sends:
        try:
            status, message = _message_of(obj, call, max_bytes)
            if len(message) > _HEADER_MAX_BYTES:
                raise ValueError(
                    f"Expected an object of at most {_HEADER_MAX_BYTES} bytes, "
                    f"whatever max_bytes is, got {len(message)} bytes. Send arrays "
                    "with tfdist.broadcast() or tfdist.allgather()."
                )
        except Exception as error:  # any error, because the other ranks wait
            refusal = error
    found = gather("", status, message, refusal)
    _check(found, "send its object")
    objects: dict[int, Any] = {}
    try:
        for rank, status, data in found:
            objects[rank] = _object_of(rank, status, data, call, max_bytes)
    except Exception as error:  # as above
        refusal = error
    if any(status == _PICKLED for _, status, _ in found):
        _check(gather(".loaded", _OK, b"", refusal), "load an object")
    elif refusal is not None:
        raise refusal
    return objects


def _message_of(obj: Any, call: str, max_bytes: int) -> tuple[int, bytes]:
    """Returns status and bytes: plain data if possible, otherwise a pickled object."""
    try:
        return _OK, encode(obj, max_bytes=max_bytes)
    except (TypeError, ValueError) as refusal:
        if not pickling.is_enabled():
            if isinstance(refusal, TypeError):
                raise TypeError(f"{refusal} {_CHOICE}") from None
            raise
    about = f"rank {runtime.rank()}: {call}"
    return _PICKLED, pickling.seal(obj, about, pickling.key(), max_bytes=max_bytes)


def _object_of(rank: int, status: int, data: bytes, call: str, max_bytes: int) -> Any:
    """Returns the object in a message from `rank`, or None if the message is empty.

    Raises:
        ValueError: the object cannot be decoded, or it is pickled and this job does not
            allow it.
    """
    if status == _OK:
        return decode(data, max_bytes=max_bytes) if data else None
    if status != _PICKLED or not pickling.is_enabled():
        raise ValueError(
            f"Expected plain data from rank {rank}, got an object of kind {status}; "
            f"this job was not started with {pickling.VARIABLE}=pickle."
        )
    try:
        return pickling.unseal(data, f"rank {rank}: {call}", pickling.key())
    except pickling.NotLoadedError as error:
        raise ValueError(
            f"The object of rank {rank} was not loaded: {error}"
        ) from error


def _check(found: list[tuple[int, int, bytes]], action: str) -> None:
    """Raises if a rank has reported that it could not perform `action`."""
    for rank, status, data in found:
        if status == _REFUSED:
            text = data.decode("utf-8", "replace")
            raise errors.RankFailedError(
                f"rank {rank} could not {action}: {text}",
                errors.ErrorRecord(kind="rank_failed", rank=rank, cause=text),
            )


def _pack_message(rank: int, status: int, message: bytes) -> np.ndarray:
    header = np.array([rank, status, len(message)], "<i4")
    padded = message + b"\0" * (-len(message) % 4)
    return np.concatenate([header, np.frombuffer(padded, "<i4")]).astype(np.int32)


def _messages(words: np.ndarray) -> list[tuple[int, int, bytes]]:
    """Splits the gathered words into messages by the length in each header."""
    found = []
    position = 0
    while position < len(words):
        start = position + _HEADER_WORDS
        rank, status, length = (int(word) for word in words[position:start])
        position = start + -(-length // 4)
        data = words[start:position].astype("<i4").tobytes()[:length]
        found.append((rank, status, data))
    return found
