"""Runs functions of test files on several ranks, in processes that live on.

Importing TensorFlow takes seconds of CPU, so worker processes are started once and
used by all tests. Each call makes a world of its own, through the real environment
contract (TFDIST_RANK, TFDIST_SIZE, TFDIST_JOB_ID):

    def double(start):                     # a function of the test file
        return tfdist.allreduce(start + tfdist.rank(), op=SUM).numpy()

    def test_double():
        assert run_ranks(double, 2, 5) == [11, 11]

Arguments and results are numbers, strings, bytes, None, NumPy arrays, and lists and
dicts of them.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers import wire
from helpers.deadline import PATIENCE

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
START_TIMEOUT_S = 120.0
CLEAR_TIMEOUT_S = 5.0
DUMP_S = 1.0
LOG_TAIL_BYTES = 6000
_WORKER = [sys.executable, "-m", "helpers.rank_worker"]


class RankError(AssertionError):
    """A rank's function raised; the message has the traceback of the first rank."""


class RanksHungError(AssertionError):
    """Ranks did not end in time; the message has the stacks of all their threads."""


class Worker:
    """One process that waits for work, with its imports done."""

    def __init__(
        self, index: int, folder: Path, environ: Mapping[str, str], imports: str
    ) -> None:
        self.log = folder / f"worker{index}-{time.monotonic_ns()}.log"
        self.ready = False
        own, other = socket.socketpair()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*_WORKER, str(other.fileno()), imports],
                cwd=TESTS,
                env={**clean_environment(), **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[other.fileno()],
            )
        other.close()
        self.channel = own

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stacks(self) -> None:
        """Asks for the stacks of all threads, into the log."""
        if self.alive:
            self.process.send_signal(signal.SIGUSR1)

    def exit_code(self) -> int | None:
        """Negative for a signal; waits for the end of the process."""
        return self.process.wait(timeout=10)

    def kill(self) -> None:
        self.channel.close()
        if self.alive:
            self.process.kill()
        self.process.wait(timeout=10)

    def tail(self, start: int = 0) -> str:
        """The end of what the process printed since position `start` of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
        return ""


class Pool:
    """Workers by index; worker i is rank i of every call.

    Args:
        environ: variables that TensorFlow reads when it starts, for example
            TF_NUM_INTEROP_THREADS.
        imports: "tensorflow", or "core": what does not use it starts in no time.
    """

    _settings: Mapping[str, str] = {}  # TFDIST_* variables of all calls

    def __init__(
        self, environ: Mapping[str, str] | None = None, imports: str = "tensorflow"
    ) -> None:
        self._environ = dict(environ or {})
        self._imports = imports
        self._workers: dict[int, Worker] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist-ranks-")
        self._calls = 0
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        init: bool = True,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Runs `function(*args)` on `size` ranks and returns what each returned.

        Args:
            function: module-level function of a test file.
            size: number of ranks.
            *args: the same for every rank.
            timeout_s: seconds for the whole call on an idle machine; ranks that take
                `PATIENCE` times as long are killed.
            env: TFDIST_* variables for this call.
            init: whether the worker calls `tfdist.init()` before and
                `tfdist.shutdown()` after the function.
            may_die: ranks whose process may end; their result is then the exit code,
                negative for a signal.

        Raises:
            RankError: a function raised, or a process died.
            RanksHungError: not all ranks ended in time.
        """
        self._start(size)
        self._clear(size)
        self._calls += 1
        limit_s = PATIENCE * timeout_s
        deadline = time.monotonic() + limit_s
        job = f"tests {os.getpid()} {id(self)} {self._calls}"
        marks = {rank: self._workers[rank].log.stat().st_size for rank in range(size)}
        for rank in range(size):
            request = {
                "file": inspect.unwrap(function).__code__.co_filename,
                "name": function.__qualname__,
                "args": list(args),
                "init": init,
                "generation": self._calls,
                "environ": {
                    **self._settings,
                    **(env or {}),
                    "TFDIST_RANK": str(rank),
                    "TFDIST_SIZE": str(size),
                    "TFDIST_JOB_ID": job,
                },
            }
            wire.send(self._workers[rank].channel, request)
        try:
            answers = self._collect(range(size), deadline, marks, limit_s)
        except BaseException:  # the test's own deadline, Ctrl-C: no answer is awaited
            self._kill_all()
            raise
        return self._results(answers, may_die, marks)

    def close(self) -> None:
        """Ends all workers."""
        self._kill_all()
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist-ranks-")

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()

    def _start(self, size: int) -> None:
        for rank in range(size):
            worker = self._workers.get(rank)
            if worker is None or not worker.alive:
                if worker is not None:
                    worker.kill()
                folder = Path(self._folder.name)
                self._workers[rank] = Worker(rank, folder, self._environ, self._imports)
        waiting = [r for r in range(size) if not self._workers[r].ready]
        deadline = time.monotonic() + START_TIMEOUT_S
        answers = self._collect(waiting, deadline, {}, START_TIMEOUT_S)
        for rank, answer in answers.items():
            if "ready" not in answer:
                raise RankError(
                    f"worker {rank} did not start:\n{self._workers[rank].tail()}"
                )
            self._workers[rank].ready = True

    def _clear(self, size: int) -> None:
        """Before the ranks' time runs: none keeps the others waiting for it.

        One that takes long (see `rank_worker`) is replaced, which takes less.
        """
        for rank in range(size):
            wire.send(self._workers[rank].channel, {"clear": True})
        deadline = time.monotonic() + CLEAR_TIMEOUT_S
        try:
            for rank in range(size):
                last = max(deadline, time.monotonic() + 0.1)
                try:
                    self._collect([rank], last, {}, CLEAR_TIMEOUT_S)
                except RanksHungError:
                    self._workers[rank].kill()
        except BaseException:
            self._kill_all()
            raise
        self._start(size)

    def _collect(
        self,
        ranks: Sequence[int] | range,
        deadline: float,
        marks: Mapping[int, int],
        timeout_s: float,
    ) -> dict[int, dict[str, Any]]:
        """One message of each rank; {"died": exit code} for one that ended."""
        answers: dict[int, dict[str, Any]] = {}
        waiting = {self._workers[rank].channel: rank for rank in ranks}
        while waiting:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._hung(sorted(waiting.values()), answers, marks, timeout_s)
            readable, _, _ = select.select(list(waiting), [], [], left_s)
            for channel in readable:
                rank = waiting.pop(channel)
                try:
                    answers[rank] = wire.receive(channel)
                except (EOFError, ConnectionError):
                    answers[rank] = {"died": self._workers[rank].exit_code()}
        return answers

    def _hung(
        self,
        ranks: list[int],
        answers: Mapping[int, dict[str, Any]],
        marks: Mapping[int, int],
        timeout_s: float,
    ) -> RanksHungError:
        for rank in ranks:
            self._workers[rank].stacks()
        time.sleep(DUMP_S)
        tails = [
            f"---- rank {rank}:\n{self._workers[rank].tail(marks.get(rank, 0))}"
            for rank in ranks
        ]
        for rank, answer in answers.items():
            how = str(answer.get("failed") or answer).strip().splitlines()[-1]
            tails.append(f"---- rank {rank} had ended: {how[:1000]}")
        return RanksHungError(
            f"ranks {ranks} did not end within {timeout_s:g} s:\n" + "\n".join(tails)
        )

    def _results(
        self,
        answers: Mapping[int, dict[str, Any]],
        may_die: Collection[int],
        marks: Mapping[int, int],
    ) -> list[Any]:
        failed = []
        for rank, answer in answers.items():
            if "failed" in answer:
                failed.append((answer["time"], rank, answer["failed"]))
            elif "died" in answer and rank not in may_die:
                tail = self._workers[rank].tail(marks.get(rank, 0))
                failed.append((0.0, rank, f"exit code {answer['died']}\n{tail}"))
        if failed:
            failed.sort()
            others = "".join(
                f"\nrank {rank} then: {text.strip().splitlines()[-1]}"
                for _, rank, text in failed[1:]
            )
            _, rank, text = failed[0]
            raise RankError(f"rank {rank} failed first:\n{text}{others}")
        return [
            answers[rank]["died"]
            if "died" in answers[rank]
            else answers[rank]["result"]
            for rank in sorted(answers)
        ]


def clean_environment() -> dict[str, str]:
    """This environment without what a launcher or a test has set."""
    prefixes = ("TFDIST_", "_TFDIST_", "OMPI_", "PMI", "PALS_", "SLURM_", "MPI_")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        # The whole suite may be run with another engine (docs/horovod-engine.md).
        if name == "TFDIST_ENGINE"
        or (not name.startswith(prefixes) and name not in names)
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


# Threads are part of the configuration: the same on every machine that tests.
def _common_pool() -> Pool:
    threads = {"TF_NUM_INTEROP_THREADS": "2"}
    if os.environ.get("TFDIST_ENGINE") != "mpi":
        return Pool(threads)
    from helpers.mpi_ranks import MpiPool  # which builds on this module

    return MpiPool(threads)


_pool = _common_pool()
run_ranks = _pool.run


def close_pool() -> None:
    """Ends the common workers; the next call starts new ones."""
    _pool.close()
