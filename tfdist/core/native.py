"""The native core, through ctypes: a mirror of `tfdist_ops/runtime/c_api.h`.

Importing this module loads nothing and needs no TensorFlow; the library is
loaded at the first call. Everything here is internal: users call `tfdist`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import numbers
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

API_VERSION = 8
LIBRARY_FOLDER = Path(__file__).resolve().parents[1] / "_native"
LIBRARY_PATH = LIBRARY_FOLDER / "libtfdist_core.so"

# Codes are TensorFlow's (tfdist_ops/base/status.h).
CANCELLED = 1
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
FAILED_PRECONDITION = 9
ABORTED = 10
INTERNAL = 13

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

_GROUP_ID_BYTES = 33
_RECORD_BATCH = 512
_WANTED_BATCH = 64


class CoreError(RuntimeError):
    """An error of the core or of the rendezvous.

    Attributes:
        code: TensorFlow's number of the error's class, e.g. 10 (aborted).
        message: what happened, in words.
        payload: the machine-readable record: "kind", "rank", "host", "pid",
            "tensor", "cause", "detail"; empty fields are left out.
    """

    def __init__(
        self, code: int, message: str, payload: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.payload = payload or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.message, self.payload))


class Status(ctypes.Structure):
    """tfdist_status."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("message", ctypes.c_char_p),
        ("payload", ctypes.c_char_p),
    ]


class Link(ctypes.Structure):
    """tfdist_link."""

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
    """tfdist_tuning_rule."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("hosts", ctypes.POINTER(ctypes.c_int32)),
        ("host_count", ctypes.c_int32),
        ("up_to_bytes", ctypes.c_int64),
        ("algorithm", ctypes.c_char_p),
    ]


class World(ctypes.Structure):
    """tfdist_world."""

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
    """tfdist_tensor."""

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
    """tfdist_request."""

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
    """tfdist_record."""

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
    """One connected and authenticated link, as `start` hands it to the core.

    `key` is the link's session key: 64 bytes for each socket of tcp, empty for shared
    memory. `more_socket_fds` are the sockets of tcp after the first one.
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
    """A line of a tuning file: up to so many bytes this algorithm (`core.tuning`).

    Attributes:
        kind: of the operation, ALLREDUCE, ...
        half: whether it is about float16 and bfloat16, or about all other types.
        hosts: number of ranks on each host.
        up_to_bytes: of the request, before it is fused with others.
        algorithm: its name.
    """

    kind: int
    half: bool
    hosts: tuple[int, ...]
    up_to_bytes: int
    algorithm: str


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of this rank; see `tfdist.rank` and its neighbours.

    `host_of` is the index of each rank's host, by rank: what was proved to be one
    machine (`rendezvous.hosts`), numbered by the lowest rank; equal on all ranks. The
    launcher's local ranks may say otherwise.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host_of: tuple[int, ...]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tfdist_init": (ctypes.c_int32, [ctypes.POINTER(World)]),
    "tfdist_shutdown": (None, [ctypes.c_double]),
    "tfdist_take_wanted": (
        ctypes.c_int32,
        [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32],
    ),
    "tfdist_add_link": (ctypes.c_int32, [ctypes.POINTER(Link)]),
    "tfdist_is_initialized": (ctypes.c_int32, []),
    "tfdist_last_error": (Status, []),
    "tfdist_topology": (None, [ctypes.POINTER(ctypes.c_int32)]),
    "tfdist_abort": (None, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32]),
    "tfdist_failure": (Status, []),
    "tfdist_good_steps": (ctypes.c_int64, []),
    "tfdist_config_json": (ctypes.c_char_p, []),
    "tfdist_shm_bytes": (ctypes.c_int64, []),
    "tfdist_window_bytes": (ctypes.c_int64, []),
    "tfdist_build_info": (ctypes.c_char_p, []),
    "tfdist_check_reducible": (ctypes.c_int32, [ctypes.c_int32, ctypes.c_int32]),
    "tfdist_algorithm": (
        ctypes.c_char_p,
        [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p],
    ),
    "tfdist_submit": (
        ctypes.c_int32,
        [ctypes.POINTER(Request), ctypes.POINTER(ctypes.c_uint64)],
    ),
    "tfdist_submit_and_help": (
        ctypes.c_int32,
        [
            ctypes.POINTER(Request),
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_int64,
        ],
    ),
    "tfdist_run": (ctypes.c_int32, [ctypes.POINTER(Request)]),
    "tfdist_cancel": (None, [ctypes.c_uint64]),
    "tfdist_process_set_add": (
        ctypes.c_int32,
        [
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_double,
            ctypes.POINTER(ctypes.c_uint32),
        ],
    ),
    "tfdist_process_set_remove": (ctypes.c_int32, [ctypes.c_uint32, ctypes.c_double]),
    "tfdist_register_group": (
        ctypes.c_int32,
        [
            ctypes.c_uint32,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_uint8),
            ctypes.c_int32,
            ctypes.c_double,
            ctypes.c_char_p,
        ],
    ),
    "tfdist_find_group": (
        ctypes.c_int32,
        [
            ctypes.c_uint32,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_uint8),
            ctypes.c_int32,
            ctypes.c_char_p,
        ],
    ),
    "tfdist_join": (
        ctypes.c_int32,
        [ctypes.c_uint32, ctypes.c_double, *[ctypes.POINTER(ctypes.c_int32)] * 2],
    ),
    "tfdist_still_us": (ctypes.c_int64, [ctypes.POINTER(ctypes.c_uint64)]),
    "tfdist_report_blocked": (
        None,
        [ctypes.c_uint64, ctypes.c_int32, ctypes.c_char_p],
    ),
    "tfdist_take_records": (ctypes.c_int32, [ctypes.POINTER(Record), ctypes.c_int32]),
    "tfdist_timeline_start": (
        ctypes.c_int32,
        [ctypes.c_char_p, ctypes.c_char_p],
    ),
    "tfdist_timeline_forward": (None, []),
    "tfdist_timeline_span": (None, [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]),
    "tfdist_counters_json": (ctypes.c_char_p, []),
    "tfdist_api": (ctypes.c_void_p, [ctypes.c_int32]),
}


