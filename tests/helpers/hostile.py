"""Attacks jobs while they start and while they run; measures what it does to them.

    python tests/helpers/hostile.py --connections 100000

Each round starts a job of three ranks under tfdistrun, attacks it while two ranks wait
for the third, lets it start under attack, attacks it while it runs, and looks at the
end: did any connection get in, did every rank end well, how long did the start and the
slowest step take, how much did the memory of tfdistrun and the ranks grow. Rounds that
are done are kept in build/hostile.json with the hash of the code they attacked, so
that a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import launcher  # noqa: E402
from helpers.record import Record  # noqa: E402
from helpers.strangers import Attack, Job, record  # noqa: E402

from tfdist.core.rendezvous.address import split_address  # noqa: E402
from tfdist.core.rendezvous.secret import read_secret_file  # noqa: E402
from tfdist.core.rendezvous.store import StoreClient  # noqa: E402

STATE = ROOT / "build" / "hostile.json"
CODE = (
    "tfdist/core", "tfdist/launch", "tfdist_ops", "tests/helpers",
)  # fmt: skip
PER_ROUND = 5000
SIZE = 3

# One rank. The last one waits for a file before it starts; all step until another
# file tells to stop, and print how long the start and the slowest step took.
RANK = """
import json, os, sys, time
import numpy as np
from helpers.core_client import allreduce
from tfdist.core import world
folder, last = sys.argv[1], int(os.environ["TFDIST_SIZE"]) - 1
rank = int(os.environ["TFDIST_RANK"])
def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.005)
if rank == last:
    with open(os.path.join(folder, "environ"), "w") as file:
        told = {k: v for k, v in os.environ.items() if k.startswith("TFDIST_")}
        json.dump(told, file)
    os.rename(os.path.join(folder, "environ"), os.path.join(folder, "environ.json"))
    wait_for("go")
