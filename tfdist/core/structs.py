"""ctypes structures of `tfdist_ops/runtime/c_api.h`, and conversions to them.

`tests/single/test_structs.py` compares names, sizes and offsets of the fields with C.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Kinds of operations (c_api.h).
ALLREDUCE = 0
ALLGATHER = 1
BROADCAST = 2
BARRIER = 3
REDUCE_SCATTER = 5
REDUCE = 6
GATHER = 7
SCATTER = 8
ALLTOALL = 9
SENDRECV = 10


class Status(ctypes.Structure):
    """The C structure `tfdist_status`."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("message", ctypes.c_char_p),
        ("payload", ctypes.c_char_p),
    ]


class Link(ctypes.Structure):
    """The C structure `tfdist_link`."""

    _fields_ = [
        ("peer", ctypes.c_int32),
        ("transport", ctypes.c_char_p),
        ("host", ctypes.c_char_p),
        ("pid", ctypes.c_int64),
        ("socket_fd", ctypes.c_int32),
        ("memory_fd", ctypes.c_int32),
        ("peer_doorbell_fd", ctypes.c_int32),
        ("initiator", ctypes.c_int32),
        ("window_fd", ctypes.c_int32),
        ("key", ctypes.c_char_p),
        ("key_bytes", ctypes.c_int32),
        ("more_socket_fds", ctypes.POINTER(ctypes.c_int32)),
        ("more_sockets", ctypes.c_int32),
    ]


class TuningLine(ctypes.Structure):
    """The C structure `tfdist_tuning_rule`."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("hosts", ctypes.POINTER(ctypes.c_int32)),
        ("host_count", ctypes.c_int32),
        ("up_to_bytes", ctypes.c_int64),
        ("algorithm", ctypes.c_char_p),
    ]


class World(ctypes.Structure):
    """The C structure `tfdist_world`."""

    _fields_ = [
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("local_rank", ctypes.c_int32),
        ("local_size", ctypes.c_int32),
        ("cross_rank", ctypes.c_int32),
        ("cross_size", ctypes.c_int32),
        ("generation", ctypes.c_uint32),
        ("host", ctypes.c_char_p),
        ("own_doorbell_fd", ctypes.c_int32),
        ("links", ctypes.POINTER(Link)),
        ("link_count", ctypes.c_int32),
        ("host_of", ctypes.POINTER(ctypes.c_int32)),
        ("hosts", ctypes.POINTER(ctypes.c_char_p)),
        ("pids", ctypes.POINTER(ctypes.c_int64)),
        ("wanted_fd", ctypes.c_int32),
        ("own_window_fd", ctypes.c_int32),
        ("tuning", ctypes.POINTER(TuningLine)),
        ("tuning_count", ctypes.c_int32),
        ("tuning_hash", ctypes.c_char_p),
        ("sharing", ctypes.c_int32),
    ]


class Tensor(ctypes.Structure):
    """The C structure `tfdist_tensor`."""

    _fields_ = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("hint", ctypes.c_uint64),
    ]


DoneCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Status))
AllocateCallback = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int32,
    ctypes.c_int64,
)


class Request(ctypes.Structure):
    """The C structure `tfdist_request`."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("splits", ctypes.POINTER(ctypes.c_int64)),
        ("split_count", ctypes.c_int32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("timeout_s", ctypes.c_double),
        ("repeats", ctypes.c_int32),
        ("group", ctypes.c_char_p),
        ("bucket", ctypes.c_int32),
        ("bucket_count", ctypes.c_int32),
        ("process_set", ctypes.c_uint32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("tensor_count", ctypes.c_int32),
        ("context", ctypes.c_void_p),
        ("done", DoneCallback),
        ("allocate", AllocateCallback),
        ("algorithm", ctypes.c_char_p),
    ]


class Record(ctypes.Structure):
    """The C structure `tfdist_record`."""

    _fields_ = [
        ("name", ctypes.c_char * 96),
        ("bytes", ctypes.c_int64),
        ("submitted_us", ctypes.c_int64),
        ("agreed_us", ctypes.c_int64),
        ("done_us", ctypes.c_int64),
        ("code", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    ]


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """This rank's end of a connected and authenticated link, for `native.start`.

    `key` is the link's session key: 64 bytes for each TCP socket, empty for shared
    memory. `more_socket_fds` has the TCP sockets after the first one.
    """

    peer: int
    transport: str
    host: str
    pid: int
    socket_fd: int
    initiator: bool
    memory_fd: int = -1
    peer_doorbell_fd: int = -1
    window_fd: int = -1
    key: bytes = field(default=b"", repr=False)
    more_socket_fds: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TuningRule:
    """A rule of a tuning file (`core.tuning`): an algorithm for requests up to a size.

    Attributes:
        kind: kind of the operation, such as ALLREDUCE.
        half: True for float16 and bfloat16, False for all other dtypes.
        hosts: number of ranks on each host.
        up_to_bytes: largest size of a request in bytes, before fusion with others.
        algorithm: name of the algorithm.
    """

    kind: int
    half: bool
    hosts: tuple[int, ...]
    up_to_bytes: int
    algorithm: str


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The placement of this rank; see `tfdist.rank`, `tfdist.local_rank` and so on.

    `host_of[r]` is the index of the host of rank r; `host_of` is equal on all ranks.
    Hosts are numbered in the order of their lowest ranks. Two ranks count as ranks of
    one host if `rendezvous.same_host` has proved it, whatever local ranks the launcher
    gave them.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host_of: tuple[int, ...]


def tuning_lines(rules: Sequence[TuningRule]) -> Any:
    """Returns the rules as an array of `TuningLine`."""
    lines = (TuningLine * max(1, len(rules)))()
    for line, rule in zip(lines, rules, strict=False):
        line.kind = rule.kind
        line.half = int(rule.half)
        line.hosts = (ctypes.c_int32 * len(rule.hosts))(*rule.hosts)
        line.host_count = len(rule.hosts)
        line.up_to_bytes = rule.up_to_bytes
        line.algorithm = rule.algorithm.encode()
    return lines


def fill_link(slot: Link, end: LinkEnd) -> None:
    """Fills a `Link` from a connected `LinkEnd`."""
    slot.peer = end.peer
    slot.transport = end.transport.encode()
    slot.host = end.host.encode()
    slot.pid = end.pid
    slot.socket_fd = end.socket_fd
    slot.memory_fd = end.memory_fd
    slot.peer_doorbell_fd = end.peer_doorbell_fd
    slot.initiator = int(end.initiator)
    slot.window_fd = end.window_fd
    slot.key = end.key
    slot.key_bytes = len(end.key)
    more = end.more_socket_fds
    slot.more_socket_fds = (ctypes.c_int32 * len(more))(*more)
    slot.more_sockets = len(more)


def timeout_of(timeout_s: float | None) -> float:
    """Converts a timeout for the core, where 0 means `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: `timeout_s` is neither None nor a number above 0.
    """
    if timeout_s is None:
        return 0.0
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not (is_number and timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(
            f"Expected timeout_s to be a number of seconds > 0, got {timeout_s!r}."
        )
    return float(timeout_s)
