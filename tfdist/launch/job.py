"""Runs a job: the store, the ranks of this host, the agents of the other hosts."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tfdist.core import allocator
from tfdist.core.rendezvous import auth, renewal
from tfdist.core.rendezvous.address import own_address, route_to
from tfdist.core.rendezvous.environment import LAUNCHER_JOB
from tfdist.core.rendezvous.errors import invalid
from tfdist.core.rendezvous.failure_report import PREFIX
from tfdist.core.rendezvous.secret import keep_in_memory
from tfdist.core.rendezvous.store import StoreThread
from tfdist.launch import binding, output, processes, remote
from tfdist.launch.discovery import HostDiscovery
from tfdist.launch.elastic import ElasticJob, Receiver
from tfdist.launch.horovod import mode
from tfdist.launch.hosts import Host, Place
from tfdist.launch.membership import Membership
from tfdist.launch.options import DEFAULT_RESTARTS, host_timeout_s, ssh_command
from tfdist.launch.output import complain
from tfdist.launch.rank_starter import RankStarter
from tfdist.launch.signals import Signals
from tfdist.launch.supervisor import Outcome, Supervisor

# Specific to one host or one rank, or set again on each host.
_STAYS_HERE = (
    "TFDIST_SECRET_FILE",
    "TFDIST_RENDEZVOUS",
    "TFDIST_LOG_DIR",
    "TFDIST_RANK",
    "TFDIST_SIZE",
)
# Variables that affect results or speed, and that users expect on every rank.
_TERRAFORM = ("TF_CLI_", "TF_VAR_")  # a different program with the prefix TF_
_MISSED = ("TF_", "KERAS_", "XLA_", "OMP_", "MKL_", "NCCL_", "CUDA_", "LD_LIBRARY_PATH")


class HostsFailedError(Exception):
    """Ranks cannot be started on some hosts; `lines` names the hosts and reasons."""

    def __init__(self, lines: list[str], code: int) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
        self.code = code


@dataclass(frozen=True)
class Plan:
    """Assignment of ranks to hosts.

    Attributes:
        hosts: the hosts.
        places: places of the ranks with which the job starts.
        max_size: largest number of ranks of the job.
        free: places where an elastic job may start further processes, because it grows
            or a host was lost.
        bound: processors of the slots of this host, by their numbers.
    """

    hosts: Sequence[Host]
    places: Sequence[Place]
    max_size: int
    free: Sequence[Place] = ()
    bound: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def slots(self) -> list[Place]:
        """Places of the ranks, and free places."""
        return [*self.places, *self.free]

    def slots_on(self, host: int) -> list[int]:
        """Returns the numbers of the slots of one host."""
        return [place.rank for place in self.slots if place.host == host]

    def on(self, host: int) -> list[Place]:
        """Returns the ranks of one host."""
        return [place for place in self.places if place.host == host]

    @property
    def used(self) -> list[int]:
        """Hosts that have ranks, or may get some."""
        return sorted({place.host for place in self.slots})

    @property
    def remote(self) -> list[int]:
        """Hosts whose ranks are started through ssh."""
        return [host for host in self.used if not self.hosts[host].is_local]

    @property
    def local_hosts(self) -> list[int]:
        """This machine, if it is one of the hosts."""
        return [host for host in self.used if self.hosts[host].is_local]

    @property
    def local(self) -> list[Place]:
        """Ranks of this machine."""
        return [p for p in self.places if self.hosts[p.host].is_local]


# ---- what is sent to other hosts ----


def _of_this_host(name: str, environ: Mapping[str, str]) -> bool:
    """Returns whether TFDIST_ADDRESS is an address, and so valid only on this host.

    A network or interface is valid on all hosts.
    """
    if name != "TFDIST_ADDRESS":
        return False
    try:
        ipaddress.ip_address(environ[name])
    except ValueError:
        return False
    return True


def crossing(environ: Mapping[str, str], exported: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ranks on other hosts receive.

    Args:
        environ: environment variables of this process.
        exported: variables that the user gave with -x.

    Example:
        >>> from tfdist.launch import job
        >>> job.crossing({"TFDIST_TIMEOUT_S": "9", "HOME": "/root"}, {"A": "b"})
        {'PYTHONUNBUFFERED': '1', 'TFDIST_TIMEOUT_S': '9', 'A': 'b'}
    """
    found = {
        name: value
        for name, value in environ.items()
        if (name.startswith("TFDIST_") or name == "PYTHONPATH")
        and name not in _STAYS_HERE
        and not _of_this_host(name, environ)
    }
    return {"PYTHONUNBUFFERED": "1", **found, **exported}


