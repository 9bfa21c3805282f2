"""Kills processes of elastic jobs at random instants, and looks at what the jobs do.

    python tests/campaign/elastic.py                # what today's code has no record of
    python tests/campaign/elastic.py --trials 4     # fewer
    python tests/campaign/elastic.py --table        # the table of the record

A trial is one job of four ranks that may go on with one (`helpers.elastic_client`), of
which processes are killed, in whatever phase they are, or stopped; never the last one
that has the state. It is right when tfdistrun ends with 0, all processes that ended
have the state of a run without a failure, tfdistrun has killed no process that could
have gone on, and nothing is left. A later run continues the record, elastic.json. Exit
status 0: all are right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import numpy as np  # noqa: E402
from campaign.run import percentile  # noqa: E402
from helpers.elastic_client import (  # noqa: E402
    Phase,
    Report,
    expected,
    generations_of,
)
from helpers.launcher import TFDISTRUN, clean_environment, marked, until  # noqa: E402
from helpers.record import Record  # noqa: E402

RECORD = HERE / "elastic.json"
CODE = (
    "tfdist/core", "tfdist/launch", "tfdist_ops", "tests/campaign/elastic.py",
    "tests/helpers/elastic_client.py", "tests/helpers/core_client.py",
)  # fmt: skip
TRIALS, KILLS, SIZE = 40, 25, 4
STEPS = 50  # and further ones while processes are killed
START_S, CHOICE_S, END_S = 60.0, 30.0, 30.0
UNREADY_KILLS = 2  # replacements in a row; after three, tfdistrun starts no more
NOTICE_S = 0.5  # in which tfdistrun has surely noticed the end of a process
STEPLESS_KILLS = 3  # without a new step; after four, tfdistrun may end the job
RARE_PHASES = (
    "newcomer rehearses", "newcomer waits", "newcomer connects", "newcomer shares",
    "rank waits", "rank connects", "rank shares",
)  # fmt: skip
HOLDERS = (Phase.RUNS, Phase.WAITS, Phase.CONNECTS, Phase.SHARES)
_MEMBER = re.compile(rb"(?:^|\0)TFDIST_MEMBER=(\d+)\0")


class HangError(AssertionError):
    """A job did not go on."""


@dataclass
class Member:
    """A living process of a job, and what it shows of itself."""

    number: int
    pid: int
    report: Report

    @property
    def has_state(self) -> bool:
        """Whether it has received the state of the training."""
        return self.report.committed >= 0 and self.report.phase in HOLDERS

    @property
    def is_newcomer(self) -> bool:
        """Whether it has not received the state yet."""
        return self.report.committed < 0

    @property
    def is_ready(self) -> bool:
        """Whether tfdistrun has surely received the first request of a newcomer."""
        return self.report.phase > Phase.WAITS or not self.is_newcomer

    @property
    def phase(self) -> str:
        """Name of its phase, for the table."""
        kind = "newcomer" if self.is_newcomer else "rank"
        return f"{kind} {Phase(self.report.phase).name.lower()}"


@dataclass
class Job:
    """A job under attack.

    Attributes:
        draw: source of all decisions.
        folder: folder of the clients.
        kills: phase, signal and seconds since the start of each kill.
    """

    draw: random.Random
    folder: Path
    marker: str
    process: subprocess.Popen[bytes]
    kills: list[dict[str, Any]] = field(default_factory=list)
    _victims: set[int] = field(default_factory=set)  # process ids, all that ever were
    _gone: set[int] = field(default_factory=set)  # process ids that do not count
    _continue_at_s: dict[int, float] = field(default_factory=dict)  # stopped ones
    _continued: dict[int, Member] = field(default_factory=dict)  # state when stopped
    _rare_phase: str = ""  # of the next process to kill, if there is one in it
    _unready_kills: int = 0
    _unready_at_s: dict[int, float] = field(default_factory=dict)  # by number
    _unready_kill_s: float = 0.0
    _stepless_kills: int = 0
    _step_at_kill: int = -1
    _begin_s: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, folder: Path, draw: random.Random) -> Job:
        """Starts a job of SIZE ranks."""
        (folder / "hold").touch()
        marker = f"mark-{uuid.uuid4().hex}"
        client = [sys.executable, "-m", "helpers.elastic_client"]
        options = ["-np", str(SIZE), "--min-np", "1", "--max-restarts", "1000"]
        process = subprocess.Popen(
            [*TFDISTRUN, *options, *client, str(folder), str(STEPS)],
            env=clean_environment(
                MARKER=marker, PYTHONFAULTHANDLER="1", TFDIST_PEER_TIMEOUT_S="1"
            ),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=(folder / "stdout").open("wb"),
            stderr=(folder / "stderr").open("wb"),
            # In the session of this busy process, tfdistrun would often have to wait.
            start_new_session=True,
        )
        return cls(draw, folder, marker, process)

    # ---- what is there ----

    def members(self) -> list[Member]:
        """The processes that live, and have not been killed or stopped."""
        found = []
        for pid in _children(self.process.pid):
            if pid in self._gone:
                continue
            with contextlib.suppress(OSError):
                match = _MEMBER.search(Path(f"/proc/{pid}/environ").read_bytes())
                if match and _status(pid) not in "ZXT":
                    number = int(match[1])
                    report = Report.read(self.folder / f"member-{number}")
                    found.append(Member(number, pid, report))
        return sorted(found, key=lambda member: member.number)

    def check_running(self) -> None:
        """Raises AssertionError if the job has ended."""
        if self.process.poll() is not None:
            raise AssertionError(f"tfdistrun ended with {self.process.returncode}")

    def wait_until(self, condition: Any, limit_s: float, wish: str) -> Any:
        """Waits for a result that is true; returns it.

        Raises:
            HangError: there was none in time.
            AssertionError: the job has ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            # Asked before the condition, which may be that the job ends.
            code = self.process.poll()
            if found := condition():
                return found
            if code is not None:
                raise AssertionError(f"tfdistrun ended with {code}")
            self._send_continues()
            if time.monotonic() > deadline:
                raise HangError(f"not within {limit_s:g} s: {wish}")
            time.sleep(0.002)

    # ---- kills ----

    def attack(self, count: int) -> None:
        """Kills processes, at least `count` of them."""
        self.wait_until(
            lambda: sum(m.report.committed > 0 for m in self.members()) == SIZE,
            START_S,
            "a step of all ranks",
        )
        while len(self.kills) < count:
            self._pause()
            for _ in range(2 if self.draw.random() < 0.15 else 1):
                wish = self.draw.random()
                victim = self.wait_until(
                    lambda wish=wish: self._choose(wish), CHOICE_S, "a process to kill"
                )
                self._kill(victim)

    def _pause(self) -> None:
        """Waits for the next kill: almost at once, in a short phase, or at random."""
        kind, rare = self.draw.random(), self.draw.choice(RARE_PHASES)
        seconds = self.draw.uniform(*((0.0, 0.05) if kind < 0.3 else (0.1, 1.5)))
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            self.check_running()
            self._send_continues()
            members = self.members()
            self._note_progress(members)
            if kind > 0.6 and any(m.phase == rare for m in members):
                time.sleep(self.draw.uniform(0.0, 0.01))
                self._rare_phase = rare
                return
            time.sleep(min(left_s, 0.003))
        self._rare_phase = ""

    def _choose(self, wish: float) -> Member | None:
        members = self.members()
        self._note_progress(members)
        if self._stepless_kills >= STEPLESS_KILLS:
            return None
        holders = [m for m in members if m.has_state]
        candidates = [m for m in members if self._may_kill(m, len(holders))]
        preferred = [m for m in candidates if m.phase == self._rare_phase] or [
            m
            for m in candidates
            if (wish < 0.3 and m.is_newcomer)
            or (0.3 <= wish < 0.5 and m.report.rank == 0 and not m.is_newcomer)
        ]
        found = preferred or candidates
        return self.draw.choice(found) if found else None

    def _may_kill(self, member: Member, holder_count: int) -> bool:
        if not member.is_newcomer:
            return holder_count > 1
        # tfdistrun may kill those that were stopped, at some later time.
        stopped = sum(one.is_newcomer for one in self._continued.values())
        return member.is_ready or self._unready_kills + stopped < UNREADY_KILLS

    def _note_progress(self, members: list[Member]) -> None:
        now_s = time.monotonic()
        for pid, stopped in list(self._continued.items()):
            report = Report.read(self.folder / f"member-{stopped.number}")
            if report.committed > stopped.report.committed:
                self._gone.discard(pid)  # it has joined the others, or gone on
                del self._continued[pid]
            elif not Path(f"/proc/{pid}").exists():
                del self._continued[pid]  # tfdistrun has killed it
                if stopped.is_newcomer and not stopped.is_ready:
                    self._unready_kills += 1
                    self._unready_kill_s = now_s
        for member in members:
            if member.is_newcomer and member.report.phase < Phase.WAITS:
                self._unready_at_s[member.number] = now_s
            unready_s = self._unready_at_s.get(member.number, 0.0)
            # Sooner, tfdistrun might notice the kill only after resetting its counter.
            if member.is_ready and unready_s > self._unready_kill_s + NOTICE_S:
                self._unready_kills = 0
        running = [m.report.committed for m in members if m.has_state]
        if running and min(running) > self._step_at_kill + 2:
            self._stepless_kills = 0

    def _kill(self, member: Member) -> None:
        is_stop = self.draw.random() < 0.1
        number = signal.SIGSTOP if is_stop else signal.SIGKILL
        self._victims.add(member.pid)
        self._gone.add(member.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, number)
        # A stopped newcomer keeps its place, which would leave nothing to kill.
        if is_stop and (member.is_newcomer or self.draw.random() < 0.5):
            delay_s = self.draw.uniform(0.05, 1.5)
            self._continue_at_s[member.pid] = time.monotonic() + delay_s
            self._continued[member.pid] = member
        if member.is_newcomer and not member.is_ready:
            self._unready_kills += 1
            self._unready_kill_s = time.monotonic()
        self._stepless_kills += 1
        latest = [m.report.committed for m in self.members()]
        self._step_at_kill = max([self._step_at_kill, member.report.committed, *latest])
        kill = {
            "phase": member.phase,
            "signal": number.name,
            "rank": member.report.rank,
            "at_s": round(time.monotonic() - self._begin_s, 3),
            "pid": member.pid,
        }
        self.kills.append(kill)

    def _send_continues(self) -> None:
        now_s = time.monotonic()
        for pid, when_s in list(self._continue_at_s.items()):
            if now_s >= when_s:
                del self._continue_at_s[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # ---- the end ----

    def finish(self) -> None:
        """Lets the job finish.

        Raises:
            HangError: it did not end in time.
        """
        (self.folder / "hold").unlink()
        self.wait_until(lambda: self.process.poll() is not None, END_S, "the job's end")

    def stacks(self) -> str:
        """The stacks of all processes, with what they show of themselves."""
        members = self.members()
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)  # Python's faulthandler
        time.sleep(1.0)
        parts = []
        for member in members:
            file = self.folder / f"stacks-{member.number}"
            text = file.read_text() if file.exists() else ""
            parts.append(f"member {member.number}: {member.report}\n{text}")
        return "\n".join(parts)

    def said(self) -> list[str]:
        """The lines of tfdistrun and its processes on stderr."""
        return (self.folder / "stderr").read_text().splitlines()

    def wrongly_killed(self) -> list[str]:
        """Lines of tfdistrun about kills of processes that could have gone on."""
        kills = [
            line for line in self.said() if re.search(r"process \d+ is killed: ", line)
        ]
        return [
            line
            for line in kills
            if "the job has finished" not in line
            and int(re.findall(r"process (\d+) is", line)[0]) not in self._victims
        ]

    def close(self) -> None:
        """Ends all processes of the job."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        for pid in marked(self.marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _status(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0]


def shared_memory() -> set[str]:
    """Names of tfdist's files in /dev/shm."""
    return {name for name in os.listdir("/dev/shm") if "tfdist" in name}  # noqa: S108