def _installed_elsewhere(folders: Sequence[str]) -> Path | None:
    """The first folder of sys.path that has a tfdist whose libraries are built."""
    built = Path(*LIBRARY_PATH.parts[-3:])
    found = (Path(folder) for folder in folders if (Path(folder) / built).is_file())
    return next(found, None)


@functools.cache
def library() -> ctypes.CDLL:
    """Loads `libtfdist_core.so` once and declares its functions.

    Raises:
        ImportError: the library is missing, does not load, or speaks another
            version of the interface; the message says how to build it.
    """
    remedy = (
        "build it with `pip install -e . --no-build-isolation` in the source folder, "
        "or install a tfdist wheel for this machine"
    )
    if not LIBRARY_PATH.is_file():
        source = LIBRARY_PATH.parents[2]
        if installed := _installed_elsewhere(sys.path):
            raise ImportError(
                f"Python found tfdist in its source folder {source}, which is not "
                f"built, before the one that is installed in {installed}. Start "
                "Python, or tfdistrun, in another folder; or install the source "
                "folder itself: `pip install --no-build-isolation -e .`"
            )
        raise ImportError(
            f"the core library of tfdist is not built: expected {LIBRARY_PATH}; "
            f"{remedy}"
        )
    try:
        lib = ctypes.CDLL(str(LIBRARY_PATH))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"the core library of tfdist does not load: {error}; {remedy}"
        ) from error
    if not lib.tfdist_api(API_VERSION):
        raise ImportError(
            f"{LIBRARY_PATH} does not speak version {API_VERSION} of the interface "
            f"that this tfdist expects; {remedy}"
        )
    return lib


def _error_of(status: Status) -> CoreError:
    message = (status.message or b"").decode("utf-8", "replace")
    text = (status.payload or b"").decode("utf-8", "replace")
    try:
        payload = json.loads(text) if text else {}
    except ValueError:
        payload = {"kind": "internal", "detail": text}
    return CoreError(status.code, message, payload)


def last_error() -> CoreError:
    """The calling thread's last error."""
    return _error_of(library().tfdist_last_error())


def check(code: int) -> None:
    """Raises CoreError, from the thread's last error, unless `code` is 0."""
    if code != 0:
        raise last_error()


def config() -> dict[str, dict[str, Any]]:
    """Returns the configuration in the current environment, keyed by variable name.

    In a job, the values read by `init()` apply (`tfdist.core.runtime.setting`).

    Returns:
        For each variable "name", "type", "default", "value", "unit", "minimum",
        "maximum", "choices", "agreed", "scope" and "help".

    Raises:
        CoreError: an unknown TFDIST_* variable, or a value that is not allowed.
    """
    text = library().tfdist_config_json()
    if text is None:
        raise last_error()
    # A path may be no UTF-8; it then reads as in os.environ.
    rows = json.loads(text.decode("utf-8", "surrogateescape"))
    return {row["name"]: row for row in rows}


