"""The hosts of a job: their agents and CPUs, and the slots of the job's processes.

The hosts of an elastic job can change while it runs. If the discovery script adds a
host, the supervisor's event loop handles the connection to it. Its slots are used once
its agent is ready.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tfdist.launch import agent_job, binding, remote
from tfdist.launch.connection import AgentConnection, SshConnection
from tfdist.launch.hosts import Host, Place, Slot
from tfdist.launch.options import host_timeout_s, ssh_command
from tfdist.launch.slots import Slots

if TYPE_CHECKING:
    from tfdist.launch.job import Job
    from tfdist.launch.nodes.accept import Nodes
    from tfdist.launch.signals import Signals
    from tfdist.launch.supervisor import Supervisor

_END_S = 1.0  # from SIGTERM to the end of a command that takes too long to connect


class HostsFailedError(Exception):
    """Ranks cannot be started on some hosts; `lines` name the hosts and reasons."""

    def __init__(self, lines: list[str], code: int) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.code = code


class HostPool:
    """The hosts of a job.

    Each host has a number. A host whose connection has ended is not used any more. If
    the discovery script adds it again later, it is treated as a new host, with a new
    number.

    Args:
        job: the job.
        address: address of the store.
        nodes: the other hosts of --nnodes, which have connected; None without --nnodes.

    Attributes:
        hosts: all hosts that the job has had; the index is the number of the host.
        agents: open connections to other hosts, including those whose agent is not
            ready yet, by number of the host.
        connections: all connections that were made, including closed ones.
        slots: the slots of the hosts, and the slot of each process.
    """

    def __init__(self, job: Job, address: str, nodes: Nodes | None = None) -> None:
        self._job = job
        self._address = address
        self._nodes = nodes
        self._supervisor: Supervisor | None = None
        names = {} if nodes is None else nodes.names
        self.hosts = [
            replace(host, name=names.get(number, host.name))
            for number, host in enumerate(job.plan.hosts)
        ]
        self.agents: dict[int, remote.RemoteHost] = {}
        self.connections: list[remote.RemoteHost] = []
        self.slots = Slots(job.plan.slots, least=job.options.min_size or 0)
        self._bound = dict(job.plan.bound)  # host → CPU IDs of each of its slots
        self._warned: set[str] = set()
        # The hosts that the discovery script lists: name → number, number → slots.
        self._numbers = {_key(host): number for number, host in enumerate(self.hosts)}
        self._listed = {number: host.slots for number, host in enumerate(self.hosts)}
        self._failed: set[int] = set()  # hosts that were lost, or cannot be used
        self._deadlines_s: dict[int, float] = {}  # of hosts whose agent is not ready

    # ---- the start ----

    def connect_all(self, signals: Signals) -> int | None:
        """Connects to all other hosts, and waits until their agents are ready.

        Returns:
            The signal that interrupted the wait; None if there was none.

        Raises:
            HostsFailedError: ranks cannot be started on a host; no rank was started.
        """
        plan, limit_s = self._job.plan, host_timeout_s(self._job.options)
        for number in plan.remote:
            slots = sum(slot.host == number for slot in plan.slots)
            self._connect(number, slots, plan.on(number))
        agents = [*self.agents.values()]
        if not agents:
            return None
        signal = remote.prepare_all(agents, signals, timeout_s=limit_s)
        failed = [one for one in agents if one.failure]
        if signal is not None:
            self._end_all(128 + signal)
        elif failed:
            self._end_all(failed[0].failure_code)
            lines = [
                line
                for one in failed
                for line in f"{one.host.name}: {one.failure}".split("\n")
            ]
            raise HostsFailedError(lines, failed[0].failure_code)
        for number in self.agents:
            self._note_ready(number)
        return signal

    def _end_all(self, code: int) -> None:
        """Terminates all agents before the job has started; `code` is its exit code."""
        for agent in self.agents.values():
            agent.kill(code)

    def report_bindings(self) -> None:
        """Prints the CPUs of all slots, with --report-bindings; prints warnings."""
        self._warn_of_bindings()
        if self._job.options.report_bindings:
            self._job.complain(*self._binding_lines())

    def attach(self, supervisor: Supervisor) -> None:
        """Sets the supervisor, which watches the processes and later connections."""
        self._supervisor = supervisor

    def _connect(self, number: int, slots: int, places: Sequence[Place] = ()) -> None:
        """Connects to the agent of a host.

        Raises:
            OSError: no process or descriptor is available.
        """
        description = agent_job.describe(
            self._job, self._address, number=number, slots=slots, places=places
        )
        host, ranks = self.hosts[number], [place.rank for place in places]
        connection: AgentConnection
        if self._nodes is not None:
            connection = self._nodes.connections[number]
        else:
            line = remote.remote_line(sys.executable, os.environ.get("PYTHONPATH"))
            connection = SshConnection(ssh_command(self._job.options), host.name, line)
            if not self.connections:
                self._warn_of_variables()
        agent = remote.RemoteHost(host, ranks, connection, number)
        self.connections.append(agent)
        self.agents[number] = agent
        agent.prepare(description)

    def _warn_of_variables(self) -> None:
        crossed = agent_job.crossing(os.environ, dict(self._job.options.env))
        if names := agent_job.missed(os.environ, crossed):
            self._job.complain(
                "warning: set on this host, but not for the ranks on other hosts: "
                f"{', '.join(names)}; pass them on with -x NAME"
            )

    def _note_ready(self, number: int) -> None:
        """Prints the warnings of a host's agent, and stores the CPUs of its slots."""
        agent = self.agents[number]
        for text in agent.warnings:
            self._job.complain(f"warning: {agent.host.name}: {text}")
        self._bound[number] = agent.bound

    # ---- processors ----

    def processors(self, slot: Slot) -> Sequence[int]:
        """Returns the CPU IDs of a slot of this host."""
        return binding.of_slot(self._bound[slot.host], slot.index)

    def _by_rank(self) -> dict[int, tuple[int, Sequence[int]]]:
        """Returns the host and CPU IDs of each slot, by rank.

        The ranks are those of a job that uses all slots.
        """
        pairs = [
            (host, them) for host in sorted(self._bound) for them in self._bound[host]
        ]
        return dict(enumerate(pairs))

    def _warn_of_bindings(self) -> None:
        by_rank = self._by_rank()
        own = os.environ.get(binding.THREADS, "")
        threads = {number: agent.threads for number, agent in self.agents.items()}
        asked = {rank: threads.get(host, own) for rank, (host, _) in by_rank.items()}
        bound = {rank: them for rank, (_, them) in by_rank.items()}
        for text in binding.warnings(bound, asked):
            if text not in self._warned:
                self._job.complain(f"warning: {text}")
                self._warned.add(text)

    def _binding_lines(self) -> list[str]:
        by_rank = self._by_rank()
        bound = {rank: them for rank, (_, them) in by_rank.items()}
        names = {rank: self.hosts[host].name for rank, (host, _) in by_rank.items()}
        return binding.lines(bound, names)

    # ---- changes of an elastic job ----

    @property
    def is_only_here(self) -> bool:
        """Whether this machine is the only host that the job has had."""
        return len(self.hosts) == 1 and self.hosts[0].is_local

    @property
    def listed_slots(self) -> int:
        """Number of slots that the discovery script lists on hosts that can be used."""
        return sum(self._listed[number] for number in self._usable())

    @property
    def running(self) -> Collection[int]:
        """Numbers of the processes that have not exited."""
        return self._supervisor.running if self._supervisor else ()

    def host_name(self, member: int) -> str:
        """Returns the name of a member's host; "" if the job only has this machine."""
        number = self.slots.host_of(member)
        return "" if self.is_only_here else self.hosts[number].name

    def lose(self, number: int) -> None:
        """Removes a host that was lost, or whose agent got a signal to end."""
        self.slots.lose(number)
        self._failed.add(number)
        self._remove(number)

    def follow(self, found: Sequence[Host]) -> None:
        """Adds and removes hosts and slots as the discovery script lists them.

        `poll` adds the slots of a new remote host once its agent is ready.

        Args:
            found: the hosts that the script lists, and their slots, in order.
        """
        for key, number in [*self._numbers.items()]:
            if number in self._failed and number not in self._listed:
                del self._numbers[key]  # it may be added again
        listed = {}
        for host in found:
            key = _key(host)
            if key not in self._numbers:
                self._numbers[key] = self._add(host)
            listed[self._numbers[key]] = host.slots
        self._listed = listed
        self._change_slots()

    def poll(self) -> bool:
        """Starts to use hosts that have become ready; drops removed and failed hosts.

        Returns:
            Whether the slots have changed.
        """
        has_changed = False
        for number, deadline_s in [*self._deadlines_s.items()]:
            agent, now_s = self.agents[number], time.monotonic()
            if agent.failure or number not in self._listed:
                self._give_up(number)
            elif agent.state == "ready":
                self._use(number)
                has_changed = True
            elif self._supervisor is not None and self._supervisor.paused:
                self._deadlines_s[number] = self._deadline_s()  # nothing is read
            elif now_s >= deadline_s + _END_S:
                self._close(agent)
            elif now_s >= deadline_s:
                agent.time_out(host_timeout_s(self._job.options))
        if has_changed:
            self._change_slots()
        self._end_unused_agents()
        return has_changed

    def _add(self, host: Host) -> int:
        """Adds a host, connects to it unless it is this machine; returns its number."""
        number = len(self.hosts)
        self.hosts.append(host)
        slots = min(host.slots, self._job.plan.max_size)
        try:
            if host.is_local:
                self._bound[number] = binding.here(slots, self._job.options.bind_to)
                self._report_new(number)
            else:
                self._connect(number, slots)
                if self._supervisor is not None:
                    self._supervisor.add_remote(self.agents[number])
                self._deadlines_s[number] = self._deadline_s()
        except (OSError, binding.BindingError) as error:
            self._refuse(number, str(error))
        return number

    def _deadline_s(self) -> float:
        return time.monotonic() + host_timeout_s(self._job.options)

    def _use(self, number: int) -> None:
        """Starts to use a host whose agent is ready."""
        del self._deadlines_s[number]
        self.agents[number].go()
        self._note_ready(number)
        self._report_new(number)

    def _report_new(self, number: int) -> None:
        self._warn_of_bindings()
        if self._job.options.report_bindings:
            name = self.hosts[number].name
            self._job.complain(
                *(
                    f"slot {index} of {name} may use processors {binding.ranges(them)}"
                    for index, them in enumerate(self._bound[number])
                )
            )

    def _give_up(self, number: int) -> None:
        """Terminates the agent of a host that has failed, or is no longer listed."""
        del self._deadlines_s[number]
        agent = self.agents.pop(number)
        agent.kill()
        self._close(agent)
        self._refuse(number, agent.failure if number in self._listed else "")

    def _refuse(self, number: int, why: str) -> None:
        """Excludes a host until the script has stopped listing it and lists it again.

        Args:
            number: number of the host.
            why: reason for a warning; "" for no warning.
        """
        self._failed.add(number)
        name = self.hosts[number].name
        if why:
            self._job.complain(
                *f"warning: {name} cannot be used: {why}".split("\n"),
                "  The job continues without it. It is tried again when the discovery "
                "script has stopped listing it, and lists it again",
            )

    def _close(self, agent: remote.RemoteHost) -> None:
        if self._supervisor is not None:
            self._supervisor.close_remote(agent)

    def _end_unused_agents(self) -> None:
        """Terminates the agents of removed hosts on which no process is left."""
        unlisted = self.agents.keys() - self._listed.keys() - self._deadlines_s.keys()
        running = {self.slots.host_of(member) for member in self.running}
        unused = unlisted - running - self.slots.hosts
        for number in unused:
            self.agents[number].finish()
            self._remove(number)
            del self._numbers[_key(self.hosts[number])]

    def _remove(self, number: int) -> None:
        self.agents.pop(number, None)
        self._bound.pop(number, None)

    def _usable(self) -> list[int]:
        """Returns the hosts that are listed and connected, in order."""
        ready = self.agents.keys() - self._deadlines_s.keys()
        return [
            number
            for number in self._listed
            if number not in self._failed
            and (self.hosts[number].is_local or number in ready)
        ]

    def _change_slots(self) -> None:
        most = self._job.plan.max_size
        slots = [
            Slot(number, index)
            for number in self._usable()
            for index in range(min(self._listed[number], most))
        ]
        self.slots.change(slots, self.running)


def _key(host: Host) -> str:
    """Returns a host's name as a key; "" for this machine, whichever name it has."""
    return "" if host.is_local else host.name
