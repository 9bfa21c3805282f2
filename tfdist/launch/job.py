"""Runs a job: the store, the ranks of this host, the agents of the other hosts."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tfdist.core.rendezvous import auth, renewal
from tfdist.core.rendezvous.address import own_address, route_to
from tfdist.core.rendezvous.connect import checked_address
from tfdist.core.rendezvous.environment import LAUNCHER_JOB
from tfdist.core.rendezvous.errors import invalid
from tfdist.core.rendezvous.failure_report import PREFIX
from tfdist.core.rendezvous.secret import keep_in_memory
from tfdist.core.rendezvous.store import StoreThread
from tfdist.launch import output, processes
from tfdist.launch.discovery import HostDiscovery
from tfdist.launch.elastic import ElasticJob
from tfdist.launch.elastic_receiver import Receiver
from tfdist.launch.horovod import mode
from tfdist.launch.host_pool import HostPool
from tfdist.launch.hosts import Host, Place, Slot
from tfdist.launch.membership import Membership
from tfdist.launch.nodes.accept import Nodes, accept_nodes
from tfdist.launch.nodes.place import NodePlace, job_secret, shared_secret
from tfdist.launch.options import DEFAULT_RESTARTS, host_timeout_s
from tfdist.launch.outcome import Outcome
from tfdist.launch.output import complain
from tfdist.launch.rank_starter import RankStarter
from tfdist.launch.signals import Signals
from tfdist.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from tfdist.launch.remote import RemoteHost


_LAST_MESSAGES_S = 1.0  # to write the last messages if the job could not start


@dataclass(frozen=True)
class Plan:
    """Assignment of ranks to hosts.

    Attributes:
        hosts: the hosts.
        places: places of the ranks with which the job starts.
        max_size: largest number of ranks that the job can have.
        slots: the slots of the ranks in `places`, followed by free slots. An elastic
            job uses a free slot when it grows, or when a host was lost.
        bound: CPU IDs of each slot of this machine, by its index in `hosts`.
        can_get_hosts: whether other hosts may be added while the job runs.
    """

    hosts: Sequence[Host]
    places: Sequence[Place]
    max_size: int
    slots: Sequence[Slot]
    bound: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    can_get_hosts: bool = False

    def on(self, host: int) -> list[Place]:
        """Returns the places of the ranks on one host."""
        return [place for place in self.places if place.host == host]

    @property
    def used(self) -> list[int]:
        """Hosts that have slots."""
        return sorted({slot.host for slot in self.slots})

    @property
    def remote(self) -> list[int]:
        """Hosts whose ranks are started by an agent."""
        return [host for host in self.used if not self.hosts[host].is_local]

    @property
    def local_hosts(self) -> list[int]:
        """List with the index of this machine; empty if the job has no slots here."""
        return [host for host in self.used if self.hosts[host].is_local]

    @property
    def local(self) -> list[Place]:
        """Places of the ranks on this machine."""
        return [p for p in self.places if self.hosts[p.host].is_local]


def store_host(plan: Plan, environ: Mapping[str, str], reached: str = "") -> str:
    """Returns the address for the store, which all hosts of the job can reach.

    Args:
        plan: assignment of ranks to hosts.
        environ: environment variables.
        reached: address at which all other hosts have reached this one; "" if there is
            none.

    Raises:
        RendezvousError: there is no such address.
    """
    if not plan.remote and not plan.can_get_hosts:
        return "127.0.0.1"
    if choice := environ.get("TFDIST_ADDRESS"):
        return own_address(choice)  # agents that cannot reach it report an error
    if reached:
        return reached
    names = [plan.hosts[host].address for host in plan.remote[:8]]
    ways = (route_to(name) for name in names)
    # If no name can be resolved except by ssh, use the default route: the route to an
    # address that is reserved for documentation.
    found = next((own for own in ways if own), None) or route_to("192.0.2.1")
    if found is None and not plan.remote:
        return "127.0.0.1"
    if found is None:
        raise invalid(
            f"no address of this machine can reach {names[0]}, whose ranks must "
            "connect to tfdistrun; set TFDIST_ADDRESS to an address, network or "
            "interface that can"
        )
    return found


# ---- the job ----


def _sink(stream: TextIO | None) -> output.Sink:
    if stream is None:  # it was closed when this process started
        return output.Sink(None, is_terminal=False)
    stream.flush()
    return output.Sink(stream.fileno(), is_terminal=stream.isatty())


@dataclass
class _Streams:
    """Standard output and error of this process."""

    stdout: output.Screen
    stderr: output.Screen

    @classmethod
    def own(cls) -> _Streams:
        out, err = _sink(sys.stdout), _sink(sys.stderr)
        screen = output.Screen(out)
        # Two writers to the same file would break each other's lines. On a terminal,
        # standard output and standard error also share the unfinished last line.
        shared = out.is_terminal and err.is_terminal
        if not shared and sys.stdout and sys.stderr:
            shared = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
        return cls(screen, screen if shared else output.Screen(err))

    def terminal_columns(self, own: output.RankOutput) -> int | None:
        """Returns the width of the rank's terminal; None if it writes to a pipe."""
        if own.rank != 0 or not self.stdout.sink.is_terminal:
            return None
        return shutil.get_terminal_size().columns - len(own.prefix(color=False))

    def mergers(
        self, own: output.RankOutput
    ) -> tuple[output.StreamMerger, output.StreamMerger]:
        """Returns the mergers of one rank's two streams."""
        return _merger(own, self.stdout), _merger(own, self.stderr)