def value(name: str) -> Any:
    """Returns the value of a variable in the current environment."""
    rows = config()
    if name not in rows:
        raise KeyError(f"{name} is not in the table of variables: {sorted(rows)}")
    return rows[name]["value"]


@functools.cache
def reduction_refusal(dtype: int, op: int) -> str | None:
    """Why the core does not reduce `dtype` (TensorFlow's number) by `op`, if so.

    Returns:
        None, or the sentence that says what was expected, what came, what to do.
    """
    if library().tfdist_check_reducible(dtype, op) == 0:
        return None
    return str(last_error())


def shm_bytes() -> int:
    """Bytes of shared memory behind one link under the configuration in force."""
    size = library().tfdist_shm_bytes()
    if size < 0:
        raise last_error()
    return int(size)


def window_bytes() -> int:
    """Bytes of a rank's window for each of the other ranks of its host."""
    size = library().tfdist_window_bytes()
    if size < 0:
        raise last_error()
    return int(size)


def start(
    topology: Topology,
    *,
    host: str,
    generation: int = 1,
    own_doorbell_fd: int = -1,
    links: Sequence[LinkEnd] = (),
    hosts: Sequence[str] = (),
    pids: Sequence[int] = (),
    wanted_fd: int = -1,
    own_window_fd: int = -1,
    tuning: Sequence[TuningRule] = (),
    tuning_hash: str = "",
    sharing: int = 0,
) -> None:
    """Starts the engine; it owns the descriptors of links and doorbell from here on.

    Args:
        topology: place of this rank.
        host: of this rank, for messages.
        generation: of the world.
        own_doorbell_fd: eventfd of this rank.
        links: to every rank; above TFDIST_MESH_RANKS to `overlay.neighbours`.
        hosts: of all ranks, for messages; empty: those of `links`.
        pids: likewise.
        wanted_fd: eventfd that tells of `take_link_requests`.
        own_window_fd: memory from which the ranks of this host read.
        tuning: lines of the tuning file, the same on all ranks.
        tuning_hash: of the file, for `counters`.
        sharing: ranks of this host, this one included, that may run on a processor
            of this rank; 0: not known, then all of them.

    Raises:
        CoreError: the engine did not start.
    """
    array = (Link * max(1, len(links)))()
    for slot, end in zip(array, links, strict=False):
        _fill(slot, end)
    world = World(
        rank=topology.rank,
        size=topology.size,
        local_rank=topology.local_rank,
        local_size=topology.local_size,
        cross_rank=topology.cross_rank,
        cross_size=topology.cross_size,
        generation=generation,
        host=host.encode(),
        own_doorbell_fd=own_doorbell_fd,
        links=array,
        link_count=len(links),
        host_of=(ctypes.c_int32 * topology.size)(*topology.host_of),
        wanted_fd=wanted_fd,
        own_window_fd=own_window_fd,
        tuning=_tuning_lines(tuning),
        tuning_count=len(tuning),
        tuning_hash=tuning_hash.encode(),
        sharing=sharing,
    )
    if hosts:
        names = [name.encode() for name in hosts]
        world.hosts = (ctypes.c_char_p * topology.size)(*names)
    if pids:
        world.pids = (ctypes.c_int64 * topology.size)(*pids)
    check(library().tfdist_init(ctypes.byref(world)))


def _tuning_lines(rules: Sequence[TuningRule]) -> Any:
    lines = (TuningLine * max(1, len(rules)))()
    for line, rule in zip(lines, rules, strict=False):
        line.kind = rule.kind
        line.half = int(rule.half)
        line.hosts = (ctypes.c_int32 * len(rule.hosts))(*rule.hosts)
        line.host_count = len(rule.hosts)
        line.up_to_bytes = rule.up_to_bytes
        line.algorithm = rule.algorithm.encode()
    return lines


def _fill(slot: Link, end: LinkEnd) -> None:
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


def take_link_requests() -> list[int]:
    """The ranks to which the core wants a link, each once.

    Of the two ranks of a link the higher one connects.
    """
    found: list[int] = []
    batch = (ctypes.c_int32 * _WANTED_BATCH)()
    while True:
        count = library().tfdist_take_wanted(batch, _WANTED_BATCH)
        found += batch[:count]
        if count < _WANTED_BATCH:
            return found


