"""How start-up, messages, descriptors and memory grow with the number of ranks.

    python benchmarks/scale.py [--ranks 4 8 16 32 64] [--json report.json]

Forks core clients (no TensorFlow) on this machine, lets them make a few steps, and
reads what the kernel and the engine have counted. Printed: a table, and for each column
the exponent of its growth, fitted in logarithms between the smallest and the largest
number of ranks.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign.trial import Job  # noqa: E402

STEPS = 20
END_TIMEOUT_S = 120.0
# Small segments: 64 ranks of a full mesh have 4,032 directions of shared memory.
ENVIRON = {"TFDIST_SHM_SLOTS": "2", "TFDIST_SEGMENT_BYTES": "4096"}
COLUMNS = {
    "start_s": "start s",
    "descriptors": "descriptors",
    "memory_mib": "memory MiB",
    "frames": "frames/step",
    "bytes": "bytes/step",
}


def _status(pid: int, key: str) -> int:
    """A number of /proc/PID/status, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def measure(size: int) -> dict[str, Any]:
    """One row: the worst rank of each column."""
    begin_s = time.monotonic()
    with Job(size, 1, ENVIRON, steps=STEPS) as job:
        job.ready()
        start_s = time.monotonic() - begin_s
        pids = [child.pid for child in job.children]
        descriptors = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        memory_kib = max(_status(pid, "VmRSS") for pid in pids)
        late = job.wait("end", range(size), END_TIMEOUT_S)
        if late:
            raise RuntimeError(f"ranks {late} of {size} did not end")
        ends = [child.word("end") or {} for child in job.children]
    failed = [end["message"] for end in ends if end["code"] != 0]
    if failed:
        raise RuntimeError(f"{size} ranks: {failed[0]}")
    links = [end["counters"]["links"] for end in ends]
    frames = max(sum(link["data_frames_sent"] for link in row) for row in links)
    sent = max(sum(link["data_bytes_sent"] for link in row) for row in links)
    return {
        "ranks": size,
        "start_s": round(start_s, 2),
        "descriptors": descriptors,
        "memory_mib": round(memory_kib / 1024, 1),
        "frames": round(frames / STEPS, 1),
        "bytes": round(sent / STEPS),
    }


def exponent(rows: list[dict[str, Any]], column: str) -> float:
    """x in value ~ ranks^x, through the first and the last row."""
    first, last = rows[0], rows[-1]
    return math.log(last[column] / first[column]) / math.log(
        last["ranks"] / first["ranks"]
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    rows = []
    print("ranks  " + "  ".join(f"{title:>12}" for title in COLUMNS.values()))
    for size in sorted(options.ranks):
        rows.append(measure(size))
        cells = "  ".join(f"{rows[-1][column]:12}" for column in COLUMNS)
        print(f"{size:5}  {cells}", flush=True)
    if len(rows) > 1:
        cells = "  ".join(f"{exponent(rows, column):12.2f}" for column in COLUMNS)
        print(f"  ~ n^ {cells}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
