"""A study: a published claim, the trainings that test it, and their verdict."""

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import training
from training import Setting

import tfdist

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "reproductions"
SEEDS = 5
RANKS_TIMEOUT_S = 1800
# 97.5 % quantiles of Student's t distribution, by the number of values.
_STUDENT_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
Curves = Mapping[str, Sequence[Sequence[float]]]  # by setting: of each seed, each epoch


class Interval(NamedTuple):
    """The mean of several seeds, and half of its 95 % confidence interval."""

    mean: float
    half: float | None  # of one seed: unknown

    def __str__(self) -> str:
        if self.half is None:
            return f"{100 * self.mean:.1f}"
        return f"{100 * self.mean:.1f} ± {100 * self.half:.1f}"


class Check(NamedTuple):
    """Part of a mark: what has to hold, what was found, and whether it holds."""

    text: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Study:
    """A published claim, and how it is tested.

    Attributes:
        name: name of the script.
        title: what it is about.
        claim: the claim.
        source: where it was published.
        workload: network, data, and numbers.
        settings: the trainings, by a short description.
        judge: function that compares the mean accuracies, by setting, with the mark.
        confirmed: the setting that is repeated with real ranks.
    """

    name: str
    title: str
    claim: str
    source: str
    workload: str
    settings: Mapping[str, Setting]
    judge: Callable[[Mapping[str, float]], list[Check]]
    confirmed: str


@dataclasses.dataclass
class Result:
    """The accuracies of a study.

    Attributes:
        curves: test accuracies with simulated ranks.
        on_ranks: those of the confirmed setting with real ranks, of the first seed;
            None if it was not run.
    """

    curves: dict[str, list[list[float]]]
    on_ranks: list[float] | None


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of at most 8 values, and half of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None)
    spread = statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, _STUDENT_T[len(values)] * spread)


def last_of(curves: Curves) -> dict[str, Interval]:
    """Returns the accuracy after the last epoch, by setting."""
    return {
        setting: interval([curve[-1] for curve in seeds])
        for setting, seeds in curves.items()
    }


def checks_of(study: Study, result: Result) -> list[Check]:
    """Returns all parts of the mark of a study, for its result."""
    found = study.judge({s: one.mean for s, one in last_of(result.curves).items()})
    if result.on_ranks is not None:
        lowest = min(curve[-1] for curve in result.curves[study.confirmed])
        accuracy = result.on_ranks[-1]
        text = (
            f"{study.confirmed}, on real ranks: at most 2 points below the simulated "
            f"ones ({100 * lowest:.1f} or more)"
        )
        found.append(Check(text, f"{100 * accuracy:.1f}", accuracy >= lowest - 0.02))
    return found


def code_hash(study: Study) -> str:
    """Returns a hash of the code that the accuracies of a study depend on."""
    names = ("digits", "networks", "training", study.name)
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    files += (ROOT / "tfdist").rglob("*.py")
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run(
    study: Study,
    *,
    seeds: int = SEEDS,
    with_ranks: bool = True,
    folder: Path = RESULTS,
    say: Callable[[str], object] = print,
) -> Result:
    """Runs the trainings of a study that have not been run with this code.

    Args:
        study: the study.
        seeds: number of simulated trainings of each setting, at most 8.
        with_ranks: whether to repeat one of them with real ranks.
        folder: where the results are kept.
        say: function that shows a line of progress.
    """
    file = folder / f"{study.name}.json"
    known = _read(file, code_hash(study))
    for label, setting in study.settings.items():
        curves = known["curves"].setdefault(label, [])
        for seed in range(len(curves), seeds):
            curves.append(training.simulate(setting, seed))
            _write(file, known)
            say(f"{study.name}: {label}, seed {seed}: {100 * curves[-1][-1]:.1f} %")
    if with_ranks and known["on_ranks"] is None:
        known["on_ranks"] = _launch(study)
        _write(file, known)
        accuracy = 100 * known["on_ranks"][-1]
        say(f"{study.name}: {study.confirmed}, real ranks: {accuracy:.1f} %")
    curves = {label: known["curves"][label][:seeds] for label in study.settings}
    return Result(curves, known["on_ranks"] if with_ranks else None)


def _read(file: Path, code: str) -> dict[str, Any]:
    """Returns the results that the code with this hash has had."""
    own = {"code": code, "curves": {}, "on_ranks": None}
    if file.exists():
        known = json.loads(file.read_text())
        if known["code"] == code:
            return known
    return own


def _write(file: Path, known: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(known) + "\n")
    new.replace(file)


def _launch(study: Study) -> list[float]:
    """Runs a job of real ranks; returns the test accuracy of each epoch.

    Raises:
        RuntimeError: the job failed.
    """
    ranks = study.settings[study.confirmed].ranks
    script = Path(__file__).with_name(f"{study.name}.py")
    launcher = Path(sys.executable).with_name("tfdistrun")
    done = subprocess.run(
        [
            *(str(launcher), "-np", str(ranks), sys.executable, str(script)),
            "--on-ranks",
        ],
        capture_output=True,
        text=True,
        timeout=RANKS_TIMEOUT_S,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{study.name} failed on {ranks} ranks:\n{done.stderr}")
    [line] = [one for one in done.stdout.splitlines() if "accuracies:" in one]
    return json.loads(line.partition("accuracies:")[2])


def main(study: Study) -> None:
    """Runs a study from the command line, and prints its result."""
    parser = argparse.ArgumentParser(description=study.claim)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, and no real ranks"
    )
    parser.add_argument("--on-ranks", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.on_ranks:
        tfdist.init()
        curve = training.train_on_ranks(study.settings[study.confirmed], seed=0)
        if tfdist.rank() == 0:
            print(f"accuracies: {json.dumps(curve)}", flush=True)
        return
    if flags.quick:
        result = run(study, seeds=1, with_ranks=False)
    else:
        result = run(study)
    print(as_text(study, result))


def as_text(study: Study, result: Result) -> str:
    """Returns the result of a study as lines of text."""
    lines = [f"{study.title}: {study.claim}", f"Workload: {study.workload}"]
    for label, accuracy in last_of(result.curves).items():
        lines.append(f"  {label:40} {accuracy} %")
    for check in checks_of(study, result):
        verdict = "holds" if check.holds else "DOES NOT HOLD"
        lines.append(f"  {check.text}: {check.found}: {verdict}")
    return "\n".join(lines)
