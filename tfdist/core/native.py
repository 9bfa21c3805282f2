"""Functions of the native core, through ctypes (`tfdist_ops/runtime/c_api.h`).

Importing this module does not load the library and does not need TensorFlow; the
library is loaded on the first call. This module is internal: users call `tfdist`.

The loader (`library`), the structures (`structs`) and the error class (`error_codes`)
are separate modules; their names can also be imported from this module.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from tfdist.core.error_codes import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    CoreError,
)
from tfdist.core.library import (
    LIBRARY_FOLDER,
    LIBRARY_PATH,
    check,
    last_error,
    library,
    to_core_error,
)
from tfdist.core.structs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SENDRECV,
    AllocateCallback,
    DoneCallback,
    Link,
    LinkEnd,
    Record,
    Request,
    Tensor,
    Topology,
    TuningRule,
    World,
    fill_link,
    timeout_of,
    tuning_lines,
)

_LIST_ID_BYTES = 33
_RECORD_BATCH = 512
_WANTED_BATCH = 64


def config() -> dict[str, dict[str, Any]]:
    """Returns the configuration from the current environment, by variable name.

    In a job, the values read by `init()` are used instead
    (`tfdist.core.runtime.setting`).

    Returns:
        A dict with "name", "type", "default", "value", "unit", "minimum", "maximum",
        "choices", "agreed", "scope" and "help" for each variable.

    Raises:
        CoreError: a TFDIST_* variable is unknown or has an invalid value.
    """
    text = library().tfdist_config_json()
    if text is None:
        raise last_error()
    # A path may not be valid UTF-8. It is then decoded as in os.environ.
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
    """Returns why the core cannot reduce TensorFlow's dtype number `dtype` with `op`.

    Returns:
        None if the core can, else a sentence with the expected and the actual value and
        a fix.
    """
    if library().tfdist_check_reducible(dtype, op) == 0:
        return None
    return str(last_error())


def shm_bytes() -> int:
    """Returns the size of one link's shared memory, in bytes."""
    size = library().tfdist_shm_bytes()
    if size < 0:
        raise last_error()
    return int(size)


def window_bytes() -> int:
    """Returns the size in bytes of a rank's window for each other rank of its host."""
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
    """Starts the engine, which then owns the descriptors of the links and the doorbell.

    Args:
        topology: topology of this rank.
        host: host name of this rank, for messages.
        generation: generation number of the world.
        own_doorbell_fd: eventfd with which the other ranks of this host wake this rank.
        links: to all other ranks, or, above TFDIST_MESH_RANKS, to `overlay.neighbours`.
        hosts: host names of all ranks, for messages; default: host names in `links`.
        pids: process ids of all ranks, for messages; default: those in `links`.
        wanted_fd: eventfd that is signaled when `take_link_requests` has new ranks.
        own_window_fd: memory file from which the other ranks of this host read.
        tuning: rules of the tuning file, equal on all ranks.
        tuning_hash: hash of the tuning file, for `counters`.
        sharing: number of ranks on this host, including this rank, that may run on a
            CPU of this rank. 0: unknown; all ranks of the host are then assumed.

    Raises:
        CoreError: the engine did not start.
    """
    array = (Link * max(1, len(links)))()
    for slot, end in zip(array, links, strict=False):
        fill_link(slot, end)
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
        tuning=tuning_lines(tuning),
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


def take_link_requests() -> list[int]:
    """Returns the ranks to which the core needs a link, each rank once.

    The higher of the two ranks of a link connects to the lower one.
    """
    found: list[int] = []
    batch = (ctypes.c_int32 * _WANTED_BATCH)()
    while True:
        count = library().tfdist_take_wanted(batch, _WANTED_BATCH)
        found += batch[:count]
        if count < _WANTED_BATCH:
            return found


def add_link(end: LinkEnd) -> None:
    """Gives the core a requested link; the core owns its descriptors.

    Raises:
        CoreError: the core did not accept the link.
    """
    link = Link()
    fill_link(link, end)
    check(library().tfdist_add_link(ctypes.byref(link)))


def stop(timeout_s: float) -> None:
    """Notifies the peers that this rank leaves, and ends the engine's threads."""
    library().tfdist_shutdown(timeout_s)


def is_running() -> bool:
    """Returns whether the engine is running in this process."""
    return bool(library().tfdist_is_initialized())


