"""An elastic loop without TensorFlow, whose state shows each step and sample exactly.

    tfdistrun -np 4 --min-np 1 python -m helpers.elastic_client FOLDER STEPS

The loop has STEPS steps, and further ones while the file FOLDER/hold exists. `uses`
counts how often each sample was used, and `order` is a number that depends on the order
of the steps; both are exact, whatever the number of ranks. In FOLDER, each process
writes

* `member-MEMBER`: its current `Report`, for a program that kills it at some instant;
* `generations`: a JSON line for each generation, at the first commit in it;
* `hash-MEMBER`: the hash of its state when it has finished;
* `stacks-MEMBER`: the stacks of all threads, when it gets SIGUSR1;

and the last rank 0 writes `result.npz`.
"""

from __future__ import annotations

import enum
import faulthandler
import functools
import hashlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers.core_client import MAX, MIN, SUM, allreduce, barrier, submit
from helpers.json_lines import lines

from tfdist.core import native, runtime, world
from tfdist.core.generations import Generations, is_loss
from tfdist.core.rendezvous import renewal

SAMPLES, GLOBAL_BATCH, SEED = 20_011, 512, 4
MODULUS = 65521
CUTS = (0, 9_000, 9_001, SAMPLES)  # of the buckets
PROGRAM = "elastic client"
DESCRIPTION = "".join(
    f"uses.{bucket} int64 [{end - begin}]\n"
    for bucket, (begin, end) in enumerate(zip(CUTS, CUTS[1:], strict=False))
)


class Phase(enum.IntEnum):
    """Phase of a process. A process that has no file yet prepares."""

    PREPARES = 0
    REHEARSES = 1  # step 0 alone, as a newcomer
    RUNS = 2
    WAITS = 3  # for its place in the next generation
    CONNECTS = 4
    SHARES = 5
    ENDS = 6


@dataclass(frozen=True)
class Report:
    """State of a process, as it shows it to others; -1: not known yet."""

    phase: int = Phase.PREPARES
    pid: int = -1
    rank: int = -1
    generation: int = -1
    committed: int = -1

    @classmethod
    def read(cls, file: Path) -> Report:
        """Reads the file of a process; a file that is not there yet gives -1s."""
        try:
            return cls(*struct.unpack("5q", file.read_bytes()))
        except (FileNotFoundError, struct.error):
            return cls()


@functools.lru_cache(maxsize=2)
def _permutation(epoch: int) -> np.ndarray:
    return np.random.default_rng([SEED, epoch]).permutation(SAMPLES)


def samples_of(step: int) -> np.ndarray:
    """The samples of a step, which depend only on the step."""
    per_epoch = SAMPLES // GLOBAL_BATCH
    epoch, index = divmod(step, per_epoch)
    return _permutation(epoch)[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]


def expected(steps: int) -> tuple[np.ndarray, int]:
    """Returns `uses` and `order` after so many steps without a failure."""
    uses, order = np.zeros(SAMPLES, np.int64), 0
    for step in range(steps):
        rows = samples_of(step)
        uses[rows] += 1
        order = (order * 31 + int(rows.sum()) + step) % MODULUS
    return uses, order


@dataclass
class State:
    """State of the training.

    Attributes:
        uses: how often each sample was used.
        numbers: `order`, and whether more steps follow in any case.
    """

    uses: np.ndarray
    numbers: np.ndarray

    @classmethod
    def first(cls) -> State:
        """The state before step 0."""
        return cls(np.zeros(SAMPLES, np.int64), np.zeros(2, np.int64))

    def copy(self) -> State:
        """A copy of the arrays."""
        return State(self.uses.copy(), self.numbers.copy())

    def digest(self) -> int:
        """Hash, as a number that an array of int64 can hold."""
        found = hashlib.blake2b(self.uses.tobytes() + self.numbers.tobytes())
        return int.from_bytes(found.digest()[:7], "big")