def add_link(end: LinkEnd) -> None:
    """Hands over a link that was wanted; the core owns its descriptors.

    Raises:
        CoreError: the core did not take it.
    """
    link = Link()
    _fill(link, end)
    check(library().tfdist_add_link(ctypes.byref(link)))


def stop(timeout_s: float) -> None:
    """Tells the peers that this rank leaves and ends the engine's threads."""
    library().tfdist_shutdown(timeout_s)


def is_running() -> bool:
    """Whether the engine runs in this process."""
    return bool(library().tfdist_is_initialized())


def abort(cause: str, *, detail: str = "", culprit: int | None = None) -> None:
    """Ends the work of all ranks with an error.

    Args:
        cause: why, for the error's message.
        detail: more, for its record: a traceback.
        culprit: the rank that it names; None: this one.
    """
    library().tfdist_abort(
        cause.encode("utf-8", "replace"),
        detail.encode("utf-8", "replace"),
        -1 if culprit is None else culprit,
    )


def failure() -> CoreError | None:
    """The error that ended the engine's work, None while there is none."""
    status = library().tfdist_failure()
    return _error_of(status) if status.code != 0 else None


def good_steps() -> int:
    """Complete steps in a row on this rank before a failure."""
    return int(library().tfdist_good_steps())


def algorithm(kind: int, dtype: int, size_bytes: int, wanted: str = "") -> str | None:
    """The name of the algorithm that moves a request of all ranks.

    Args:
        kind: ALLREDUCE, ...
        dtype: TensorFlow's number of the type.
        size_bytes: of all its tensors; of the kinds with rows: of all ranks' rows.
        wanted: a name, or "auto"; "": the configured one.

    Returns:
        None where `wanted` does not support the case, or is not known.
    """
    name = library().tfdist_algorithm(kind, dtype, size_bytes, wanted.encode())
    return None if name is None else str(name.decode())


