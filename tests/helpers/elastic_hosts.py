"""An elastic loop on several hosts, which a test attacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from helpers import elastic_client
from helpers.hosts import Hosts
from helpers.json_lines import lines
from helpers.launcher import Run, finish, start, until


@dataclass
class Job:
    """A job of `helpers.elastic_client`, which runs until `finish`.

    Attributes:
        folder: of the clients.
        process: tfdistrun.
    """

    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls, folder: Path, hosts: Hosts, counts: tuple[int, ...], *options: str
    ) -> Job:
        """Starts a job on hosts with the given numbers of slots."""
        return cls.start_with(folder, hosts, *options, *hosts.slots(*counts))

    @classmethod
    def start_with(cls, folder: Path, hosts: Hosts, *options: str) -> Job:
        """Starts a job whose options say on which hosts it runs."""
        (folder / "hold").touch()
        words = [*options, *hosts.ssh]
        program = [sys.executable, "-m", "helpers.elastic_client", str(folder), "1"]
        environ = {"TFDIST_ADDRESS": hosts.address}
        return cls(folder, start(folder, *words, *program, **environ))

    def rows(self) -> list[dict[str, Any]]:
        """The generations, as their members wrote them down."""
        return lines(self.folder / "generations")

    def wait_for(self, size: int, generation: int = 1, limit_s: float = 40.0) -> None:
        """Waits until so many ranks take a step in this generation, or a later one."""

        def is_there() -> bool:
            latest = self.rows()[-1:]
            return any(
                row["size"] == size and row["generation"] >= generation
                for row in latest
            )

        until(is_there, limit_s)

    def report(self, member: int) -> elastic_client.Report:
        """The current report of a process."""
        return elastic_client.Report.read(self.folder / f"member-{member}")

    def kill(self, member: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process."""
        os.kill(self.report(member).pid, number)

    def finish(self) -> Run:
        """Lets the loop end; checks that each sample was used as often as it should."""
        (self.folder / "hold").unlink()
        done = finish(self.process, 30.0)
        assert done.code == 0, done.stdout + done.stderr
        result = np.load(self.folder / "result.npz")
        uses, order = elastic_client.expected(int(result["steps"]))
        assert np.array_equal(result["uses"], uses) and result["order"] == order
        hashes = {file.read_text() for file in self.folder.glob("hash-*")}
        assert len(hashes) == 1
        return done


def agent_of(job: Job, member: int) -> psutil.Process:
    """The agent of a process's host."""
    agent = psutil.Process(job.report(member).pid).parent()
    assert agent is not None
    return agent
