"""Starts the processes of a job: its ranks, and the newcomers of an elastic job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.core.rendezvous import renewal
from tfdist.launch import output, processes
from tfdist.launch.hosts import Place, Slot

if TYPE_CHECKING:
    from tfdist.launch.host_pool import HostPool
    from tfdist.launch.job import Job
    from tfdist.launch.remote import RemoteHost
    from tfdist.launch.supervisor import Supervisor


class RankStarter:
    """Starts the ranks of a job, and the newcomers of an elastic job.

    Implements the protocol `Processes` for an `ElasticJob`.

    Args:
        job: the job.
        pool: the hosts of the job.
        supervisor: watches the ranks.
        address: address of the store.
        secret_path: path of the file with the job's secret.
        stack: context that closes the log files when it exits.
    """

    def __init__(
        self,
        job: Job,
        pool: HostPool,
        supervisor: Supervisor,
        address: str,
        secret_path: str,
        stack: contextlib.ExitStack,
    ) -> None:
        self._job = job
        self._pool = pool
        self._supervisor = supervisor
        self._stack = stack
        self._common = {
            "TFDIST_RENDEZVOUS": address,
            "TFDIST_SECRET_FILE": secret_path,
            "TFDIST_JOB_ID": job.name,
            processes.JOB_TAG_VARIABLE: job.name,
        }

    def start_all(self) -> None:
        """Starts the ranks of this host; lets the agents start those of other hosts."""
        job = self._job
        outputs = {
            place.rank: job.output_of(place.rank, self._log(f"rank-{place.rank}.log"))
            for place in job.plan.places
        }
        for rank in outputs:
            self._pool.slots.take(rank, running=range(rank))
        for one in self._pool.agents.values():
            for rank in one.ranks:
                own = outputs[rank]
                self._supervisor.add_remote_rank(one, own, *job.streams.mergers(own))
            self._supervisor.add_remote(one)
            one.go()
        for place in job.plan.local:
            slot = Slot(place.host, place.local_rank)
            self._start(outputs[place.rank], job.variables_of(place), slot)

    def _log(self, name: str) -> Any:
        return self._stack.enter_context(self._open_log(name))

    def _open_log(self, name: str) -> Any:
        return open(self._job.folder / name, "ab", buffering=0)

    def _start(
        self,
        own: output.RankOutput,
        variables: Mapping[str, str],
        slot: Slot,
        member: int | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """Starts a process on this host, on the CPUs of `slot`."""
        job = self._job
        environ = {
            # With buffering, the last lines of a killed rank would be lost.
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            **self._common,
            **variables,
        }
        binds = job.options.bind_to != "none"
        self._supervisor.start(
            own,
            *job.streams.mergers(own),
            member=member,
            command=job.options.command,
            environ=environ,
            terminal_columns=job.streams.terminal_columns(own),
            processors=self._pool.processors(slot) if binds else None,
            is_elastic=job.options.min_size is not None,
            in_background=in_background,
        )

    # ---- of an elastic job ----

    def start(self, member: int, name: str, *, in_background: bool) -> bool:
        """Starts a newcomer; returns False if that failed.

        Args:
            member: number of the newcomer.
            name: name that is shown in front of the newcomer's output until it joins.
            in_background: whether the newcomer gets a smaller share of the CPUs until
                `prioritize` is called.
        """
        slots = self._pool.slots
        slot = slots.take(member, self._supervisor.running)
        if slot is None:
            self._job.complain(f"{name} cannot be started: no host is left")
            return False
        # Before a newcomer has joined, its program must not run as rank 0, which writes
        # files. `local_rank` is the newcomer's slot (that of the lost rank, or a free
        # slot), since the program may choose its device by it.
        plan = self._job.plan
        rank = min(slots.position(slot), plan.max_size - 1)
        size = max(len(plan.places), rank + 1, slot.index + 1, 2)
        rank = rank or size - 1
        shown = Place(
            rank=rank,
            host=slot.host,
            local_rank=slot.index,
            local_size=size,
            cross_rank=0,
            cross_size=1,
        )
        variables = self._job.variables_of(shown, size)
        variables[renewal.MEMBER] = str(member)
        try:
            log = self._open_log(f"{name.replace(' ', '-')}.log")
            own = self._job.output_of(rank, log, size)
            own.name = name
            if self._pool.hosts[slot.host].is_local:
                self._start(own, variables, slot, member, in_background=in_background)
            else:
                remote = self._pool.agents[slot.host]
                self._start_remote(
                    remote, own, variables, slot, member, in_background=in_background
                )
        except OSError as error:
            self._job.complain(f"{name} cannot be started: {error}")
            return False
        return True

    def _start_remote(
        self,
        remote: RemoteHost,
        own: output.RankOutput,
        variables: Mapping[str, str],
        slot: Slot,
        member: int,
        *,
        in_background: bool,
    ) -> None:
        """Lets the agent of a host start a process on the CPUs of `slot`."""
        streams = self._job.streams
        self._supervisor.add_remote_rank(
            remote, own, *streams.mergers(own), member=member
        )
        columns = streams.terminal_columns(own)
        remote.start(
            member,
            variables=variables,
            slot=slot.index,
            terminal_columns=columns,
            in_background=in_background,
        )

    def prioritize(self, member: int) -> None:
        """Gives a newcomer the same share of the CPUs as the ranks."""
        self._supervisor.prioritize(member)

    def stopped(self) -> frozenset[int]:
        """Returns the members that are stopped (SIGSTOP)."""
        return self._supervisor.stopped()

    def kill(self, member: int) -> None:
        """Kills a member's process, if it is still running."""
        self._supervisor.kill(member)

    def formed(self, ranks: Mapping[int, int]) -> None:
        """Gives the members of a new generation their ranks."""
        self._supervisor.formed(ranks)

    def end_job(self) -> None:
        """Terminates all ranks after --grace-s seconds."""
        self._supervisor.end_job()