before = time.monotonic()
world.start()
start_s = time.monotonic() - before
open(os.path.join(folder, "running." + str(rank)), "w").close()
slowest_s, count, going = 0.0, 0, np.ones(1, np.float32)
while going[0] > 0:
    before = time.monotonic()
    x = np.arange(1000, dtype=np.float32) % 17 + rank + count % 5
    total = allreduce(x, name="gradients")
    base = np.arange(1000, dtype=np.float32) % 17 + count % 5
    if not np.array_equal(total, (last + 1) * base + last * (last + 1) // 2):
        sys.exit("a wrong sum")
    stop = os.path.exists(os.path.join(folder, "stop"))
    own = np.array([rank == 0 and not stop], np.float32)
    going = allreduce(own, name="go")
    slowest_s = max(slowest_s, time.monotonic() - before)
    count += 1
    time.sleep(0.002)
told = {"rank": rank, "start_s": start_s, "slowest_s": slowest_s, "steps": count}
with open(os.path.join(folder, "told." + str(rank)), "w") as file:
    json.dump(told, file)
"""


@dataclass
class Round:
    """What one job went through.

    Attributes:
        connections: made in all, by kind.
        start_s: seconds the last rank's tfdist.init() took, under attack.
        slowest_s: the longest step of any rank, under attack.
        grown_bytes: most that a process's memory grew from the first hundred
            connections on.
        warnings: lines that the job printed about refused connections.
    """

    connections: dict[str, int]
    start_s: float
    slowest_s: float
    steps: int
    grown_bytes: int
    warnings: int


def _listening(pids: list[int]) -> list[tuple[str, int]]:
    found = []
    for pid in pids:
        for sock in psutil.Process(pid).net_connections(kind="tcp"):
            if sock.status == psutil.CONN_LISTEN:
                found.append((sock.laddr.ip, sock.laddr.port))
    return found


def _memory(pids: list[int]) -> dict[int, int]:
    return {pid: psutil.Process(pid).memory_info().rss for pid in pids}


def _keys(address: tuple[str, int], secret: bytes, job: str) -> int:
    async def ask() -> int:
        client = await StoreClient.connect(
            address, secret, deadline=time.monotonic() + 20.0, job=job
        )
        value = await client.add("replayed", 0, timeout_s=20.0)
        client.close()
        return value

    return asyncio.run(ask())


def attack_a_job(folder: Path, connections: int, seed: int) -> Round:
    """Runs one job through all of it.

    Raises:
        AssertionError: something got in, or the job did not survive.
    """
    program = folder / "rank.py"
    program.write_text(RANK)
    command = [sys.executable, str(program), str(folder)]
    process = launcher.start(folder, "-np", str(SIZE), "--", *command)
    try:
        launcher.until((folder / "environ.json").exists, 30.0)
        environ = json.loads((folder / "environ.json").read_text())
        store = split_address(environ["TFDIST_RENDEZVOUS"])
        secret = read_secret_file(environ["TFDIST_SECRET_FILE"])
        job = environ["TFDIST_JOB_ID"]
        ranks = [p for p in launcher.marked(job) if p != process.pid]
        # tfdistrun's store, and the ranks 0 and 1 that wait for the last one.
        launcher.until(lambda: len(_listening([process.pid, *ranks])) >= SIZE, 30.0)
        pids = [pid for pid in [process.pid, *ranks] if _listening([pid])]
        target = Job(_listening(pids), secret, job)
        target.recorded = asyncio.run(record(store, secret, job))
        attack = Attack(target, seed)
        attack.run(max(30, connections // 50))  # what is allocated once is allocated
        before = _memory(pids)
        attack.run(connections // 2)
        # The rest comes while the last rank starts, and when all run.
        rest = Attack(target, seed + 1)
        failures: list[BaseException] = []

        def go_on() -> None:
            try:
                rest.run(connections - sum(attack.made.values()))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=go_on)
        thread.start()
        (folder / "go").touch()
        try:
            running = [folder / f"running.{rank}" for rank in range(SIZE)]
            launcher.until(lambda: all(path.exists() for path in running), 30.0)
            target.ports[:] = _listening(pids)
            assert target.ports == [store], "a rank still listens after its start"
        finally:
            thread.join()
        if failures:
            raise failures[0]
        grown = max(now - before[pid] for pid, now in _memory(pids).items())
        assert _keys(store, secret, job) == 1, "a recorded message was obeyed"
        (folder / "stop").touch()
        done = launcher.finish(process, 60.0)
        assert done.code == 0, done.stderr
    finally:
        process.kill()
        process.wait()
    told = [json.loads((folder / f"told.{rank}").read_text()) for rank in range(SIZE)]
    return Round(
        connections=dict(attack.made + rest.made),
        start_s=told[-1]["start_s"],
        slowest_s=max(row["slowest_s"] for row in told),
        steps=told[0]["steps"],
        grown_bytes=grown,
        warnings=done.stderr.count("refused "),
    )


def main() -> int:
    """Rounds until so many connections are made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--fresh", action="store_true", help="forget earlier rounds")
    options = parser.parse_args()
    STATE.parent.mkdir(exist_ok=True)
    known = Record(STATE, CODE)
    if options.fresh:
        known.rows.clear()
    rounds = known.rows.setdefault("rounds", [])
    made = sum(sum(row["connections"].values()) for row in rounds)
    while made < options.connections:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = attack_a_job(Path(folder), PER_ROUND, len(rounds))
        rounds.append(asdict(found))
        known.save()
        made += sum(found.connections.values())
        print(
            f"{made:7} connections, accepted 0; start {found.start_s:.3f} s, slowest "
            f"step {found.slowest_s:.3f} s of {found.steps}, memory "
            f"{found.grown_bytes / 2**20:+.1f} MiB ({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
    worst = {
        name: max(row[name] for row in rounds)
        for name in ("start_s", "slowest_s", "grown_bytes")
    }
    print(f"{made} connections in {len(rounds)} jobs, accepted 0, jobs failed 0")
    print(
        f"worst: start {worst['start_s']:.3f} s, step {worst['slowest_s']:.3f} s, "
        f"memory {worst['grown_bytes'] / 2**20:+.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
