"""A job of core clients whose TCP links go through a relay (`helpers.relay`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from helpers.launcher import clean_environment
from helpers.relay import Fault, Relay, RelayedStore

from tfdist.core.rendezvous import auth
from tfdist.core.rendezvous.environment import LAUNCHER_JOB
from tfdist.core.rendezvous.secret import keep_in_memory

_PROGRAM = (
    "import os, sys\n"
    "from campaign import rank\n"
    "said = os.dup(1); os.dup2(2, 1)\n"
    "rank.main(said, int(sys.argv[1]), int(sys.argv[2]))\n"
)


@dataclass
class Told:
    """What one rank has said so far, by word; filled by a thread."""

    process: subprocess.Popen[str]
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            with self.changed:
                self.said[message["say"]] = message
                self.changed.notify_all()
        with self.changed:
            self.said.setdefault("gone", {})
            self.changed.notify_all()


class RelayedJob:
    """A context manager: starts the ranks, ends what is left of them.

    Args:
        size: number of ranks.
        relay: between them.
        steps: after which they end; the default is never.
        environ: for all ranks.
    """

    def __init__(
        self, size: int, relay: Relay, *, steps: int = 10**9, **environ: str
    ) -> None:
        secret = auth.new_secret()
        self.relay = relay
        self._secret_fd, path = keep_in_memory(secret)
        job = LAUNCHER_JOB + uuid.uuid4().hex  # as of tfdistrun: not rank 0's store
        self._store = RelayedStore(secret, relay, job=job)
        self._store.start()
        self.ranks: list[Told] = []
        for rank in range(size):
            place = {
                "TFDIST_RANK": str(rank),
                "TFDIST_SIZE": str(size),
                "TFDIST_JOB_ID": job,
                "TFDIST_RENDEZVOUS": self._store.address,
                "TFDIST_SECRET_FILE": path,
                "TFDIST_TRANSPORT": "tcp",
                "TFDIST_LOG_LEVEL": "silent",
            }
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(rank), str(steps)],
                env=clean_environment(**place, **environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
            )
            told = Told(process)
            threading.Thread(target=told.listen, daemon=True).start()
            self.ranks.append(told)

    def __enter__(self) -> RelayedJob:
        return self

    def __exit__(self, *unused: object) -> None:
        for told in self.ranks:
            told.process.kill()
            told.process.wait(10)
        self.relay.close()
        self._store.close()
        with contextlib.suppress(OSError):
            os.close(self._secret_fd)

    def wait(
        self, word: str, ranks: Iterable[int], timeout_s: float
    ) -> dict[int, dict[str, Any]]:
        """What each of `ranks` says with this word.

        Raises:
            AssertionError: one does not in time, or found a bug (a wrong sum).
        """
        deadline = time.monotonic() + timeout_s
        found = {}
        for rank in ranks:
            told = self.ranks[rank]
            with told.changed:
                while not told.said.keys() & {word, "bug", "gone"}:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or not told.changed.wait(left_s):
                        raise AssertionError(
                            f"rank {rank} did not say {word!r} within {timeout_s} s; "
                            f"it has said {sorted(told.said)}"
                        )
                if "bug" in told.said:
                    raise AssertionError(f"rank {rank}: {told.said['bug']['message']}")
                assert word in told.said, f"rank {rank} ended: {told.said}"
                found[rank] = told.said[word]
        return found

    def ready(self) -> None:
        """Waits until all ranks train."""
        self.wait("ready", range(len(self.ranks)), 60.0)

    def ends(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """How every rank ended."""
        return self.wait("end", range(len(self.ranks)), timeout_s)


def set_faults(relay: Relay, one: int, other: int, **changes: Any) -> None:
    """Changes the faults of both directions between two ranks."""
    for way in relay.between(one, other):
        for name, value in changes.items():
            setattr(way.fault, name, value)


__all__ = ["Fault", "Relay", "RelayedJob", "set_faults"]