def _merger(own: output.RankOutput, screen: output.Screen) -> output.StreamMerger:
    color = screen.sink.is_terminal and "NO_COLOR" not in os.environ
    return output.StreamMerger(own, screen, color=color)


class Job:
    """Starts all ranks, watches them until they exit, and cleans up.

    Args:
        options: options of the command line.
        plan: assignment of ranks to hosts.
        folder: folder of the log files.
        shm_bytes: shared memory of a link between two ranks of a host; 0 if they use
            TCP.
        discovery: lists the hosts and slots that an elastic job may use; None if they
            are always those of the plan.
        place: this host's place among the hosts of --nnodes; None without --nnodes.

    Raises:
        RendezvousError: with --nnodes, TFDIST_SECRET_FILE is not set, or the file
            cannot be used.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        plan: Plan,
        folder: Path,
        shm_bytes: int,
        discovery: HostDiscovery | None = None,
        place: NodePlace | None = None,
    ) -> None:
        self.options = options
        self.plan = plan
        self.folder = folder
        self.shm_bytes = shm_bytes
        self.name = f"{LAUNCHER_JOB}{os.getpid()}:{secrets.token_hex(8)}"
        self.place = place
        self._shared = b"" if place is None else shared_secret(os.environ)
        self.secret = auth.new_secret()
        if place is not None:
            self.secret = job_secret(self._shared, self.name)
        self.streams = _Streams.own()
        self.receiver = Receiver() if options.min_size is not None else None
        self._discovery = discovery

    def run(self) -> Outcome:
        """Runs the job.

        Raises:
            HostsFailedError: ranks cannot be started on a host; no rank was started.
            NodesError: a host of --nnodes is missing, or has different options.
            RendezvousError: there is no address for the store.
            OSError: no process or descriptor is available.
        """
        signals = Signals()
        processes.adopt_orphans()
        guard = processes.Guard(self.name)
        try:
            with contextlib.ExitStack() as stack:
                nodes = self._accept_nodes(signals)
                if isinstance(nodes, int):
                    return Outcome(signal=nodes)
                reached = "" if nodes is None else nodes.address
                store, path = stack.enter_context(self._store(reached))
                pool = HostPool(self, store.address, nodes)
                stack.callback(_close_all, pool.connections)
                number = pool.connect_all(signals)
                if number is not None:
                    return Outcome(signal=number)
                pool.report_bindings()
                elastic = self._elastic(store)
                supervisor = Supervisor(
                    guard=guard,
                    grace_s=self.options.grace_s,
                    signal_grace_s=self.options.signal_grace_s,
                    told=lambda: _told(store),
                    stdout=self.streams.stdout,
                    stderr=self.streams.stderr,
                    elastic=elastic,
                )
                pool.attach(supervisor)
                ranks = RankStarter(self, pool, supervisor, store.address, path, stack)
                if elastic is not None:
                    elastic.attach(ranks, pool)
                ranks.start_all()
                if elastic is not None:
                    elastic.begin()
                    self._discover(stack)
                outcome = supervisor.run(signals)
                outcome.joined = store.joined
                used = [one.memory_bytes for one in pool.connections]
                outcome.memory_bytes = max([processes.memory_of_children(), *used])
                return outcome
        finally:
            left = processes.kill_all(self.name, excluded_pids={guard.pid})
            guard.dismiss()
            signals.close()
            self.streams.stderr.sink.flush(_LAST_MESSAGES_S)
            if left:
                complain(f"these processes could not be killed: {left}")

    def complain(self, *lines: str) -> None:
        """Prints messages of tfdistrun, without waiting for a reader."""
        self.streams.stderr.complain(*lines)

    def _accept_nodes(self, signals: Signals) -> Nodes | int | None:
        """Waits for the other hosts of --nnodes; returns them, a signal, or None."""
        if self.place is None:
            return None
        checked_address(os.environ)  # before the wait for the other hosts
        limit_s = host_timeout_s(self.options)
        return accept_nodes(self.options, self.place, self._shared, signals, limit_s)

    @contextlib.contextmanager
    def _store(self, reached: str) -> Iterator[tuple[StoreThread, str]]:
        """Runs the job's store; yields the store, and the path of the secret file."""
        host = store_host(self.plan, os.environ, reached)
        fd, path = keep_in_memory(self.secret)
        try:
            store = StoreThread(
                self.secret,
                host=host,
                job=self.name,
                size=self.plan.max_size,
                on_set=self.receiver.put if self.receiver else None,
            )
            store.start()
            try:
                yield store, path
            finally:
                store.close()
                if self.receiver is not None:
                    self.receiver.close()
        finally:
            os.close(fd)

    def _elastic(self, store: StoreThread) -> ElasticJob | None:
        if self.receiver is None:
            return None
        chosen = self.options.max_restarts
        membership = Membership(
            len(self.plan.places),
            min_size=self.options.min_size,
            max_restarts=DEFAULT_RESTARTS if chosen is None else chosen,
            max_size=self.plan.max_size,
            spares=self.options.spares or 0,
            leave_limit_s=self.options.signal_grace_s,
        )
        return ElasticJob(membership, store, self.receiver, self.complain)

    def _discover(self, stack: contextlib.ExitStack) -> None:
        """Starts to run the discovery script, which is run until the job ends."""
        if self._discovery is not None and self.receiver is not None:
            stack.callback(self._discovery.close)
            self._discovery.start(self.receiver.discovered)

    # ---- ranks ----

    def variables_of(self, place: Place, size: int | None = None) -> dict[str, str]:
        """Returns the variables that tell a rank its place in the job.

        Args:
            place: the place.
            size: number of ranks; default: the number with which the job starts.
        """
        size = len(self.plan.places) if size is None else size
        told = mode.variables_of(place, size) if self.options.horovod else {}
        if self.options.min_size is not None:
            told[renewal.MEMBER] = str(place.rank)
            # While its only rank moves to another host, a job has two ranks.
            least = 2 if self.plan.can_get_hosts else 1
            told[renewal.MAX_SIZE] = str(max(self.plan.max_size, least))
        return {**place.variables(size), **told}

    def output_of(
        self, rank: int, log: Any, size: int | None = None
    ) -> output.RankOutput:
        """Returns a `RankOutput`, which also writes a rank's output to `log`.

        Args:
            rank: the rank.
            log: the log file; None for none.
            size: number of ranks; default: the largest number that the job can have.
        """
        size = self.plan.max_size if size is None else size
        return output.RankOutput(rank, size, log, self.options.timestamps)


def _close_all(connections: Sequence[RemoteHost]) -> None:
    for one in connections:
        one.kill()
    for one in connections:
        one.close("it is no longer needed")


def _told(store: StoreThread) -> dict[int, dict[str, Any]]:
    """Returns the reports of the ranks, by rank or by member of an elastic job."""
    return {
        int(key.removeprefix(PREFIX)): told
        for key, told in store.values(PREFIX).items()
    }
