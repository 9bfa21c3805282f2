"""Kills, stops, cuts and starves jobs by the hundred, and counts what came of it.

    python tests/campaign/run.py                    # what today's code has no record of
    python tests/campaign/run.py --only kill        # one campaign
    python tests/campaign/run.py --table            # the table of the record

The ranks are core clients (no TensorFlow), forked from this process. The record,
results.json, names the hash of the code it was made with, and grows trial by trial: a
run that is broken off goes on where it was. Exit status 0: every mark is met.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from campaign import faults  # noqa: E402
from helpers.record import Record  # noqa: E402

RECORD = HERE / "results.json"
CODE = (
    "tfdist/core", "tfdist_ops",
    *(f"tests/campaign/{name}.py" for name in ("faults", "rank", "run", "trial")),
    "tests/helpers/core_client.py",
)  # fmt: skip


WHY_CHARACTERS = 300


@dataclass(frozen=True)
class Campaign:
    """`trials` runs of `trial(seed)`; 99 % detected within `p99_s`, if it is given."""

    trial: Callable[[int], dict[str, Any]]
    trials: int
    p99_s: float | None = None


CAMPAIGNS = {
    "kill": Campaign(faults.kill, 200, 0.3),
    "kill-gated": Campaign(faults.kill_gated, 200, 0.3),
    "stop": Campaign(faults.stop, 60, 2.0),
    "pause": Campaign(faults.pause, 20),
    "cut": Campaign(faults.cut, 40, 3.0),
    "overload": Campaign(functools.partial(faults.overload, seconds=60.0), 10),
}


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 1)  # ceiling
    return ordered[max(0, int(rank) - 1)]


def summary(name: str, rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """One line of the table, and whether the mark is met."""
    campaign = CAMPAIGNS[name]
    bad = [row for row in rows if not row["ok"]]
    hangs = sum(1 for row in rows if row.get("hang"))
    met = not bad and len(rows) >= campaign.trials
    text = f"{name:11} {len(rows):4} trials  {len(bad)} wrong  {hangs} hangs"
    times = [t for row in rows for t in row.get("detected_s", [])]
    if times:
        p50_ms, p99_ms = statistics.median(times) * 1e3, percentile(times, 0.99) * 1e3
        text += f"  detected p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms"
        if campaign.p99_s is not None:
            text += f" (mark {campaign.p99_s * 1e3:.0f})"
            met = met and p99_ms <= campaign.p99_s * 1e3
    if seconds := sum(row.get("seconds", 0.0) for row in rows):
        text += f"  {seconds:.0f} s"
    return f"{text}  {'met' if met else 'NOT MET'}", met


def table(record: dict[str, Any]) -> bool:
    """Prints the table; True when every mark is met."""
    print(f"code {record['tree']}")
    verdicts = []
    for name in CAMPAIGNS:
        line, met = summary(name, record["rows"].get(name, []))
        verdicts.append(met)
        print(line)
        for row in record["rows"].get(name, []):
            if not row["ok"]:
                print(f"    seed {row['seed']}: {row['why']}")
    return all(verdicts)


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(CAMPAIGNS), help="one campaign")
    parser.add_argument("--trials", type=int, help="fewer trials, for a quick look")
    parser.add_argument("--table", action="store_true", help="print the record")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())) else 1
    record = Record(RECORD, CODE)
    for name, campaign in CAMPAIGNS.items():
        if options.only and name != options.only:
            continue
        if name == "cut" and not faults.can_make_namespaces():
            print("cut: skipped, needs root and ip(8) for network namespaces")
            continue
        rows = record.rows.setdefault(name, [])
        begin_s = time.monotonic()
        for seed in range(len(rows), options.trials or campaign.trials):
            try:
                row = campaign.trial(seed)
            except AssertionError as error:
                row = {"ok": False, "why": str(error)}
            row["why"] = row.get("why", "")[:WHY_CHARACTERS]
            rows.append({"seed": seed, **row})
            record.save()
            if not row["ok"]:
                print(f"{name}: seed {seed}: {row['why']}", flush=True)
        took_s = time.monotonic() - begin_s
        print(f"{summary(name, rows)[0]}  (this run {took_s:.0f} s)", flush=True)
    return 0 if table({"tree": record.tree, "rows": record.rows}) else 1


if __name__ == "__main__":
    sys.exit(main())