def timeout_of(timeout_s: float | None) -> float:
    """Converts a timeout for the core, where 0 stands for `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: it is neither None nor a number above 0.
    """
    if timeout_s is None:
        return 0.0
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not (is_number and timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(
            f"Expected timeout_s to be a number of seconds > 0, got {timeout_s!r}."
        )
    return float(timeout_s)


def add_process_set(ranks: Sequence[int], *, timeout_s: float = 0.0) -> int:
    """Agrees with all ranks on a process set; blocks until they have called it.

    Args:
        ranks: its members, ascending, each once.
        timeout_s: seconds to wait for the others; <= 0: TFDIST_TIMEOUT_S.

    Returns:
        The set's number; the same list gives the same.

    Raises:
        CoreError: the lists differ or are not valid, a rank failed, the time is over.
    """
    # What has more bits is no rank either; ctypes would leave them out.
    bounded = (min(max(rank, -(1 << 31)), (1 << 31) - 1) for rank in ranks)
    array = (ctypes.c_int32 * max(1, len(ranks)))(*bounded)
    number = ctypes.c_uint32()
    check(
        library().tfdist_process_set_add(
            array, len(ranks), timeout_s, ctypes.byref(number)
        )
    )
    return number.value


def remove_process_set(number: int, *, timeout_s: float = 0.0) -> None:
    """Ends a process set, with all ranks; blocks until they have called it.

    Raises:
        CoreError: a rank still uses it or removes another, it is not known, a rank
            failed, the time is over.
    """
    check(library().tfdist_process_set_remove(number, timeout_s))


def register_group(
    description: str,
    present: Sequence[bool],
    *,
    timeout_s: float = 0.0,
    process_set: int = 0,
) -> tuple[str, list[bool]]:
    """Agrees with all ranks of a process set on a group of gradients; blocks.

    Args:
        description: one line a variable ("path dtype [d0,d1]"), then one line of
            options ("op=average ..."); equal on all ranks.
        present: for each variable, whether this rank has a gradient.
        timeout_s: seconds to wait for the others; <= 0: TFDIST_TIMEOUT_S.
        process_set: number of the set; 0: all ranks.

    Returns:
        The group's id, and for each variable whether any rank has a gradient.

    Raises:
        CoreError: the descriptions differ, a rank failed, the time is over.
    """
    flags = (ctypes.c_uint8 * max(1, len(present)))(*(1 if p else 0 for p in present))
    group_id = ctypes.create_string_buffer(_GROUP_ID_BYTES)
    check(
        library().tfdist_register_group(
            process_set,
            description.encode(),
            flags,
            len(present),
            timeout_s,
            group_id,
        )
    )
    return group_id.value.decode(), [bool(flags[i]) for i in range(len(present))]


def find_group(
    description: str, count: int, *, process_set: int = 0
) -> tuple[str, list[bool]] | None:
    """Returns the earlier result of `register_group` for a description, or None.

    The same on all ranks, also on one that had joined when the others registered it.

    Args:
        description: as in `register_group`.
        count: how many variables it is about.
        process_set: number of the set; 0: all ranks.
    """
    flags = (ctypes.c_uint8 * max(1, count))()
    group_id = ctypes.create_string_buffer(_GROUP_ID_BYTES)
    if not library().tfdist_find_group(
        process_set, description.encode(), flags, count, group_id
    ):
        return None
    return group_id.value.decode(), [bool(flags[i]) for i in range(count)]


def join(*, timeout_s: float = 0.0, process_set: int = 0) -> tuple[int, int]:
    """Takes part in what the other ranks call, until all have joined; blocks.

    Args:
        timeout_s: seconds in which the others may call nothing; <= 0: TFDIST_TIMEOUT_S.
        process_set: number of the set; 0: all ranks.

    Returns:
        The lowest of the ranks that have called every collective, and how many they
        are: all, if nobody had to take part.

    Raises:
        CoreError: a rank failed, the time is over, or the others called what a rank
            that has joined cannot take part in.
    """
    latest, complete = ctypes.c_int32(), ctypes.c_int32()
    check(
        library().tfdist_join(
            process_set, timeout_s, ctypes.byref(latest), ctypes.byref(complete)
        )
    )
    return latest.value, complete.value


def still() -> tuple[float, int]:
    """For how long nothing has moved in this rank's engine, while operations wait.

    Returns:
        Seconds, 0.0 where none waits; and how often something had moved before.
    """
    moves = ctypes.c_uint64()
    still_us = library().tfdist_still_us(ctypes.byref(moves))
    return still_us / 1e6, moves.value


def report_blocked(moves: int, how: int, place: str) -> None:
    """Says that the program waits in collectives, for the search for a deadlock.

    Args:
        moves: as `still` gave it before the stacks were looked at.
        how: 0: in eager calls; 1: in functions; 2: in such for long.
        place: where, in the user's words.
    """
    library().tfdist_report_blocked(moves, how, place.encode("utf-8", "replace"))


def take_records() -> list[dict[str, Any]]:
    """The finished operations since the last call, oldest first.

    The core keeps none before the first call in this process, which returns nothing
    and may come before `init`.

    Returns:
        For each: "name", "bytes", "submitted_us", "agreed_us", "done_us"
        (monotonic microseconds, 0 = never got there), "code", "kind".
    """
    found: list[dict[str, Any]] = []
    names = [name for name, *_ in Record._fields_]
    batch = (Record * _RECORD_BATCH)()
    while True:
        count = library().tfdist_take_records(batch, _RECORD_BATCH)
        for record in batch[:count]:
            row = {name: getattr(record, name) for name in names}
            row["name"] = row["name"].decode("utf-8", "replace")
            found.append(row)
        if count < _RECORD_BATCH:
            return found


def start_timeline(folder: str, head: str) -> None:
    """Writes what happens on this rank to a file in `folder`, until `stop`.

    Args:
        folder: the file is `rank-N.jsonl` there; with what it turns into, the same with
            `.old`, it takes at most TFDIST_TIMELINE_BYTES.
        head: its first line, JSON.

    Raises:
        CoreError: the file cannot be written.
    """
    check(library().tfdist_timeline_start(os.fsencode(folder), head.encode()))


def forward_timeline() -> None:
    """Sends all of the timeline to rank 0 too, for its folder."""
    library().tfdist_timeline_forward()


def timeline_span(name: str, begin_us: int, end_us: int) -> None:
    """Something that this rank's program did, for the timeline, if one is written.

    Args:
        name: of it.
        begin_us: when, in microseconds of `time.monotonic()`.
        end_us: likewise.
    """
    library().tfdist_timeline_span(name.encode(), begin_us, end_us)


def counters() -> dict[str, Any]:
    """The engine's counters: bytes and frames sent, tickets, wake-ups, ..."""
    return dict(json.loads(library().tfdist_counters_json() or b"{}"))


def build_info() -> dict[str, Any]:
    """Returns the library's build information: version, compiler, algorithms, ..."""
    return dict(json.loads(library().tfdist_build_info()))