def wrong_with(job: Job, shared_before: set[str]) -> str:
    """The fault of a job that has ended; "" if there is none."""
    if job.process.returncode != 0:
        return f"tfdistrun ended with {job.process.returncode}"
    hashes = {file.name: file.read_text() for file in job.folder.glob("hash-*")}
    if not hashes or len(set(hashes.values())) > 1:
        return f"the final states differ, or there are none: {hashes}"
    if not (job.folder / "result.npz").exists():
        return "there is no result of rank 0"
    with np.load(job.folder / "result.npz") as result:
        uses, order = expected(int(result["steps"]))
        if not np.array_equal(result["uses"], uses):
            return "a sample was used too often, or not often enough"
        if int(result["order"]) != order:
            return "the steps were not done in order"
    if lines := job.wrongly_killed():
        return f"tfdistrun killed a process that had not failed: {lines}"
    try:
        until(lambda: not marked(job.marker), 5.0)
    except AssertionError:
        return f"processes are left: {marked(job.marker)}"
    if left := shared_memory() - shared_before:
        return f"shared memory is left: {left}"
    return ""


def trial(seed: int, kills: int = KILLS, keep: Path | None = None) -> dict[str, Any]:
    """One job: what was killed, how long the ranks stalled, and whether all is right.

    Args:
        seed: source of all decisions.
        kills: number of processes to kill.
        keep: folder for the files of a job that went wrong.
    """
    shared_before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="tfdist-elastic-") as name:
        folder = Path(name)
        job = Job.start(folder, random.Random(seed))
        is_hang, stacks = False, ""
        lines: list[str] = []
        try:
            job.attack(kills)
            job.finish()
            why = wrong_with(job, shared_before)
        except HangError as error:
            lines = job.said()  # before its stacks
            is_hang, why, stacks = True, str(error), job.stacks()
        except AssertionError as error:
            why = str(error)
        finally:
            job.close()
        stalls = generations_of(folder)
        if why and keep is not None:
            (folder / "stacks").write_text(stacks)
            (folder / "kills").write_text("\n".join(map(str, job.kills)))
            keep.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", name, keep / f"seed-{seed}"], check=True)
        if why:
            why = f"{why}; {' | '.join((lines or job.said())[-5:])}"[:900]
    phases = Counter(f"{kill['phase']} {kill['signal']}" for kill in job.kills)
    return {
        "kills": dict(sorted(phases.items())),
        "rank_0_kills": sum(k["rank"] == 0 for k in job.kills),
        "loss_s": [line["stall_s"] for line in stalls if line["why"] == "loss"],
        "join_s": [line["stall_s"] for line in stalls if line["why"] == "join"],
        "hang": is_hang,
        "ok": not why,
        "why": why,
    }


