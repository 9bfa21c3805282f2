"""Injects failures of ranks and hosts into elastic jobs; no step may be lost.

    python tests/campaign/elastic_hosts.py               # those not yet recorded
    python tests/campaign/elastic_hosts.py --trials 2    # fewer of each kind
    python tests/campaign/elastic_hosts.py --table       # the table of the record

A trial is one job of four ranks on two hosts, with a third host in reserve. The hosts
are network namespaces of this machine, which need root. One fault happens:

    stop      a rank is stopped (SIGSTOP)
    rank 0    rank 0 is killed
    two       two ranks are killed at once
    recovery  a rank is killed, and another one while the ranks recover
    join      a rank is killed, and a process while its replacement joins
    host      the agent of a host is killed, and all its ranks with it
    cut       the cable of a host is pulled, and its ssh goes silent

A trial is right when four ranks train again and each sample was used as often as
without a failure. The record is elastic_hosts.json. Exit status 0: all are right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from campaign.run import percentile  # noqa: E402
from helpers.elastic_client import Phase, Report  # noqa: E402
from helpers.elastic_hosts import Job, agent_of  # noqa: E402
from helpers.hosts import Hosts, networked_hosts, why_no_networks  # noqa: E402
from helpers.launcher import until  # noqa: E402
from helpers.record import Record  # noqa: E402

RECORD = HERE / "elastic_hosts.json"
CODE = (
    "tfdist/core", "tfdist/launch", "tfdist_ops", "tests/campaign/elastic_hosts.py",
    "tests/helpers/elastic_hosts.py", "tests/helpers/elastic_client.py",
    "tests/helpers/core_client.py",
)  # fmt: skip
KINDS = ("stop", "rank 0", "two", "recovery", "join", "host", "cut")
TRIALS, SIZE = 20, 4
RECOVERS = (Phase.WAITS, Phase.CONNECTS, Phase.SHARES)


def trial(kind: str, seed: int, hosts: Hosts) -> dict[str, Any]:
    """Runs one job with one fault."""
    draw = random.Random(f"{kind} {seed}")
    with tempfile.TemporaryDirectory(prefix="tfdist-hosts-") as name:
        options = ("-np", str(SIZE), "--min-np", "1", "--max-restarts", "100")
        job = Job.start(Path(name), hosts, (2, 2, 2), *options)
        why = ""
        try:
            job.wait_for(SIZE)
            time.sleep(draw.uniform(0.0, 0.3))
            _attack(kind, job, hosts, draw)
            job.wait_for(SIZE, generation=2, limit_s=60.0)
            job.finish()
        except (AssertionError, OSError) as error:
            why = str(error)[-900:]
        finally:
            job.process.kill()
            job.process.wait(10.0)
            for index in range(len(hosts.names)):
                hosts.cable(index, "up")
        stalls = [row["stall_s"] for row in job.rows() if row["why"] == "loss"]
    return {"seed": seed, "loss_s": stalls, "ok": not why, "why": why}


def _living(job: Job) -> dict[int, Report]:
    """The reports of the processes that have not ended, by member."""
    found = {}
    for file in job.folder.glob("member-*"):
        member = int(file.name.rpartition("-")[2])
        report = job.report(member)
        if report.pid > 0 and Path(f"/proc/{report.pid}").exists():
            found[member] = report
    return found


def _attack(kind: str, job: Job, hosts: Hosts, draw: random.Random) -> None:
    members = sorted(_living(job))
    if kind == "stop":
        job.kill(draw.choice(members), signal.SIGSTOP)
    elif kind == "rank 0":
        job.kill(0)
    elif kind == "two":
        for member in draw.sample(members, 2):
            job.kill(member)
    elif kind in ("recovery", "join"):
        job.kill(draw.choice(members))
        _kill_in_recovery(job, draw, of_newcomer=kind == "join")
    elif kind == "host":
        agent_of(job, draw.choice(members)).kill()
    else:
        index = draw.randrange(2)
        hosts.clients(job.process.pid)[hosts.names[index]].suspend()
        hosts.cable(index, "down")


def _kill_in_recovery(job: Job, draw: random.Random, *, of_newcomer: bool) -> None:
    """Kills a process that waits, connects or shares; or another one meanwhile."""
    found: list[int] = []

    def recovers() -> bool:
        living = _living(job)
        busy = [
            member
            for member, report in living.items()
            if report.phase in RECOVERS
            and (report.committed < 0 or not of_newcomer)
            and (member >= SIZE or not of_newcomer)
        ]
        found[:] = busy if draw.random() < 0.7 else busy and [*living]
        return bool(found)

    until(recovers, 30.0)
    time.sleep(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.02)]))
    victims = [member for member in found if member in _living(job)]
    if victims:
        os.kill(job.report(draw.choice(victims)).pid, signal.SIGKILL)


def table(rows: dict[str, list[dict[str, Any]]], trials: int = TRIALS) -> bool:
    """Prints trials, faults and stalls; True when all trials were right."""
    good = True
    for kind in KINDS:
        done = rows.get(kind, [])
        wrong = [row for row in done if not row["ok"]]
        good = good and not wrong and len(done) >= trials
        times = [t for row in done for t in row["loss_s"]] or [0.0]
        print(
            f"{kind:9} {len(done):3} trials, {len(wrong)} wrong; stall of a rank: p50 "
            f"{statistics.median(times):.2f} s, p99 {percentile(times, 0.99):.2f} s, "
            f"longest {max(times):.2f} s"
        )
        for row in wrong:
            print(f"    seed {row['seed']}: {row['why']}")
    return good


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help="of each kind")
    parser.add_argument("--table", action="store_true", help="print the record")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]) else 1
    if why := why_no_networks():
        print(f"skipped: {why}")
        return 0
    record = Record(RECORD, CODE)
    with (
        tempfile.TemporaryDirectory(prefix="tfdist-ssh-") as name,
        networked_hosts(Path(name), 3) as hosts,
    ):
        for kind in KINDS:
            rows = record.rows.setdefault(kind, [])
            for seed in range(len(rows), options.trials):
                rows.append(trial(kind, seed, hosts))
                record.save()
                if not rows[-1]["ok"]:
                    print(f"{kind}, seed {seed}: {rows[-1]['why']}", flush=True)
    return 0 if table(record.rows, options.trials) else 1


if __name__ == "__main__":
    sys.exit(main())