def abort(cause: str, *, detail: str = "", culprit: int | None = None) -> None:
    """Ends the operations of all ranks with an error.

    Args:
        cause: reason, for the error's message.
        detail: details for the error's record, such as a traceback.
        culprit: rank that the error names; None: this rank.
    """
    library().tfdist_abort(
        cause.encode("utf-8", "replace"),
        detail.encode("utf-8", "replace"),
        -1 if culprit is None else culprit,
    )


def failure() -> CoreError | None:
    """Returns the error that stopped the engine, or None while there is none."""
    status = library().tfdist_failure()
    return to_core_error(status) if status.code != 0 else None


def good_steps() -> int:
    """Returns this rank's number of consecutive complete steps before a failure."""
    return int(library().tfdist_good_steps())


def hide_failures(on: bool) -> None:
    """Sets whether allreduces hide the loss of a rank; they do not by default.

    While this is on, an allreduce that ends because a rank was lost, or that is
    submitted afterwards, returns this rank's own inputs instead of an error, and
    `take_hidden` counts it. The result must not be used: the program must go back to
    an earlier state. An in-place allreduce may return a partial sum.

    A rank is lost if `failure()` has the code ABORTED. All other operations and errors
    are reported as usual. The setting belongs to this process, not to one world.

    Args:
        on: whether to hide the failure.
    """
    library().tfdist_hide_failures(1 if on else 0)


def take_hidden() -> int:
    """Returns how many allreduces have hidden a failure since the last call.

    An allreduce is counted before it returns. Counts cover all worlds of the process.
    """
    return int(library().tfdist_take_hidden())


def algorithm(kind: int, dtype: int, size_bytes: int, choice: str = "") -> str | None:
    """Returns the name of the algorithm for a request in which all ranks take part.

    Args:
        kind: kind of the operation, such as ALLREDUCE.
        dtype: TensorFlow's number of the dtype.
        size_bytes: total size of the request's tensors; for allgather, gather,
            reduce_scatter, scatter and alltoall, of the rows of all ranks together.
        choice: name of an algorithm, or "auto"; "": the configured algorithm.

    Returns:
        The name, or None if `choice` is unknown or does not support this case.
    """
    name = library().tfdist_algorithm(kind, dtype, size_bytes, choice.encode())
    return None if name is None else str(name.decode())


def add_process_set(ranks: Sequence[int], *, timeout_s: float = 0.0) -> int:
    """Agrees with all ranks on a process set; blocks until all have called it.

    Args:
        ranks: members, ascending, each once.
        timeout_s: seconds to wait for the other ranks; <= 0: TFDIST_TIMEOUT_S.

    Returns:
        The number of the process set. The same list of ranks gives the same number.

    Raises:
        CoreError: the lists differ or are not valid, a rank failed, or on timeout.
    """
    # Larger numbers are not ranks, but ctypes could truncate them to a valid rank.
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
    """Removes a process set on all ranks; blocks until all have called it.

    Raises:
        CoreError: a rank still uses the process set, the ranks try to remove different
            sets, the set does not exist, a rank failed, or on timeout.
    """
    check(library().tfdist_process_set_remove(number, timeout_s))


def register_gradient_list(
    description: str,
    present: Sequence[bool],
    *,
    timeout_s: float = 0.0,
    process_set: int = 0,
) -> tuple[str, list[bool]]:
    """Agrees with all ranks of a process set on a gradient list; blocks.

    Args:
        description: one line for each variable ("path dtype [d0,d1]"), then one line of
            options ("op=average ..."). Must be equal on all ranks.
        present: for each variable, whether this rank has a gradient.
        timeout_s: seconds to wait for the other ranks; <= 0: TFDIST_TIMEOUT_S.
        process_set: number of the process set; 0: all ranks.

    Returns:
        The id of the gradient list, and for each variable whether any rank has a
        gradient.

    Raises:
        CoreError: the descriptions differ, a rank failed, or on timeout.
    """
    flags = (ctypes.c_uint8 * max(1, len(present)))(*(1 if p else 0 for p in present))
    list_id = ctypes.create_string_buffer(_LIST_ID_BYTES)
    check(
        library().tfdist_register_group(
            process_set,
            description.encode(),
            flags,
            len(present),
            timeout_s,
            list_id,
        )
    )
    return list_id.value.decode(), [bool(flags[i]) for i in range(len(present))]


