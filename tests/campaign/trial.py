"""Forks the ranks of a job, sends signals to them, and reads how each one ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from campaign import rank as rank_program

READY_TIMEOUT_S = 60.0


@dataclass
class Child:
    """A forked rank and what it has said."""

    rank: int
    pid: int
    pipe: int
    said: list[dict[str, Any]] = field(default_factory=list)
    buffer: bytes = b""
    closed: bool = False

    def fileno(self) -> int:
        """For select."""
        return self.pipe

    def word(self, word: str) -> dict[str, Any] | None:
        """The line with this word, None when it has not come."""
        return next((line for line in self.said if line["say"] == word), None)

    def read(self) -> None:
        """Takes what has come."""
        chunk = os.read(self.pipe, 65536)
        if not chunk:
            self.closed = True
        self.buffer += chunk
        *lines, self.buffer = self.buffer.split(b"\n")
        self.said.extend(json.loads(line) for line in lines)


class Job:
    """The ranks of one trial; a context manager that kills them at its end."""

    def __init__(
        self,
        size: int,
        seed: int,
        environ: Mapping[str, str],
        *,
        steps: int = 10**9,
        enter: Callable[[int], None] | None = None,
        placement: Callable[[int], Mapping[str, str]] | None = None,
        program: Callable[[int, int, int], None] = rank_program.main,
    ) -> None:
        job = uuid.uuid4().hex
        self.children: list[Child] = []
        for rank in range(size):
            own = {
                "TFDIST_RANK": str(rank),
                "TFDIST_SIZE": str(size),
                "TFDIST_LOCAL_RANK": str(rank),
                "TFDIST_LOCAL_SIZE": str(size),
                "TFDIST_JOB_ID": job,
                "TFDIST_LOG_LEVEL": "silent",
                **environ,
                **(placement(rank) if placement else {}),
            }
            self.children.append(
                _fork(rank, seed * 64 + rank, steps, own, enter, program)
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *unused: object) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            os.close(child.pipe)

    def wait(self, word: str, ranks: Iterable[int], timeout_s: float) -> list[int]:
        """Waits until all `ranks` sent `word` or ended; returns those without `word`.

        A rank that said "bug" raises AssertionError.
        """
        deadline = time.monotonic() + timeout_s
        wanted = {rank: self.children[rank] for rank in ranks}
        while True:
            for child in self.children:
                if bug := child.word("bug"):
                    raise AssertionError(f"rank {child.rank}: {bug['message']}")
            open_ = [c for c in wanted.values() if not c.word(word) and not c.closed]
            left_s = deadline - time.monotonic()
            if not open_ or left_s <= 0:
                return [r for r, child in wanted.items() if not child.word(word)]
            readable, _, _ = select.select(open_, [], [], left_s)
            for child in readable:
                child.read()

    def ready(self) -> None:
        """Waits until all ranks train."""
        everyone = range(len(self.children))
        late = self.wait("ready", everyone, READY_TIMEOUT_S)
        if late:
            said = {rank: self.children[rank].said for rank in late}
            raise AssertionError(f"ranks {late} did not get ready: {said}")

    def kill(self, rank: int, number: int) -> float:
        """Sends a signal; returns the moment just before."""
        now_s = time.monotonic()
        os.kill(self.children[rank].pid, number)
        return now_s


def _fork(
    rank: int,
    seed: int,
    steps: int,
    environ: Mapping[str, str],
    enter: Callable[[int], None] | None,
    program: Callable[[int, int, int], None],
) -> Child:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(writing)
        return Child(rank, pid, reading)
    code = 1
    try:
        os.close(reading)
        os.environ.update(environ)
        if enter is not None:
            enter(rank)
        program(writing, seed, steps)
        code = 0
    finally:
        os._exit(code)
