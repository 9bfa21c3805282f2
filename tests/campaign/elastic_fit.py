"""Kills processes of an elastic `fit` at random instants, and checks what it yields.

    python tests/campaign/elastic_fit.py            # what today's code has no record of
    python tests/campaign/elastic_fit.py --trials 1 # fewer
    python tests/campaign/elastic_fit.py --table    # the table of the record

A trial is one job of three ranks that may go on with one
(`helpers.elastic_fit_program`), of which ten processes are killed or stopped while
they train, never the last one. It is right when, on all ranks, the uses of each sample
and the metrics of each epoch are those of a job without a failure. A later run
continues the record, elastic_fit.json. Exit status 0: all are right.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from helpers.elastic_fit_program import check, steps_of  # noqa: E402
from helpers.launcher import finish, start  # noqa: E402
from helpers.record import Record  # noqa: E402

RECORD = HERE / "elastic_fit.json"
CODE = (
    "tfdist", "tfdist_ops", "tests/campaign/elastic_fit.py",
    "tests/helpers/elastic_fit_program.py",
)  # fmt: skip
TRIALS, KILLS, EPOCHS = 5, 10, 400
ALIVE_S = 1.0  # a rank trains if its last step is not older
ATTACK_S, END_S = 400.0, 300.0


def trial(seed: int) -> dict[str, Any]:
    """Runs one job, and kills its processes."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="tfdist-fit-") as name:
        folder = Path(name)
        (folder / "slow").touch()
        program = ["-m", "helpers.elastic_fit_program", name, str(EPOCHS), "{}"]
        job = start(
            *(folder, "-np", "3", "--min-np", "1", "--max-restarts", "100"),
            *(sys.executable, *program),
        )
        kills = _attack(folder, job, rng)
        why = ""
        try:
            done = finish(job, END_S)
            if done.code != 0:
                why = f"exit code {done.code}: " + " | ".join(done.report[-3:])
            else:
                check(folder, EPOCHS)
        except AssertionError as error:
            why = str(error) or "wrong result"
        pauses_s = [
            later["time_s"] - earlier["time_s"]
            for steps in steps_of(folder).values()
            for earlier, later in pairwise(steps)
            if later["size"] != earlier["size"]
        ]
    return {"kills": kills, "pauses_s": pauses_s, "ok": not why, "why": why[:900]}


def _attack(folder: Path, job: Any, rng: random.Random) -> list[str]:
    """Kills or stops ranks that train, while others train too."""
    kills: list[str] = []
    end_s = time.monotonic() + ATTACK_S
    attacked: set[int] = set()
    while len(kills) < KILLS and job.poll() is None and time.monotonic() < end_s:
        time.sleep(rng.uniform(0.05, 0.5))
        pids = sorted(_training(folder) - attacked)
        if len(pids) < 2:
            continue
        number = signal.SIGKILL if rng.random() < 0.85 else signal.SIGSTOP
        pid = rng.choice(pids)
        attacked.add(pid)
        os.kill(pid, number)
        kills.append(number.name)
        if rng.random() < 0.7:
            time.sleep(rng.uniform(0.0, 6.0))
    return kills


def _training(folder: Path) -> set[int]:
    """The processes that train at the moment."""
    if not (folder / "commits").exists():
        return set()
    now_s = time.monotonic()
    last = [steps[-1] for steps in steps_of(folder).values()]
    return {step["pid"] for step in last if now_s - step["time_s"] < ALIVE_S}


def table(rows: list[dict[str, Any]]) -> bool:
    """Prints kills, faults and pauses; True when all trials were right."""
    kills = [kill for row in rows for kill in row["kills"]]
    wrong = [row for row in rows if not row["ok"]]
    print(f"{len(kills)} kills ({kills.count('SIGSTOP')} SIGSTOP), {len(rows)} jobs")
    print(f"{len(wrong)} wrong")
    pauses_s = [pause for row in rows for pause in row["pauses_s"]]
    if pauses_s:
        print(
            "from one step to the next when the ranks change: median "
            f"{statistics.median(pauses_s):.2f} s, longest {max(pauses_s):.2f} s "
            f"({len(pauses_s)})"
        )
    for row in wrong:
        print(f"    seed {row['seed']}: {row['why']}")
    return not wrong and len(rows) >= TRIALS


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help="fewer, or more")
    parser.add_argument("--table", action="store_true", help="print the record")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]["fit"]) else 1
    record = Record(RECORD, CODE)
    rows = record.rows.setdefault("fit", [])
    for seed in range(len(rows), options.trials):
        rows.append({"seed": seed, **trial(seed)})
        record.save()
        print(rows[-1]["why"] or "right", flush=True)
    return 0 if table(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
