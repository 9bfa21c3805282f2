"""Converts parts to events of Chrome's trace format, with one process per rank.

A rank has the tracks below. A track is a thread of the format. The events of a thread
must nest, so operations that overlap need several tracks:

- "steps": the steps of `fit`;
- "gradients": each gradient list, from the submission of its first bucket to its last
  result. It is "backward" until the last bucket is submitted, then "exposed";
- "operations": each operation from submission to result. It is divided into "agree"
  (waits until the leader, the lowest rank of the process set, has announced that all
  ranks are ready), "prepare" (plans the operation and allocates memory; shown only if
  this takes long), "wait for rank r" (the longest wait, until data of rank r arrived),
  "move and reduce", and with TFDIST_ATOMIC_STEPS=1 "commit gate" (waits until all ranks
  have the gradients of the step);
- "send", "receive", "reduce": from the first piece to the last. In a reduction,
  "busy_us" is the time spent reducing; in a send, "pack_us" is the time spent copying.

A rank has two counters: the "exposed communication" of each step, and "waited for", the
total time for which this rank has waited for each other rank.

References:
    Trace Event Format, Google, 2016 (phases X, C and M).
    Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3: see
    `exposed_communication`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.core.timeline import communication, exposed_communication
from tfdist.core.timeline.parts import Part

Event = dict[str, Any]
# IDs of tracks. A track with lanes has at most _MOST_LANES IDs, from its own ID on.
_STEPS, _GRADIENTS = 1, 2
_OPERATIONS, _SEND, _RECEIVE, _REDUCE = 1000, 2000, 3000, 4000
_LANES = {
    _OPERATIONS: "operations",
    _SEND: "send",
    _RECEIVE: "receive",
    _REDUCE: "reduce",
}
_MOST_LANES = 1000
_WORTH_A_SLICE_US = 100  # shortest preparation that is shown


def events_of(
    part: Part, to_trace_us: Callable[[float], float], *, note: str = ""
) -> Iterator[Event]:
    """Yields all events of a rank.

    Args:
        part: records written by the rank.
        to_trace_us: converts times of the part to times of the trace, in microseconds.
        note: appended to the rank's name.
    """
    rank = part.rank
    name = f"rank {rank} ({part.head['host']}){note}"
    yield _metadata(rank, "process_name", name=name)
    yield _metadata(rank, "process_sort_index", sort_index=rank)
    tracks: dict[int, str] = {}
    for event in _all(part):
        event["pid"] = rank
        if event["ph"] == "X":
            end_us = to_trace_us(event["ts"] + event["dur"])
            event["ts"] = to_trace_us(event["ts"])
            event["dur"] = max(0.0, end_us - event["ts"])
            tracks.setdefault(event["tid"], _track(event["tid"]))
        else:
            event["ts"] = to_trace_us(event["ts"])
        yield event
    for tid, track in sorted(tracks.items()):
        yield _metadata(rank, "thread_name", tid=tid, name=track)
        yield _metadata(rank, "thread_sort_index", tid=tid, sort_index=tid)


def _metadata(rank: int, what: str, *, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}


def _track(tid: int) -> str:
    if tid == _STEPS:
        return "steps"
    if tid < _OPERATIONS:
        return "gradients"
    return _LANES[tid // _MOST_LANES * _MOST_LANES]


def _all(part: Part) -> Iterator[Event]:
    for span in part.spans:
        yield _slice(_STEPS, span["name"], span["begin"], span["end"])
    operations = sorted(part.operations, key=lambda op: int(op["submitted"]))
    yield from _gradient_events(communication.records_of(operations))
    yield from _counters(part)
    yield from _waits(part)
    yield from _operation_events(operations, part)


def _slice(tid: int, name: str, begin_us: float, end_us: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "tid": tid,
        "name": name,
        "ts": begin_us,
        "dur": max(0, end_us - begin_us),
        "args": args,
    }


# ---- gradients, exposed communication ----


def _gradient_events(records: Sequence[dict[str, Any]]) -> Iterator[Event]:
    tids: dict[str, int] = {}
    ends: dict[int, float] = {}
    for name, parts in exposed_communication.lists(records):
        begin_us = float(min(int(p["submitted_us"]) for p in parts))
        handed_over_us, reduced_us = map(float, exposed_communication.tail(parts))
        tid = tids.setdefault(name, min(_GRADIENTS + len(tids), _OPERATIONS - 1))
        # The reduction of this list in the previous step may not have ended yet.
        begin_us = max(begin_us, ends.get(tid, 0))
        handed_over_us = max(begin_us, handed_over_us)
        ends[tid] = reduced_us = max(handed_over_us, reduced_us)
        ready = " ".join(exposed_communication.part_of(p["name"]) for p in parts)
        yield _slice(tid, name, begin_us, reduced_us, buckets=len(parts), ready=ready)
        yield _slice(tid, "backward", begin_us, handed_over_us)
        yield _slice(tid, "exposed", handed_over_us, reduced_us)


def _counters(part: Part) -> Iterator[Event]:
    """Yields the exposed communication of each step of `fit` or of a custom loop."""
    for step in communication.steps_of(part):
        values = {"of the step": step.exposed_us / 1000}
        yield _counter("exposed communication (ms)", step.end_us, values)


def _counter(name: str, at_us: float, values: dict[str, float]) -> Event:
    return {"ph": "C", "tid": 0, "name": name, "ts": at_us, "args": values}


def _waits(part: Part) -> Iterator[Event]:
    total_us: dict[int, int] = {}
    for wait in part.waits:
        rank = wait["rank"]
        total_us[rank] = total_us.get(rank, 0) + wait["until"] - wait["since"]
        values = {f"rank {r}": us / 1000 for r, us in sorted(total_us.items())}
        yield _counter("waited for (ms)", wait["until"], values)


# ---- operations ----


class _Lanes:
    """Assigns each interval to the first track that is free."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._ends: list[float] = []

    def place(self, begin_us: float, end_us: float) -> int:
        for lane, end in enumerate(self._ends):
            if end <= begin_us or lane == _MOST_LANES - 1:
                self._ends[lane] = max(end, end_us)
                return self._first + lane
        self._ends.append(end_us)
        return self._first + len(self._ends) - 1


