"""Runs each script on two ranks under tfdist and under Horovod, and compares losses."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from benchmarks.horovod_scripts import curves
from benchmarks.horovod_scripts.curves import Case, Curves, Result
from benchmarks.peers import catalogue, trial
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.machine import ROOT

SCRIPTS = ROOT / "tests" / "integration" / "horovod_scripts"
RANKS = 2
OURS = Peer("tfdist", "", "tfdistrun", {}, options=("--horovod",))
HOROVODS = [name for name in catalogue.PEERS if name.startswith("hvd-")]


class RunError(Exception):
    """A run of a script failed or timed out; holds its last lines of output."""


def with_digits(peer: Peer, folder: Path) -> Peer:
    """Returns `peer` with the data files of this Python's scikit-learn on its path.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    places = found.submodule_search_locations if found else None
    if not places:
        raise ValueError(
            "Expected scikit-learn, for one of its data files; it is not installed. "
            "Run: pip install --no-deps scikit-learn"
        )
    package = folder / "sklearn"
    package.mkdir()
    (package / "datasets").symlink_to(Path(places[0], "datasets"))
    return replace(peer, environ={**peer.environ, "PYTHONPATH": str(folder)})


def losses(peer: Peer, case: Case, timeout_s: float) -> Curves:
    """Runs a script on `RANKS` ranks.

    Raises:
        RunError: it fails, or does not end in `timeout_s` seconds.
    """
    own = [str(peer.python), str(SCRIPTS / f"{case.name}.py"), *case.arguments]
    with tempfile.TemporaryDirectory(prefix="tfdist-script-") as name:
        folder = Path(name)
        left = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
        with (folder / "log").open("w+") as log:
            starts = trial.launched(peer, own, RANKS, trial.free_ports(RANKS))
            code = trial.ended(peer, starts, folder, log, timeout_s)
            if code != 0 or not all(path.exists() for path in left):
                raise RunError(trial.failure(_by_ranks(log), code, timeout_s))
        return [json.loads(path.read_text())["loss"] for path in left]


def _by_ranks(log: TextIO) -> TextIO:
    """The errors of the ranks alone, without horovodrun's own after them."""
    log.seek(0)
    errors = [line for line in log if "<stderr>:" in line]
    return io.StringIO("".join(errors)) if errors else log


def _result(
    case: Case, theirs: Peer, timeout_s: float
) -> tuple[Result, dict[str, Curves]]:
    found: dict[str, Curves] = {}
    for peer in (OURS, theirs):
        try:
            found[peer.name] = losses(peer, case, timeout_s)
        except RunError as error:
            return curves.failed(case, f"under {peer.name}: {error}"), found
    return curves.compared(case, found[OURS.name], found[theirs.name]), found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.horovod_scripts",
        description="the losses of scripts for Horovod, under tfdist and Horovod",
    )
    parser.add_argument("--only", default="all", help="names, as in mnist_fit,gan")
    parser.add_argument("--horovod", choices=HOROVODS, default=HOROVODS[0])
    parser.add_argument("--timeout", type=float, default=240, help="seconds, each run")
    parser.add_argument(
        "--out", type=Path, help="JSON lines: all losses of each script"
    )
    return parser


def main() -> int:
    """0: all losses are the same; 1: some differ, or a run has failed."""
    parser = _parser()
    options = parser.parse_args()
    peer = catalogue.PEERS[options.horovod]
    if reason := peer.missing():
        parser.error(reason)
    results = []
    with tempfile.TemporaryDirectory(prefix="tfdist-digits-") as folder:
        try:
            cases = curves.chosen(options.only)
            theirs = with_digits(peer, Path(folder))
        except ValueError as error:
            parser.error(str(error))
        if options.out:
            options.out.write_text("")
        for case in cases:
            result, found = _result(case, theirs, options.timeout)
            print(f"{case.name}: {result.verdict}", flush=True)
            results.append(result)
            if options.out:
                with options.out.open("a") as file:
                    line = {**asdict(result), "curves": found}
                    file.write(json.dumps(line) + "\n")
    print(f"\n{curves.report(results)}")
    return int(any(result.verdict != curves.SAME for result in results))


if __name__ == "__main__":
    sys.exit(main())
