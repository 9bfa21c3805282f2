"""Sends SIGTERM at random instants of a training, and looks at what it leaves.

    python tests/campaign/signals.py                # what today's code has no record of
    python tests/campaign/signals.py --trials 4     # fewer
    python tests/campaign/signals.py --table        # the table of the record

Each trial trains on two ranks (`signal_program`). Its phase is the next one of
`PHASES`; the instant in it, and who gets the signal, follow from the seed. It is right
when the ranks end with the exit code of the signal and leave one newest checkpoint,
whole, with the weights of the last step that the ranks did, or of the start. A later
run continues the record, signals.json. Exit status 0: all are right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import keras  # noqa: E402
from campaign import signal_program  # noqa: E402
from helpers.launcher import until  # noqa: E402
from helpers.ranks import run_ranks  # noqa: E402
from helpers.record import Record  # noqa: E402

RECORD = HERE / "signals.json"
CODE = (
    "tfdist/callbacks/stop_on_signal.py", "tests/campaign/signals.py",
    "tests/campaign/signal_program.py",
)  # fmt: skip
TRIALS = 50
SIZE = 2
BEGIN_S, END_S = 120.0, 240.0  # until a phase begins, and all has ended
EXIT_CODE = 128 + signal.SIGTERM
# How long a phase goes on after its mark, in which the signal comes.
PHASES: Mapping[str, float] = {
    "start": 0.5,
    "tracing": 0.7,
    "steps": 1.0,
    "validation": 1.2,
    "save": 0.6,
}


def trial(seed: int) -> dict[str, Any]:
    """Runs one training; returns when which ranks got the signal, and any fault."""
    draw = random.Random(seed)
    phase = list(PHASES)[seed % len(PHASES)]
    # Training and validation are traced once each; every epoch has one of the others.
    count = {"start": 1, "tracing": draw.randint(1, 2)}.get(phase, draw.randint(1, 3))
    delay_s = draw.uniform(0.0, PHASES[phase])
    receivers = draw.choice([[0, 1], [0, 1], [0], [1]])
    with tempfile.TemporaryDirectory(prefix="tfdist-signals-") as name:
        folder = Path(name)
        # Only the rank that saves marks it.
        markers = [0] if phase == "save" else range(SIZE)
        marks = [folder / f"{phase}-{rank}-{count}" for rank in markers]
        sent: list[float] = []
        sender = threading.Thread(
            target=send, args=(folder, marks, delay_s, receivers, sent), daemon=True
        )
        sender.start()
        results = run_ranks(signal_program.train, SIZE, name, timeout_s=END_S)
        ended_s = time.monotonic()
        sender.join(1.0)
        why = wrong_with(folder, [code for code, _ in results])
    return {
        "phase": f"{phase} {count}",
        "to": receivers,
        "seconds": round(ended_s - sent[0], 2),
        "said": results[0][1],
        "ok": not why,
        "why": why,
    }


def send(
    folder: Path,
    marks: Sequence[Path],
    delay_s: float,
    receivers: Sequence[int],
    sent: list[float],
) -> None:
    """Waits for all marks, and the delay, then sends; notes the time."""
    until(lambda: all(map(Path.exists, marks)), BEGIN_S)
    time.sleep(delay_s)
    sent.append(time.monotonic())
    for rank in receivers:
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGTERM)


def wrong_with(folder: Path, codes: Sequence[Any]) -> str:
    """The fault of a training that has ended; "" if there is none."""
    if list(codes) != [EXIT_CODE] * SIZE:
        return f"exit codes {codes}"
    if left := list(folder.glob(".partial-*")):
        return f"left: {left}"
    last = [
        (folder / f"steps-{rank}").read_text().splitlines()[-1] for rank in range(SIZE)
    ]
    if len(set(last)) > 1:
        return f"the ranks ended at {last}"
    step, weights = last[0].split()
    files = {
        int(file.stem.rpartition("-")[2]): file
        for file in folder.glob("checkpoint-*.keras")
    }
    if not files or max(files) != int(step):
        return f"step {step} was done, checkpoints of {sorted(files)}"
    model = keras.saving.load_model(files[int(step)])
    if int(model.optimizer.iterations) != int(step):
        return f"step {step} was done, {int(model.optimizer.iterations)} is saved"
    if signal_program.digest(model) != weights:
        return f"the weights of step {step} are not those that were saved"
    return ""


def table(rows: list[dict[str, Any]]) -> bool:
    """Prints how often each phase was right; True when all were."""
    for phase in PHASES:
        own = [row for row in rows if row["phase"].startswith(phase)]
        longest_s = max((row.get("seconds", 0.0) for row in own), default=0.0)
        right = sum(row["ok"] for row in own)
        print(f"{phase:11} {right} of {len(own)}, ended within {longest_s:.1f} s")
    right = sum(row["ok"] for row in rows)
    print(f"all         {right} of {len(rows)}")
    for row in rows:
        if not row["ok"]:
            print(f"    seed {row['seed']}, {row['phase']}: {row['why']}")
    return right == len(rows) >= TRIALS


def main() -> int:
    """Runs what is missing; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=TRIALS, help="fewer, or more")
    parser.add_argument("--table", action="store_true", help="print the record")
    options = parser.parse_args()
    if options.table:
        return 0 if table(json.loads(RECORD.read_text())["rows"]["signals"]) else 1
    record = Record(RECORD, CODE)
    rows = record.rows.setdefault("signals", [])
    for seed in range(len(rows), options.trials):
        try:
            row = trial(seed)
        except AssertionError as error:
            row = {"phase": "", "ok": False, "why": str(error)[-300:]}
        rows.append({"seed": seed, **row})
        record.save()
        print(rows[-1], flush=True)
    return 0 if table(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
