"""Keeps an elastic job running: carries out what `membership` decides.

Ranks send requests for their places through the store
(`tfdist.core.rendezvous.renewal`). This module tells `Membership` about these requests
and about processes that exit. It then answers the requests, starts replacements, and
kills processes that must not continue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from tfdist.core.rendezvous.errors import numbers
from tfdist.core.rendezvous.failure_report import PREFIX as REPORTS
from tfdist.core.rendezvous.store import (
    LEAVES,
    REQUESTS,
    SLOW,
    StoreThread,
    answer_key,
    ask_step_key,
    begun_key,
    change_key,
    end_key,
    failure_key,
    join_key,
    leave_key,
    prefix_of_generation,
    request_key,
    step_of,
)
from tfdist.launch.discovery import DiscoveryError
from tfdist.launch.elastic_receiver import DISCOVERED, Receiver
from tfdist.launch.hosts import Host, places_of
from tfdist.launch.membership import Membership
from tfdist.launch.membership_actions import (
    START_FAILURES,
    Action,
    Announce,
    Answer,
    AskStep,
    Dismiss,
    EndAt,
    Fail,
    Kill,
    Prioritize,
    Refuse,
    Request,
    Start,
    Stop,
)

if TYPE_CHECKING:
    from tfdist.launch.host_pool import HostPool


class Processes(Protocol):
    """Starts and kills the processes of the members of an elastic job."""

    def start(self, member: int, name: str, *, in_background: bool) -> bool:
        """Starts a newcomer, shown under `name`; returns False if that failed."""

    def prioritize(self, member: int) -> None:
        """Gives a newcomer the same share of the CPUs as the ranks."""

    def kill(self, member: int) -> None:
        """Kills a member's process, if it is still running."""

    def stopped(self) -> Collection[int]:
        """Returns the members whose processes are stopped (SIGSTOP)."""

    def formed(self, ranks: Mapping[int, int]) -> None:
        """Stores the members of a new generation, and their ranks."""

    def end_job(self) -> None:
        """Terminates all ranks, after a few seconds for their reports."""