def table(rows: list[dict[str, Any]]) -> bool:
    """Prints kills, faults and stalls; True when all trials were right."""
    kills: Counter[str] = Counter()
    for row in rows:
        kills.update(row.get("kills", {}))
    for phase, count in sorted(kills.items()):
        print(f"{phase:28} {count:5}")
    zeros = sum(row.get("rank_0_kills", 0) for row in rows)
    hangs = sum(bool(row.get("hang")) for row in rows)
    wrong = sum(not row["ok"] for row in rows)
    print(f"{kills.total()} kills, {zeros} of rank 0; {len(rows)} jobs")
    print(f"{hangs} hangs, {wrong - hangs} other faults")
    for why in ("loss", "join"):
        times = [t for row in rows for t in row.get(f"{why}_s", [])]
        if times:
            p50_ms, most_ms = statistics.median(times) * 1e3, max(times) * 1e3
            p99_ms = percentile(times, 0.99) * 1e3
            print(
                f"stall of a rank for a {why}: p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} "
                f"ms, longest {most_ms:.0f} ms ({len(times)})"
            )
    for row in rows:
        if not row["ok"]:
            print(f"    seed {row['seed']}: {row['why']}")
    return not wrong and len(rows) >= TRIALS


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help="fewer, or more")
    parser.add_argument("--table", action="store_true", help="print the record")
    parser.add_argument("--keep", type=Path, help="folder for files of wrong jobs")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]["elastic"]) else 1
    record = Record(RECORD, CODE)
    rows = record.rows.setdefault("elastic", [])
    for seed in range(len(rows), options.trials):
        rows.append({"seed": seed, **trial(seed, keep=options.keep)})
        record.save()
        if not rows[-1]["ok"]:
            print(f"seed {seed}: {rows[-1]['why']}", flush=True)
    return 0 if table(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
