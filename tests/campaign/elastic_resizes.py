"""Lets elastic jobs grow and shrink at random, and checks what they yield.

    python tests/campaign/elastic_resizes.py               # those not yet recorded
    python tests/campaign/elastic_resizes.py --trials 4    # fewer
    python tests/campaign/elastic_resizes.py --table       # the table of the record

A trial is one job of one to four ranks (`helpers.elastic_client`), whose discovery
script prints six random numbers of slots, one after another. The next number comes when
the ranks have followed the last one, or earlier. A trial is right when each sample was
used as often as without a change, on all ranks, and no rank was lost. The record is
elastic_resizes.json. Exit status 0: all are right.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import numpy as np  # noqa: E402
from helpers.elastic_client import expected  # noqa: E402
from helpers.launcher import finish, start, until  # noqa: E402
from helpers.record import Record  # noqa: E402
from helpers.slots import Slots  # noqa: E402

RECORD = HERE / "elastic_resizes.json"
CODE = (
    "tfdist/core", "tfdist/launch", "tfdist_ops", "tests/campaign/elastic_resizes.py",
    "tests/helpers/elastic_client.py", "tests/helpers/core_client.py",
)  # fmt: skip
TRIALS, CHANGES, MOST = 100, 6, 4
FOLLOW_S, AT_ONCE = 40.0, 2  # trials that run at the same time


def trial(seed: int) -> dict[str, Any]:
    """Runs one job, and changes its number of slots."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, MOST) for _ in range(CHANGES)]
    why = ""
    with tempfile.TemporaryDirectory(prefix="tfdist-resizes-") as name:
        folder = Path(name)
        (folder / "hold").touch()
        slots = Slots(folder, sizes[0])
        program = [sys.executable, "-m", "helpers.elastic_client", name, "1"]
        job = start(folder, *slots.options(np=1, most=MOST), *program)
        try:
            for size in sizes:
                slots.set(size)
                if size == sizes[-1] or draw.random() < 0.7:
                    until(lambda size=size: _size(folder) == size, FOLLOW_S)
                time.sleep(draw.uniform(0.0, 1.2))
            (folder / "hold").unlink()
            why = _wrong_with(folder, finish(job, FOLLOW_S))
        except AssertionError as error:
            why = str(error)[-900:]
        finally:
            job.kill()
            job.wait(10.0)
    return {"seed": seed, "sizes": sizes, "ok": not why, "why": why}


def _size(folder: Path) -> int:
    """The number of ranks in the newest generation; 0 before the first step."""
    file = folder / "generations"
    complete, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")
    return int(json.loads(complete.splitlines()[-1])["size"]) if complete else 0


def _wrong_with(folder: Path, done: Any) -> str:
    """The fault of a job that has ended; "" if there is none."""
    if done.code != 0:
        return f"tfdistrun ended with {done.code}: {done.stderr[-900:]}"
    if any("was lost" in line for line in done.report):
        return f"a rank was lost: {done.report}"
    result = np.load(folder / "result.npz")
    uses, order = expected(int(result["steps"]))
    if not np.array_equal(result["uses"], uses) or result["order"] != order:
        return "a sample was used too often, or not often enough"
    if len({file.read_text() for file in folder.glob("hash-*")}) != 1:
        return "the final states of the ranks differ"
    return ""


def table(rows: list[dict[str, Any]], trials: int = TRIALS) -> bool:
    """Prints the trials; True when all were right."""
    wrong = [row for row in rows if not row["ok"]]
    print(f"{len(rows)} schedules of {CHANGES} numbers of slots, {len(wrong)} wrong")
    for row in wrong:
        print(f"    seed {row['seed']}, {row['sizes']}: {row['why']}")
    return not wrong and len(rows) >= trials


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--table", action="store_true", help="print the record")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]["resizes"]) else 1
    record = Record(RECORD, CODE)
    rows = record.rows.setdefault("resizes", [])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(trial, range(len(rows), options.trials)):
            rows.append(row)
            record.save()
            if not row["ok"]:
                print(f"seed {row['seed']}: {row['why']}", flush=True)
    return 0 if table(rows, options.trials) else 1


if __name__ == "__main__":
    sys.exit(main())