def _operation_events(operations: Sequence[Event], part: Part) -> Iterator[Event]:
    lanes = {first: _Lanes(first) for first in _LANES}
    ran: set[tuple[int, str]] = set()
    moves: list[Event] = []
    for op in operations:
        yield from _phases(op, lanes[_OPERATIONS], part)
        key = (op["set"], op["ticket"])
        if op["started"] and key not in ran:  # else it ran in another operation
            ran.add(key)
            moves += _moves(op)
    for event in sorted(moves, key=lambda e: e["ts"]):
        tid = lanes[event["tid"]].place(event["ts"], event["ts"] + event["dur"])
        yield {**event, "tid": tid}


def _phases(op: Event, lanes: _Lanes, part: Part) -> Iterator[Event]:
    end_us = max(op["submitted"], op["done"])
    tid = lanes.place(op["submitted"], end_us)
    args = {"bytes": op["bytes"], "kind": op["kind"], "process_set": op["set"]}
    if op["code"]:
        args["error"] = op["code"]
    yield _slice(tid, op["name"], op["submitted"], end_us, **args)
    at_us = op["submitted"]
    for name, until_us in _ends_of_phases(op, part):
        until_us = min(until_us, end_us)
        if until_us > at_us:
            if name != "prepare" or until_us - at_us >= _WORTH_A_SLICE_US:
                yield _slice(tid, name, at_us, until_us)
            at_us = until_us


def _ends_of_phases(op: Event, part: Part) -> Iterator[tuple[str, int]]:
    agree = "agree" if op["last_ready"] < 0 else f"agree: rank {op['last_ready']} last"
    yield agree, op["agreed"]
    yield "prepare", op["started"]
    wait = communication.wait_of(op, part.rank)
    if wait is not None and wait[1] >= op["started"] > 0:
        yield "move and reduce", wait[1]
        yield f"wait for rank {wait[0]}", wait[2]
    yield "move and reduce", op["ended"]
    if (
        op["ended"]
        and part.head["commit_gate"]
        and exposed_communication.part_of(op["name"])
    ):
        yield "commit gate", op["done"]  # only buckets of gradients pass the gate


def _moves(op: Event) -> Iterator[Event]:
    about = {"operation": op["name"]}
    if op["first_sent"]:
        begin_us, _, pack_us = op["pack"]
        begin_us = begin_us or op["first_sent"]
        args = {**about, "bytes": op["sent_bytes"], "pack_us": pack_us}
        yield _slice(_SEND, "send", begin_us, op["last_sent"], **args)
    for rank, first_us, last_us, size in op["peers"]:
        args = {**about, "bytes": size}
        yield _slice(_RECEIVE, f"receive from rank {rank}", first_us, last_us, **args)
    begin_us, end_us, busy_us = op["reduce"]
    if begin_us:
        yield _slice(_REDUCE, "reduce", begin_us, end_us, **about, busy_us=busy_us)