class ElasticJob:
    """The members of one elastic job.

    Args:
        membership: decides who belongs to the job.
        store: store of the job.
        receiver: receives the requests of the members from the store.
        complain: function that prints a message, without waiting for a reader.
    """

    def __init__(
        self,
        membership: Membership,
        store: StoreThread,
        receiver: Receiver,
        complain: Callable[[str], None],
    ) -> None:
        self._complain = complain
        self._membership = membership
        self._store = store
        self._receiver = receiver
        self._numbers: dict[int, int] = {}  # member → number of its latest request
        self._pids: dict[int, int] = {}
        self._places: dict[int, dict[str, int]] = {}  # in the newest generation
        self._names: dict[int, str] = {}  # of newcomers, and of members that have left
        self._grows = False  # processes are started because the job grows
        self._processes: Processes | None = None
        self._got_sigterm: set[int] = set()  # members
        self._told_slow: set[int] = set()  # members that have asked to be replaced
        self._hosts: HostPool | None = None
        self._unwanted: frozenset[int] = frozenset()  # members on removed slots
        self._lost_hosts: set[int] = set()
        self._has_begun = False
        self._has_ended = False
        self._is_preempting = False  # tfdistrun got SIGTERM
        self._is_connecting = False  # a generation has been formed, but has not begun

    @property
    def wake_fd(self) -> int:
        """Descriptor that becomes readable when there are messages."""
        return self._receiver.fd

    @property
    def finished(self) -> bool:
        """Whether all members of the last generation have ended with exit code 0."""
        return self._membership.finished

    @property
    def is_preempted(self) -> bool:
        """Whether the generation in which the ranks save and exit has been formed."""
        return self._membership.preempted

    def has_rank(self, member: int) -> bool:
        """Returns whether a member belongs to the newest generation."""
        return member in self._membership.ranks

    def is_rank(self, member: int) -> bool:
        """Returns whether a member has a rank, and was not dismissed."""
        return self.has_rank(member) and not self.has_left(member)

    def has_left(self, member: int) -> bool:
        """Returns whether a member was dismissed."""
        return member in self._membership.left

    def attach(self, processes: Processes, hosts: HostPool) -> None:
        """Sets the objects that start and kill processes, and that manage the hosts.

        Call this before any other method.
        """
        self._processes = processes
        self._hosts = hosts

    def begin(self) -> None:
        """Starts the spares; call this after the ranks have been started."""
        self._carry_out(self._membership.begin(time.monotonic()))
        self._has_begun = True

    def lose_host(self, number: int, name: str, why: str) -> None:
        """Handles the loss of a host; call this before `ended` for its members.

        Args:
            number: number of the host.
            name: name of the host.
            why: description for the message; "" if its agent got a signal to end.
        """
        if number in self._lost_hosts or self._hosts is None:
            return
        self._lost_hosts.add(number)
        if why or not self._is_preempting:
            signalled = f"the agent on {name} got a signal"
            self._complain(why or f"{signalled}; no process is started there any more")
        slots, live = self._hosts.slots, self._membership.live
        self._hosts.lose(number)
        lost = [one for one in live if slots.host_of(one) == number] if why else []
        self._carry_out(self._membership.set_room(slots.room, time.monotonic(), lost))

    def preempt(self) -> None:
        """Handles SIGTERM to tfdistrun: the ranks finish a step, save, and exit."""
        self._is_preempting = True
        self._carry_out(self._membership.preempt(time.monotonic()))

    def started(self, member: int, pid: int) -> None:
        """Stores the process ID of a member."""
        self._pids[member] = pid

    def ended(self, member: int, how: str, *, failed: bool) -> None:
        """Handles the exit of a member's process.

        Args:
            member: number of the member.
            how: description for the message, such as "killed by SIGKILL".
            failed: whether the exit code was not 0.
        """
        rank = self._membership.ranks.get(member)
        who = self._name_of(member)
        actions = self._membership.ended(member, failed=failed, now_s=time.monotonic())
        is_expected = self.has_left(member) or self.is_preempted or self._is_preempting
        is_expected = is_expected or member in self._membership.surplus
        if failed and not (self._has_ended or self.finished or is_expected):
            self._complain(f"{who} was lost: {how}")
            if rank is None and self._membership.start_failures == START_FAILURES:
                self._complain(
                    "no more replacements are started, because the last "
                    f"{START_FAILURES} ended before they were ready to join: see "
                    "their output. The job continues while --min-np ranks are left"
                )
        self._carry_out(actions)
        self._pids.pop(member, 0)
        self._forget_requests(member)
        self._store.remove(leave_key(member))

    def _name_of(self, member: int) -> str:
        """Returns the name of a member in messages, with its process ID."""
        rank = self._membership.ranks.get(member)
        name = f"rank {rank}"
        if rank is None:
            name = self._names.get(member, f"replacement {member}")
        pid, host = self._pids.get(member), self._host_name(member)
        if pid is None:
            return name
        where = f" on {host}" if host else ""
        return f"{name} (process {pid}{where})"

    def _host_name(self, member: int) -> str:
        """Returns a member's host; "" if not started, or if this is the only host."""
        assert self._hosts is not None  # noqa: S101 - attach() was called
        return self._hosts.host_name(member) if member in self._pids else ""

    def poll(self) -> None:
        """Handles messages, hosts that are ready, stopped processes and time limits."""
        for key, value in self._receiver.take():
            if key.startswith(REQUESTS):
                self._request(key, value)
            elif key.startswith(LEAVES):
                self._leave(key, value)
            elif found := step_of(key):
                self._at_step(*found, value)
            elif key == DISCOVERED:
                self._discovered(value)
            elif key == begun_key(self._membership.generation):
                self._is_connecting = False
        assert self._processes is not None and self._hosts is not None  # noqa: S101
        if self._hosts.poll():
            self._change_slots(self._hosts)
        now_s = time.monotonic()
        for member in self._processes.stopped():
            self._carry_out(self._on_stopped(member, now_s))
        self._carry_out(self._membership.poll(now_s))

    def drop_messages(self) -> None:
        """Discards messages; call this instead of `poll` while the job ends.

        Otherwise, `wake_fd` would remain readable.
        """
        self._receiver.take()

    def _on_stopped(self, member: int, now_s: float) -> list[Action]:
        actions = self._membership.stopped(member, now_s)
        # Until they are connected, the other members do not notice a stopped process.
        if not actions and self._is_connecting and member in self._membership.ranks:
            reason = "it is stopped (SIGSTOP) while the other ranks connect to it"
            return [Kill(member, reason)]
        return actions

    def _request(self, key: str, value: Any) -> None:
        try:
            member, number = (int(part) for part in key[len(REQUESTS) :].split("/"))
            request = Request(
                member=member,
                generation=int(value["generation"]),
                committed=int(value["committed"]),
                failed=tuple(int(rank) for rank in value["failed"]),
                program=str(value["program"]),
            )
        except (KeyError, TypeError, ValueError):
            return  # not from a member of this version
        if number != self._numbers.get(member):
            self._forget_requests(member)
        self._numbers[member] = number
        self._carry_out(self._membership.request(request, time.monotonic()))

    def _forget_requests(self, member: int) -> None:
        """Removes a member's latest request, and the answer to it, from the store."""
        if number := self._numbers.pop(member, 0):
            self._store.remove(request_key(member, number))
            self._store.remove(answer_key(member, number))

    def _leave(self, key: str, value: Any) -> None:
        try:
            member = int(key[len(LEAVES) :])
        except ValueError:
            return  # not from a member of this version
        if value == SLOW:
            self._replace(member, time.monotonic())
            return
        if member in self._pids and member not in self._got_sigterm:
            self._got_sigterm.add(member)
            if not self._is_preempting:
                self._complain(
                    f"{self._name_of(member)} got SIGTERM, and leaves after a step"
                )
        self._carry_out(self._membership.leave(member, time.monotonic()))

    def _replace(self, member: int, now_s: float) -> None:
        """Replaces a slow member; if that is refused, prints the reason once."""
        reason = self._membership.reason_to_keep(member, now_s)
        text = f"is slow, but is not replaced: {reason}"
        if not reason:
            text = "is slow, and is to be replaced"
        if member in self._pids and not (reason and member in self._told_slow):
            self._complain(f"{self._name_of(member)} {text}")
        self._told_slow.add(member)
        self._carry_out(self._membership.replace(member, now_s))

    def _at_step(self, generation: int, member: int, value: Any) -> None:
        try:
            committed = int(value)
        except (TypeError, ValueError):
            return  # not from a member of this version
        now_s = time.monotonic()
        self._carry_out(self._membership.at_step(member, generation, committed, now_s))

    def _discovered(self, found: Sequence[Host] | DiscoveryError) -> None:
        if isinstance(found, DiscoveryError):
            ranks = _ranks(self._membership.size)
            self._complain(f"warning: {found}. The job keeps its {ranks}")
        elif self._hosts is not None:
            self._hosts.follow(found)
            self._change_slots(self._hosts)

    def _change_slots(self, hosts: HostPool) -> None:
        """Resizes the job to the current slots, and moves ranks off removed slots."""
        before, number = self._membership.size, hosts.listed_slots
        unwanted = hosts.slots.unwanted(self._membership.live)
        actions = self._membership.resize(hosts.slots.room, time.monotonic(), unwanted)
        size = self._membership.size
        if size != before:
            verb = "grows" if size > before else "shrinks"
            slots = f"{number} slot{'s' if number != 1 else ''}"
            who = "this host has" if hosts.is_only_here else "the hosts have"
            limit = " (--min-np)" if number < size else ""
            text = f"{who} {slots} now: the job {verb} to {_ranks(size)}{limit}"
            self._complain(text)
        self._report_removed_slots(hosts)
        self._grows = True
        self._carry_out(actions)
        self._grows = False

    def _report_removed_slots(self, hosts: HostPool) -> None:
        ranks, unwanted = self._membership.ranks, self._membership.unwanted
        moved = [ranks[one] for one in unwanted - self._unwanted if one in ranks]
        self._unwanted = unwanted
        if moved and not hosts.is_only_here:
            self._complain(
                f"the slots of {numbers(sorted(moved))} were removed, and will be "
                "vacated once --min-np other ranks are ready"
            )

    def _carry_out(self, actions: list[Action]) -> None:
        assert self._processes is not None and self._hosts is not None  # noqa: S101
        if ranks := {
            one.member: one.rank for one in actions if isinstance(one, Answer)
        }:
            self._store.remove_prefix(REPORTS)  # reports of ranks that were lost
            # Keys of the previous generation are kept: members may still read them.
            self._store.remove_prefix(
                prefix_of_generation(self._membership.generation - 2)
            )
            self._is_connecting = True
            self._processes.formed(ranks)
            self._set_places(ranks, self._hosts)
            committed = self._membership.committed
            if self.is_preempted:
                self._complain(
                    f"the job is preempted after commit {committed}: its "
                    f"{_ranks(len(ranks))} may save their state now"
                )
            else:
                self._complain(
                    f"the job goes on with {_ranks(len(ranks))} after commit "
                    f"{committed}"
                )
            self._note_names(ranks)
        for action in actions:
            self._carry_out_one(action, self._processes, self._hosts)

    def _set_places(self, ranks: Mapping[int, int], hosts: HostPool) -> None:
        """Computes the places of a new generation's members, for their answers."""
        members = sorted(ranks, key=lambda member: ranks[member])
        places = places_of([hosts.slots.host_of(member) for member in members])
        generation = {"generation": self._membership.generation, "size": len(ranks)}
        self._places = {
            member: {**asdict(place), **generation}
            for member, place in zip(members, places, strict=True)
        }

    def _note_names(self, ranks: Mapping[int, int]) -> None:
        """Stores the members' ranks, as names in messages after they have left."""
        self._names |= {member: f"rank {rank}" for member, rank in ranks.items()}

    def _carry_out_one(
        self, action: Action, processes: Processes, hosts: HostPool
    ) -> None:
        match action:
            case Start(member, in_background):
                kind = "newcomer" if self._grows else "replacement"
                self._names[member] = f"{kind} {member}"
                name = self._names[member]
                if processes.start(member, name, in_background=in_background):
                    kind = kind if self._has_begun else "spare"
                    pid, host = self._pids.get(member), hosts.host_name(member)
                    where = f" on {host}" if host else ""
                    shown = f" (process {pid})" if pid is not None else ""
                    self._complain(f"{kind} {member}{shown} is started{where}")
                else:
                    failed = self._membership.ended(
                        member, failed=True, now_s=time.monotonic()
                    )
                    self._carry_out(failed)
            case Prioritize(member):
                processes.prioritize(member)
            case Kill(member, reason):
                if not self._membership.finished:
                    self._complain(f"{self._name_of(member)} is killed: {reason}")
                processes.kill(member)
            case Answer(member, is_last=is_last):
                key = answer_key(member, self._numbers[member])
                self._store.set(key, {**self._places[member], "is_last": is_last})
            case Refuse(member, reason):
                key = answer_key(member, self._numbers[member])
                self._store.set(key, {"refused": reason})
            case Dismiss(member):
                key = answer_key(member, self._numbers[member])
                self._store.set(key, {"dismissed": True})
            case AskStep(generation):
                self._store.set(ask_step_key(generation), True)
                # After SIGTERM to the job, a program that does not hand over at an
                # agreed step saves and exits by itself.
                if not self._is_preempting:
                    self._store.set(change_key(generation), True)
            case EndAt(generation, committed):
                self._store.set(end_key(generation), committed)
            case Announce(generation):
                self._store.set(join_key(generation), True)
                self._store.set(change_key(generation), True)
            case Fail(generation, member, rank):
                self._store.set(
                    failure_key(generation),
                    {
                        "rank": rank,
                        "host": self._host_name(member) or os.uname().nodename,
                        "pid": self._pids.get(member, 0),
                        "cause": "its process ended",
                    },
                )
            case Stop(reason):
                self._has_ended = True
                if not self._is_preempting:  # else the signal is the reason
                    self._complain(f"the job ends: {reason}")
                processes.end_job()


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
