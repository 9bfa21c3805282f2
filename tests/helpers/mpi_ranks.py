"""The workers of `helpers.ranks`, started by mpirun, for tests with TFDIST_ENGINE=mpi.

`TEST_MPIRUN` is the command up to the number of ranks. All workers are ranks of
one MPI_COMM_WORLD; the world of a test is the first of them. All its data go through
MPI, since there is no shared memory (TFDIST_TRANSPORT=tcp).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from helpers import wire
from helpers.mpi import AS_ROOT
from helpers.ranks import (
    START_TIMEOUT_S,
    TESTS,
    Pool,
    RankError,
    Worker,
    clean_environment,
)

MPIRUN = "TEST_MPIRUN"
_FEWEST = 4


class MpiWorker(Worker):
    """A process that mpirun has started; it has connected to `channel`."""

    def __init__(self, channel: socket.socket, pid: int, log: Path) -> None:
        self.channel, self.log, self.ready = channel, log, False
        self._process = psutil.Process(pid)

    @property
    def alive(self) -> bool:
        running = self._process.is_running()
        return running and self._process.status() != psutil.STATUS_ZOMBIE

    def stacks(self) -> None:
        if self.alive:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        self.channel.close()

    def exit_code(self) -> int | None:
        return self._process.wait(timeout=10)


class MpiPool(Pool):
    """Workers of one mpirun; if one ends, all are started again."""

    _settings: Mapping[str, str] = {"TFDIST_TRANSPORT": "tcp"}
    _mpirun: subprocess.Popen[bytes] | None = None

    def _kill_all(self) -> None:
        super()._kill_all()
        if self._mpirun is not None:
            self._mpirun.terminate()
            self._mpirun.wait(timeout=30)
            self._mpirun = None

    def _accept(
        self, listener: socket.socket, mpirun: subprocess.Popen[bytes]
    ) -> socket.socket:
        deadline = time.monotonic() + START_TIMEOUT_S
        while mpirun.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
        raise RankError(f"mpirun has started no workers; its code: {mpirun.poll()}")

    def _start(self, size: int) -> None:
        known = [self._workers.get(rank) for rank in range(size)]
        if all(worker is not None and worker.alive for worker in known):
            return
        self._kill_all()
        folder = Path(self._folder.name)
        count = max(size, _FEWEST)
        path = folder / f"channels-{time.monotonic_ns()}"
        kept = {n: v for n, v in os.environ.items() if n.startswith("TFDIST_MPI")}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(count)
            listener.settimeout(1.0)
            words = [*os.environ[MPIRUN].split(), str(count), sys.executable]
            self._mpirun = subprocess.Popen(
                [*words, "-m", "helpers.rank_worker", str(path), self._imports],
                cwd=TESTS,
                env={**clean_environment(), **AS_ROOT, **kept, **self._environ},
                stdin=subprocess.DEVNULL,
            )
            for _ in range(count):
                channel = self._accept(listener, self._mpirun)
                hello = wire.receive(channel)
                log = Path(f"{path}.{hello['pid']}.log")
                worker = MpiWorker(channel, hello["pid"], log)
                self._workers[hello["rank"]] = worker
        super()._start(count)  # so that no late word of a start is taken for a result