def missed(environ: Mapping[str, str], crossed: Mapping[str, str]) -> list[str]:
    """Returns variables that are set only on this host, but expected on all hosts."""
    everywhere = allocator.settings({})
    return sorted(
        name
        for name in environ.keys() - crossed.keys()
        if name.startswith(_MISSED)
        and not name.startswith(_TERRAFORM)
        and environ[name] != everywhere.get(name)
    )


def working_directory() -> str:
    """Returns this folder with its symbolic links, as shared file systems need them."""
    logical = os.environ.get("PWD", "")
    try:
        if logical.startswith("/") and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    return os.getcwd()


def store_host(plan: Plan, environ: Mapping[str, str]) -> str:
    """Returns an address for the store that all hosts of the job can reach.

    Raises:
        RendezvousError: there is no such address.
    """
    if not plan.remote:
        return "127.0.0.1"
    if choice := environ.get("TFDIST_ADDRESS"):
        return own_address(choice)  # the agents report if it does not work
    names = [plan.hosts[host].address for host in plan.remote[:8]]
    ways = (route_to(name) for name in names)
    # If only ssh knows a name, use the default route (to an address for documentation).
    found = next((own for own in ways if own), None) or route_to("192.0.2.1")
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
        # If both are the same file, concurrent writes would break lines; on a terminal,
        # both share the bottom line.
        shared = out.is_terminal and err.is_terminal
        if not shared and sys.stdout and sys.stderr:
            shared = os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
        return cls(screen, screen if shared else output.Screen(err))

    def terminal_columns(self, own: output.RankOutput) -> int | None:
        """Returns the width of the terminal for rank 0; None for a pipe."""
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
    """Starts all ranks, watches them until they end, and cleans up.

    Args:
        options: options of the command line.
        plan: assignment of ranks to hosts.
        folder: folder of the log files.
        shm_bytes: shared memory of a link between two ranks of a host; 0 if they use
            TCP.
        discovery: finds out how many ranks an elastic job may have; None: as many as
            the plan has.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        plan: Plan,
        folder: Path,
        shm_bytes: int,
        discovery: HostDiscovery | None = None,
    ) -> None:
        self.options = options
        self.plan = plan
        self.folder = folder
        self.shm_bytes = shm_bytes
        self.bound = dict(plan.bound)  # processors of other hosts are added later
        self.name = f"{LAUNCHER_JOB}{os.getpid()}:{secrets.token_hex(8)}"
        self.secret = auth.new_secret()
        self.streams = _Streams.own()
        self.receiver = Receiver() if options.min_size is not None else None
        self.remotes: list[remote.RemoteHost] = []
        self._discovery = discovery

    def run(self) -> Outcome:
        """Runs the job.

        Raises:
            HostsFailedError: ranks cannot be started on a host; none was started.
            RendezvousError: there is no address for the store.
            OSError: no process or descriptor is available.
        """
        signals = Signals()
        processes.adopt_orphans()
        guard = processes.Guard(self.name)
        try:
            with contextlib.ExitStack() as stack:
                store, path = stack.enter_context(self._store())
                number = self._prepare_remotes(store.address, signals)
                if number is not None:
                    return Outcome(signal=number)
                self._tell_bindings()
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
                ranks = RankStarter(self, supervisor, store.address, path, stack)
                if elastic is not None:
                    elastic.attach(ranks)
                ranks.start_all()
                if elastic is not None:
                    elastic.begin()
                    self._discover(stack)
                outcome = supervisor.run(signals)
                outcome.joined = store.joined
                used = [one.memory_bytes for one in self.remotes]
                outcome.memory_bytes = max([processes.memory_of_children(), *used])
                return outcome
        finally:
            for one in self.remotes:
                one.kill()
            for one in self.remotes:
                one.close("it is no longer needed")
            left = processes.kill_all(self.name, excluded_pids={guard.pid})
            guard.dismiss()
            signals.close()
            if left:
                complain(f"these processes could not be ended: {left}")

    @contextlib.contextmanager
    def _store(self) -> Iterator[tuple[StoreThread, str]]:
        """Runs the job's store; yields it, and the secret's place for this host."""
        host = store_host(self.plan, os.environ)
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
        return ElasticJob(membership, store, self.receiver)

    def _discover(self, stack: contextlib.ExitStack) -> None:
        """Begins to follow the discovery script, until the job ends."""
        if self._discovery is not None and self.receiver is not None:
            stack.callback(self._discovery.close)
            self._discovery.start(self.receiver.discovered)

    # ---- other hosts ----

    def _prepare_remotes(self, address: str, signals: Signals) -> int | None:
        """Connects to all other hosts; returns a signal that came in the meantime."""
        jobs = []
        for index in self.plan.remote:
            jobs.append(self._remote_job(index, address))
            ranks = [place.rank for place in self.plan.on(index)]
            host = self.plan.hosts[index]
            self.remotes.append(
                remote.RemoteHost(host, ranks, ssh_command(self.options))
            )
        if not jobs:
            return None
        if names := missed(os.environ, jobs[0]["environ"]):
            complain(
                "warning: set on this host, but not for the ranks on other hosts: "
                f"{', '.join(names)}; pass them on with -x NAME"
            )
        number = remote.prepare_all(
            self.remotes, jobs, signals, timeout_s=host_timeout_s(self.options)
        )
        failed = [one for one in self.remotes if one.failure]
        if failed and number is None:
            lines = [
                line
                for one in failed
                for line in f"{one.host.name}: {one.failure}".split("\n")
            ]
            raise HostsFailedError(lines, failed[0].failure_code)
        for one in self.remotes:
            for text in one.warnings:
                complain(f"warning: {one.host.name}: {text}")
            self.bound.update(one.bound)
        return number

    def _tell_bindings(self) -> None:
        places = {place.rank: self.plan.hosts[place.host] for place in self.plan.slots}
        asked = dict.fromkeys(places, os.environ.get(binding.THREADS, ""))
        asked |= {rank: one.threads for one in self.remotes for rank in one.bound}
        for text in binding.warnings(self.bound, asked):
            complain(f"warning: {text}")
        if self.options.report_bindings:
            names = {rank: host.name for rank, host in places.items()}
            complain(*binding.lines(self.bound, names))

    def _remote_job(self, index: int, address: str) -> dict[str, Any]:
        """Returns everything that the agent of a host needs to know."""
        environ = crossing(os.environ, dict(self.options.env))
        return {
            "job_tag": f"{self.name}@{index}",
            "cwd": working_directory(),
            "command": self.options.command,
            "environ": {**environ, "TFDIST_JOB_ID": self.name},
            "path": os.environ.get("PATH", ""),
            "store": address,
            "secret": self.secret.hex(),
            "size": self.plan.max_size,
            "slots": self.plan.slots_on(index),
            "shm_bytes": self.shm_bytes,
            "bind_to": self.options.bind_to,
            "signal_grace_s": self.options.signal_grace_s,
            "is_elastic": self.options.min_size is not None,
            "ranks": [
                {
                    "rank": place.rank,
                    "slot": place.rank,
                    "variables": self.variables_of(place),
                    "terminal_columns": self.streams.terminal_columns(
                        self.output_of(place.rank, None)
                    ),
                }
                for place in self.plan.on(index)
            ],
        }

    # ---- ranks ----

    def variables_of(self, place: Place, size: int | None = None) -> dict[str, str]:
        """Returns the variables that tell a rank its place in the job.

        Args:
            place: the place.
            size: number of ranks; default: that of the job at its start.
        """
        size = len(self.plan.places) if size is None else size
        told = mode.variables_of(place, size) if self.options.horovod else {}
        if self.options.min_size is not None:
            told[renewal.MEMBER] = str(place.rank)
            told[renewal.MAX_SIZE] = str(self.plan.max_size)
        return {**place.variables(size), **told}

    def output_of(self, rank: int, log: Any) -> output.RankOutput:
        """Returns the output of a rank, which also goes to the file `log`."""
        size = self.plan.max_size
        return output.RankOutput(rank, size, log, self.options.timestamps)


def _told(store: StoreThread) -> dict[int, dict[str, Any]]:
    """Returns the reports of the ranks, by rank."""
    return {int(told["rank"]): told for told in store.values(PREFIX).values()}