class Phases(Generations):
    """Generations that report whether the process waits or connects."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def _ask(self, *request: Any) -> renewal.Place:
        self._loop.report(Phase.WAITS)
        place = super()._ask(*request)
        self._loop.report(Phase.CONNECTS)
        return place


class Loop:
    """The loop of one process."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._member = int(os.environ["TFDIST_MEMBER"])
        file = os.open(folder / f"member-{self._member}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, struct.calcsize("5q"))
        self._shown = mmap.mmap(file, struct.calcsize("5q"))
        self.committed = -1
        self.report(Phase.PREPARES)
        self._pause = random.Random(self._member)
        self._state = State.first()
        self._snapshot = self._state.copy()
        self._list_id = ""
        self._last_commit_s: float | None = None
        self._generation = 0  # of the last commit
        self._was_for_join = False
        self._generations = Phases(self)

    def report(self, phase: Phase) -> None:
        """Shows the phase and the number of committed steps."""
        connected = runtime.is_initialized()
        report = Report(
            phase,
            os.getpid(),
            runtime.rank() if connected else -1,
            runtime.generation(),
            self.committed,
        )
        self._shown[:] = struct.pack("5q", *astuple(report))

    def run(self) -> None:
        """Runs the steps that are left, and joins or leaves generations meanwhile."""
        world.start()
        self._register()
        if not self._generations.is_newcomer:
            self.committed = 0
        self._generations.begin()
        while True:
            while self._goes_on():
                self._run_step()
            try:
                barrier("end of the elastic loop")
            except native.CoreError as error:
                if not is_loss(error):
                    raise
                self._enter_next()
                continue
            break
        self._generations.end()
        self.report(Phase.ENDS)

    def write_result(self) -> None:
        """Writes the final state."""
        digest = str(self._state.digest())
        (self._folder / f"hash-{self._member}").write_text(digest)
        if runtime.rank() == 0:
            np.savez(
                self._folder / "result.npz",
                uses=self._state.uses,
                order=self._state.numbers[0],
                steps=self.committed,
            )

    # ---- steps ----

    def _goes_on(self) -> bool:
        return self.committed < self._steps or bool(self._state.numbers[1])

    def _run_step(self) -> None:
        rehearses = self._generations.is_newcomer
        self.report(Phase.REHEARSES if rehearses else Phase.RUNS)
        step = max(self.committed, 0)
        self._apply(step)
        time.sleep(self._pause.uniform(0.001, 0.003))
        if not self._generations.is_step_valid():
            self._enter_next()
            return
        self._snapshot = self._state.copy()
        self._commit(step + 1)
        self._generations.end_for_change()
        if self._generations.has_ended():
            self._enter_next()

    def _apply(self, step: int) -> None:
        all_rows = samples_of(step)
        rows = np.array_split(all_rows, runtime.size())[runtime.rank()]
        counts = np.bincount(rows, minlength=SAMPLES)
        count = len(CUTS) - 1
        pending = [
            submit(
                [counts[CUTS[bucket] : CUTS[bucket + 1]]],
                name=f"uses {bucket}",
                group=self._list_id,
                bucket=bucket,
                bucket_count=count,
            )
            for bucket in reversed(range(count))
        ]
        for bucket, one in zip(reversed(range(count)), pending, strict=True):
            self._state.uses[CUTS[bucket] : CUTS[bucket + 1]] += one.wait()[0]
        own = np.array([rows.sum(), (self._folder / "hold").exists()], np.int64)
        total, holds = allreduce(own, name="order")
        order = (int(self._state.numbers[0]) * 31 + int(total) + step) % MODULUS
        self._state.numbers[:] = order, holds

    def _commit(self, committed: int) -> None:
        if committed != self.committed + 1:
            raise AssertionError(f"step {committed} after step {self.committed}")
        self.committed = committed
        now_s = time.monotonic()
        if runtime.generation() != self._generation:
            self._write_generation(now_s)
        self._last_commit_s = now_s
        self.report(Phase.RUNS)

    def _write_generation(self, now_s: float) -> None:
        """Writes a line about the generation whose first step is committed."""
        generation, stall_s, why = runtime.generation(), None, "start"
        if self._last_commit_s is not None:
            stall_s = round(now_s - self._last_commit_s, 4)
            # A generation between the two was lost while it connected.
            was_next = generation == self._generation + 1
            why = "join" if self._was_for_join and was_next else "loss"
        line = {
            **{"member": self._member, "pid": os.getpid(), "generation": generation},
            **{"rank": runtime.rank(), "size": runtime.size()},
            **{"committed": self.committed, "stall_s": stall_s, "why": why},
        }
        file = os.open(
            self._folder / "generations", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )
        os.write(file, (json.dumps(line) + "\n").encode())
        os.close(file)
        self._generation = generation

    # ---- generations ----

    def _enter_next(self) -> None:
        failure = native.failure()
        self._was_for_join = (
            failure is not None and "number of ranks" in failure.message
        )
        self._state = self._snapshot.copy()
        self._generations.enter_next(self.committed, PROGRAM, self._share)

    def _share(self) -> None:
        """Gives all ranks the state of the first rank that has committed most steps."""
        self.report(Phase.SHARES)
        own = np.zeros(runtime.size(), np.int64)
        own[runtime.rank()] = self.committed
        committed = allreduce(own, name="committed", op=SUM)
        root, latest = int(np.argmax(committed)), int(committed.max())
        self._register()
        state = self._snapshot.copy()
        if int(committed.min()) < latest:
            arrays = [state.uses, state.numbers]
            sent = submit(arrays, name="state", kind=native.BROADCAST, root=root)
            state = State(*sent.wait())
        digest = np.array([state.digest()], np.int64)
        smallest, largest = (
            int(allreduce(digest, name=f"digest {op}", op=op)[0]) for op in (MIN, MAX)
        )
        if smallest != largest:
            raise AssertionError(f"the states of step {latest} differ")
        self._snapshot, self._state = state.copy(), state
        self.committed = latest
        self.report(Phase.RUNS)

    def _register(self) -> None:
        count = len(CUTS) - 1
        self._list_id, _ = native.register_gradient_list(
            f"{DESCRIPTION}op=sum\n", [True] * count
        )


def main(folder: Path, steps: int) -> None:
    """Runs one process of the job."""
    stacks = open(folder / f"stacks-{os.environ['TFDIST_MEMBER']}", "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    loop = Loop(folder, steps)
    loop.run()
    loop.write_result()
    world.shutdown()


def generations_of(folder: Path) -> list[Mapping[str, Any]]:
    """Returns the lines of FOLDER/generations."""
    return lines(folder / "generations")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
