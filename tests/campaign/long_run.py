"""Kills a rank of an elastic training repeatedly, and measures time and memory.

    python tests/campaign/long_run.py time         # 20 minutes, a kill every 30 s
    python tests/campaign/long_run.py generations  # 100 kills, one every 6 s
    python tests/campaign/long_run.py --table      # the table of the record

A run is one job of three ranks with TensorFlow and one spare
(`helpers.elastic_program`, steps of 20 ms). The first rank is never killed, so that its
process sees all generations. The effective time is the time of its steps, at the median
length, as a share of the whole time; what is missing went into losses, joins, and the
load of replacements that start. Memory, descriptors and threads of the first rank and
of tfdistrun are read before each kill. A run is right when each sample was used as
often as without a failure. The record is long_run.json. Exit status 0: both runs
are right, at least 95 % of the time was effective in the run `time`, memory grew by at
most 16 MB, and descriptors and threads did not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from campaign.run import percentile  # noqa: E402
from helpers.elastic_program import expected  # noqa: E402
from helpers.json_lines import complete, lines  # noqa: E402
from helpers.launcher import start, until  # noqa: E402
from helpers.record import Record  # noqa: E402

RECORD = HERE / "long_run.json"
CODE = (
    "tfdist", "tfdist_ops", "tests/campaign/long_run.py",
    "tests/helpers/elastic_program.py",
)  # fmt: skip
RUNS = {"time": (30.0, 40), "generations": (6.0, 100)}  # seconds between kills, kills
START_S, END_S = 120.0, 120.0
GROWTH_MB = 16.0  # of a process, from the first quarter of a run to the last one


def trial(period_s: float, kills: int) -> dict[str, Any]:
    """Runs one job, and kills one of its ranks every `period_s` seconds."""
    rng = random.Random(kills)
    with tempfile.TemporaryDirectory(prefix="tfdist-long-") as name:
        folder = Path(name)
        (folder / "slow").touch()
        options = ("-np", "3", "--min-np", "1", "--spares", "1")
        program = (sys.executable, "-m", "helpers.elastic_program", name, "100000000")
        job = start(folder, *options, "--max-restarts", "10000", *program)
        said: list[str] = []
        threads = [
            threading.Thread(target=_collect, args=(stream, said), daemon=True)
            for stream in (job.stdout, job.stderr)
        ]
        for thread in threads:
            thread.start()
        try:
            samples = _attack(folder, job.pid, rng, period_s, kills)
            last = _rows(folder)[-1]["step"] + 100
            (folder / "stop.new").write_text(str(last))
            (folder / "stop.new").rename(folder / "stop")
            code = job.wait(END_S)
        finally:
            job.kill()
        why = "" if code == 0 else f"tfdistrun ended with {code}: {said[-5:]}"
        result = np.load(folder / "result.npz")
        uses, order = expected(int(result["steps"]))
        if not np.array_equal(result["uses"], uses) or result["order"] != order:
            why = "a sample was used too often, or not often enough"
        own = [row["time_s"] for row in _rows(folder) if row["member"] == 0]
    generations = sum("the job goes on with" in line for line in said)
    return {
        "kills": kills,
        "generations": generations,
        **_times(own),
        "samples": samples,
        "ok": not why,
        "why": why,
    }


def _collect(stream: IO[str], said: list[str]) -> None:
    said.extend(line for line in stream if re.match("tfdistrun: ", line))


def _rows(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "commits")


def _tail(folder: Path) -> list[dict[str, Any]]:
    """The latest lines of the commits."""
    file = folder / "commits"
    if not file.exists():
        return []
    with file.open("rb") as commits:
        commits.seek(max(0, file.stat().st_size - 16_384))
        text = commits.read().decode()
    return complete(text.partition("\n")[2])


def _attack(
    folder: Path, launcher: int, rng: random.Random, period_s: float, kills: int
) -> list[dict[str, Any]]:
    """Kills ranks; returns what the processes used before each kill."""
    until(lambda: {row["rank"] for row in _tail(folder)} == {0, 1, 2}, START_S)
    first = next(row["pid"] for row in _tail(folder) if row["member"] == 0)
    processes = {"rank": psutil.Process(first), "tfdistrun": psutil.Process(launcher)}
    samples, next_s = [], time.monotonic()
    for _ in range(kills):
        next_s += period_s
        time.sleep(max(0.0, next_s - time.monotonic()))
        samples.append({name: _usage(one) for name, one in processes.items()})
        fresh_s = time.monotonic() - 1.0
        members = {
            row["pid"]
            for row in _tail(folder)
            if row["member"] != 0 and row["time_s"] > fresh_s
        }
        if members:
            os.kill(rng.choice(sorted(members)), signal.SIGKILL)
    time.sleep(period_s)
    return samples


def _usage(process: psutil.Process) -> dict[str, float]:
    return {
        "memory_mb": round(process.memory_info().rss / 1e6, 1),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def _times(own: list[float]) -> dict[str, Any]:
    """The effective time, and the longest pauses, of the first rank."""
    gaps = [new - old for old, new in pairwise(own)]
    step_s = statistics.median(gaps)
    whole_s = own[-1] - own[0]
    lost_s = sum(max(0.0, gap - step_s) for gap in gaps)
    pauses_s = [gap for gap in gaps if gap > 5 * step_s]
    return {
        "minutes": round(whole_s / 60, 1),
        "steps": len(own),
        "step_ms": round(1e3 * step_s, 2),
        "effective": round(1.0 - lost_s / whole_s, 4),
        "pauses_ms": [round(1e3 * gap) for gap in sorted(pauses_s)],
    }


def _growth(samples: list[dict[str, Any]], who: str, what: str) -> tuple[float, float]:
    """The medians of the first quarter, and of the last one."""
    values = [sample[who][what] for sample in samples]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def table(rows: dict[str, dict[str, Any]]) -> bool:
    """Prints the runs; True when they are all there and right."""
    good = rows.keys() == RUNS.keys()
    for name, row in rows.items():
        print(
            f"{name}: {row['kills']} kills in {row['minutes']} minutes, "
            f"{row['generations']} generations, {row['steps']} steps of "
            f"{row['step_ms']} ms {row['why']}"
        )
        pauses = row["pauses_ms"]
        print(
            f"  effective time {100 * row['effective']:.1f} %; {len(pauses)} pauses "
            f"above 5 steps: p50 {statistics.median(pauses):.0f} ms, p99 "
            f"{percentile(pauses, 0.99):.0f} ms, longest {max(pauses)} ms"
        )
        good = good and row["ok"] and (name != "time" or row["effective"] >= 0.95)
        for who in ("rank", "tfdistrun"):
            found = {what: _growth(row["samples"], who, what) for what in
                     ("memory_mb", "descriptors", "threads")}  # fmt: skip
            shown = ", ".join(f"{k} {a:g} → {b:g}" for k, (a, b) in found.items())
            print(f"  {who}: {shown}")
            for what, (before, after) in found.items():
                good = good and after - before <= (what == "memory_mb") * GROWTH_MB
    return good


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", choices=[[], *RUNS], help="default: all")
    parser.add_argument("--table", action="store_true", help="print the record")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]) else 1
    record = Record(RECORD, CODE)
    for name in options.runs or RUNS:
        if name not in record.rows:
            record.rows[name] = trial(*RUNS[name])
            record.save()
    return 0 if table(record.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