def find_gradient_list(
    description: str, count: int, *, process_set: int = 0
) -> tuple[str, list[bool]] | None:
    """Returns the earlier result of `register_gradient_list`, or None.

    The result is the same on all ranks, even if a rank had joined before the others
    registered the list.

    Args:
        description: as in `register_gradient_list`.
        count: number of variables in the list.
        process_set: number of the process set; 0: all ranks.
    """
    flags = (ctypes.c_uint8 * max(1, count))()
    list_id = ctypes.create_string_buffer(_LIST_ID_BYTES)
    if not library().tfdist_find_group(
        process_set, description.encode(), flags, count, list_id
    ):
        return None
    return list_id.value.decode(), [bool(flags[i]) for i in range(count)]


def join(*, timeout_s: float = 0.0, process_set: int = 0) -> tuple[int, int]:
    """Takes part in the calls of the other ranks until all have joined; blocks.

    Args:
        timeout_s: longest time in seconds in which the other ranks may call nothing;
            <= 0: TFDIST_TIMEOUT_S.
        process_set: number of the process set; 0: all ranks.

    Returns:
        The lowest of the ranks that have called every collective themselves, and the
        number of these ranks. The number is the size of the set if no rank joined
        before a collective of the others.

    Raises:
        CoreError: a rank failed, the other ranks made a call that a joined rank cannot
            take part in, or on timeout.
    """
    latest, complete = ctypes.c_int32(), ctypes.c_int32()
    check(
        library().tfdist_join(
            process_set, timeout_s, ctypes.byref(latest), ctypes.byref(complete)
        )
    )
    return latest.value, complete.value


def still() -> tuple[float, int]:
    """Returns how long this rank's engine has made no progress while operations wait.

    Returns:
        The time in seconds, 0.0 if no operation waits; and the number of moves, that
        is, how often the engine has made progress so far.
    """
    moves = ctypes.c_uint64()
    still_us = library().tfdist_still_us(ctypes.byref(moves))
    return still_us / 1e6, moves.value


def report_blocked(moves: int, how: int, place: str) -> None:
    """Reports, for deadlock detection, that the program is blocked in collectives.

    Args:
        moves: number of moves, from `still`, before the stacks were inspected.
        how: 0: blocked in eager calls; 1: in a `tf.function` that may still submit more
            operations; 2: in either, and no thread is expected to submit more.
        place: description of the call in which the program is blocked.
    """
    library().tfdist_report_blocked(moves, how, place.encode("utf-8", "replace"))


def take_records() -> list[dict[str, Any]]:
    """Returns the operations that finished since the last call, oldest first.

    The core keeps no records before the first call in this process. The first call
    returns nothing and may come before `init`.

    Returns:
        A dict for each operation with "name", "bytes", "submitted_us", "agreed_us",
        "done_us" (monotonic microseconds; 0 if the operation did not get that far),
        "code" and "kind".
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
    """Writes the timeline of this rank to a file in `folder`, until `stop`.

    Args:
        folder: folder of the file `rank-N.jsonl`. This file and the file with older
            records (`.old`) have at most TFDIST_TIMELINE_BYTES together.
        head: first line of the file, as JSON.

    Raises:
        CoreError: the file cannot be written.
    """
    check(library().tfdist_timeline_start(os.fsencode(folder), head.encode()))


def forward_timeline() -> None:
    """Also sends this rank's timeline to rank 0, which writes it to its own folder."""
    library().tfdist_timeline_forward()


def timeline_span(name: str, begin_us: int, end_us: int) -> None:
    """Adds a span of this rank's program to the timeline, if the timeline is on.

    Args:
        name: name of the span.
        begin_us: start, in microseconds of `time.monotonic()`.
        end_us: end, in microseconds of `time.monotonic()`.
    """
    library().tfdist_timeline_span(name.encode(), begin_us, end_us)


def counters() -> dict[str, Any]:
    """Returns the engine's counters: bytes and frames sent, tickets, wake-ups, ..."""
    return dict(json.loads(library().tfdist_counters_json() or b"{}"))


def build_info() -> dict[str, Any]:
    """Returns the library's build information: version, compiler, algorithms, ..."""
    return dict(json.loads(library().tfdist_build_info()))
