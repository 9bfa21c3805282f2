"""How start-up, messages, descriptors and memory grow with the number of ranks.

    python benchmarks/scale.py [--ranks 8 16 32 64 128 256] [--json report.json]

Forks core clients (no TensorFlow) on this machine. They start, agree on barriers,
reduce a few small tensors and leave. The script reads the counters of the kernel and
the engine, and its own clocks. Printed: a table, and for each column the exponent of
its growth, fitted in logarithms between the smallest and the largest number of ranks
above the limit of a full mesh. Elapsed times depend on what else the machine does;
"cpu" columns, the sum over all ranks, do so less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign.rank import Rank  # noqa: E402
from campaign.trial import Job  # noqa: E402
from helpers import core_client  # noqa: E402

from tfdist.core import native, runtime, world  # noqa: E402

BARRIERS = 100
STEPS = 2
ELEMENTS = 4096
LIMIT_S = 300.0
# Small segments: what counts here is how many there are.
ENVIRON = {"TFDIST_SHM_SLOTS": "2", "TFDIST_SEGMENT_BYTES": "4096"}
COLUMNS = {
    "start_s": "start s",
    "start_cpu_s": "start cpu s",
    "barriers_s": f"{BARRIERS} barr. s",
    "barriers_cpu_s": "barr. cpu s",
    "leader_messages": "leader msg",
    "rank_messages": "rank msg",
    "relayed": "relayed",
    "data_frames": "frames/step",
    "data_bytes": "bytes/step",
    "descriptors": "descriptors",
    "memory_mib": "memory MiB",
    "leave_s": "leave s",
}


def _descriptors() -> int:
    """Number of open descriptors, without pipes inherited from this program."""
    folder = "/proc/self/fd"
    found = 0
    for name in os.listdir(folder):
        try:
            found += not os.readlink(f"{folder}/{name}").startswith("pipe:")
        except OSError:  # the folder itself
            pass
    return found


def _memory_kib() -> int:
    """Private memory of this process, and its share of shared memory (PSS)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise KeyError("Pss")


def _program(pipe: int, seed: int, steps: int) -> None:
    """One rank."""
    del seed
    rank = Rank(pipe, 0, 0)
    clock = [(time.monotonic(), time.process_time())]

    def lap() -> tuple[float, float]:
        clock.append((time.monotonic(), time.process_time()))
        return clock[-1][0] - clock[-2][0], clock[-1][1] - clock[-2][1]

    base_kib = _memory_kib()
    lap()
    world.start()
    start_s, start_cpu_s = lap()
    rank.say("ready")
    core_client.barrier()  # all are there
    before = native.counters()
    lap()
    for _ in range(BARRIERS):
        core_client.barrier()
    barriers_s, barriers_cpu_s = lap()
    after = native.counters()
    for _ in range(steps):
        x = np.ones(ELEMENTS, dtype=np.float32)
        total = core_client.allreduce(x, name="x", timeout_s=LIMIT_S)
        if total[0] != runtime.size():
            raise ValueError("a wrong sum")
    links = native.counters()["links"]
    row = {
        "start_s": start_s,
        "start_cpu_s": start_cpu_s,
        "barriers_s": barriers_s,
        "barriers_cpu_s": barriers_cpu_s,
        "messages": after["negotiation_messages"] - before["negotiation_messages"],
        "relayed": after.get("overlay", {}).get("relayed", 0)
        - before.get("overlay", {}).get("relayed", 0),
        "data_frames": sum(link["data_frames_sent"] for link in links) / steps,
        "data_bytes": sum(link["data_bytes_sent"] for link in links) / steps,
        "descriptors": _descriptors(),
        "memory_kib": _memory_kib() - base_kib,
    }
    core_client.barrier()
    lap()
    world.shutdown()
    rank.say("end", **row, leave_s=lap()[0])


def _guarded(pipe: int, seed: int, steps: int) -> None:
    try:
        _program(pipe, seed, steps)
    except BaseException as error:
        Rank(pipe, 0, 0).say("bug", message=f"{type(error).__name__}: {error}")
        raise


def measure(size: int, environ: dict[str, str]) -> dict[str, Any]:
    """One row: the worst rank of each column, the sum of CPU times."""
    begin_s = time.monotonic()
    with Job(size, 1, {**ENVIRON, **environ}, steps=STEPS, program=_guarded) as job:
        late = job.wait("ready", range(size), LIMIT_S)
        start_s = time.monotonic() - begin_s
        late = late or job.wait("end", range(size), LIMIT_S)
        if late:
            raise RuntimeError(f"ranks {late} of {size} did not end")
        rows = [child.word("end") or {} for child in job.children]
    worst = {name: max(row[name] for row in rows) for name in rows[0] if name != "say"}
    return {
        "ranks": size,
        "start_s": round(start_s, 2),  # with the forks
        "start_cpu_s": round(sum(row["start_cpu_s"] for row in rows), 2),
        "barriers_s": round(worst["barriers_s"], 2),
        "barriers_cpu_s": round(sum(row["barriers_cpu_s"] for row in rows), 2),
        "leader_messages": round(rows[0]["messages"] / BARRIERS, 1),
        "rank_messages": round(max(r["messages"] for r in rows[1:]) / BARRIERS, 1),
        "relayed": round(worst["relayed"] / BARRIERS, 1),
        "data_frames": round(worst["data_frames"], 1),
        "data_bytes": round(worst["data_bytes"]),
        "descriptors": worst["descriptors"],
        "memory_mib": round(worst["memory_kib"] / 1024, 1),
        "leave_s": round(worst["leave_s"], 2),
    }


def exponent(rows: list[dict[str, Any]], column: str) -> str:
    """x in value ~ ranks^x, through the first and the last row."""
    first, last = rows[0], rows[-1]
    if not first[column] or not last[column]:
        return "-"
    growth = math.log(last[column] / first[column])
    return f"{growth / math.log(last['ranks'] / first['ranks']):.2f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = [8, 16, 32, 64, 128, 256]
    parser.add_argument("--ranks", type=int, nargs="+", default=sizes)
    parser.add_argument("--mesh", type=int, default=16, help="TFDIST_MESH_RANKS")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    environ = {"TFDIST_MESH_RANKS": str(options.mesh)}
    rows = []
    print("ranks  " + "  ".join(f"{title:>11}" for title in COLUMNS.values()))
    for size in sorted(options.ranks):
        rows.append(measure(size, environ))
        cells = "  ".join(f"{rows[-1][column]:11}" for column in COLUMNS)
        print(f"{size:5}  {cells}", flush=True)
    fitted = [row for row in rows if row["ranks"] > options.mesh]
    if len(fitted) > 1:
        cells = "  ".join(f"{exponent(fitted, column):>11}" for column in COLUMNS)
        print(f" ~ n^  {cells}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
