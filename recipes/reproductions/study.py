"""A study: a published claim, the training runs that test it, and their verdict."""

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

import keras
import tensorflow as tf

import tfdist

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "reproductions"
SEEDS = 5
RANKS_TIMEOUT_S = 1800
_FOUND = "found: "  # followed by the results of rank 0
# 97.5 % quantiles of Student's t distribution, by the number of values.
_STUDENT_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
Curves = Mapping[str, Sequence[Sequence[float]]]  # by name: the values of each seed


class Interval(NamedTuple):
    """The mean of several seeds, and half of its 95 % confidence interval."""

    mean: float
    half: float | None  # None for a single seed

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {self.half:.2g}"


class Check(NamedTuple):
    """A criterion.

    Attributes:
        text: the criterion in words.
        found: the measured value.
        holds: whether the criterion holds.
        is_of_ranks: whether the value was measured with real ranks.
    """

    text: str
    found: str
    holds: bool
    is_of_ranks: bool = False


@dataclasses.dataclass(frozen=True)
class Study:
    """A published claim, and how it is tested.

    Attributes:
        name: name of the script.
        title: the topic, as a heading.
        claim: the claim as a sentence.
        source: where it was published.
        workload: network, data, and hyperparameters.
        runs: functions by name; each takes a seed and returns a list of values, for
            example the accuracy of each epoch.
        judge: function that returns the criteria. It gets the means of the last values,
            by the name of the run, and the result of `on_ranks`, or None.
        ranks: number of real ranks.
        on_ranks: function that all ranks of a job call, after `tfdist.init()`; the
            numbers that rank 0 returns, by name, are kept.
        values: label of the y axis: what the values are, with their unit.
        order: label of the x axis.
        ticks: labels of the values on the x axis; default: their numbers, from 1.
    """

    name: str
    title: str
    claim: str
    source: str
    workload: str
    runs: Mapping[str, Callable[[int], list[float]]]
    judge: Callable[[Mapping[str, float], Mapping[str, float] | None], list[Check]]
    ranks: int
    on_ranks: Callable[[], dict[str, float]]
    values: str = "test accuracy, %"
    order: str = "epoch"
    ticks: tuple[str, ...] | None = None


@dataclasses.dataclass
class Result:
    """The values of a study.

    Attributes:
        curves: by the name of the run, the values of each seed.
        on_ranks: the numbers measured with real ranks; None without such a run.
    """

    curves: dict[str, list[list[float]]]
    on_ranks: dict[str, float] | None


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of at most 8 values, and half of its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None)
    spread = statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, _STUDENT_T[len(values)] * spread)


def last_of(curves: Curves) -> dict[str, Interval]:
    """Returns the interval of the last values of all seeds, by the name of the run."""
    return {
        name: interval([curve[-1] for curve in seeds]) for name, seeds in curves.items()
    }


def checks_of(study: Study, result: Result) -> list[Check]:
    """Returns the criteria of a study, for its result."""
    means = {name: one.mean for name, one in last_of(result.curves).items()}
    return study.judge(means, result.on_ranks)


def at_least(
    text: str, value: float, bound: float, unit: str = "", *, is_of_ranks: bool = False
) -> Check:
    """Returns the criterion that a value is at least a bound."""
    text = f"{text}: at least {bound:g}{unit}"
    return Check(text, f"{value:.4g}", value >= bound, is_of_ranks)


def at_most(
    text: str, value: float, bound: float, unit: str = "", *, is_of_ranks: bool = False
) -> Check:
    """Returns the criterion that a value is at most a bound."""
    text = f"{text}: at most {bound:g}{unit}"
    return Check(text, f"{value:.4g}", value <= bound, is_of_ranks)


def code_hash(study: Study) -> str:
    """Returns a hash of everything on which the values of a study depend.

    This is its code, the code of tfdist, and the versions of TensorFlow and Keras.
    """
    names = ("digits", "networks", "study", "training", study.name)
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    files += (ROOT / "tfdist").rglob("*.py")
    files += (f for f in (ROOT / "tfdist_ops").rglob("*") if f.suffix in (".cc", ".h"))
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}\n"
    digest = hashlib.sha256(versions.encode())
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
    log: Callable[[str], object] = print,
) -> Result:
    """Executes the runs of a study that have no results with this code yet.

    Args:
        study: the study.
        seeds: number of simulated runs of each setting, at most 8.
        with_ranks: whether to repeat one of them with real ranks.
        folder: where the results are kept.
        log: function that shows a line of progress.
    """
    file = folder / f"{study.name}.json"
    known = _read(file, code_hash(study))
    for name, function in study.runs.items():
        curves = known["curves"].setdefault(name, [])
        for seed in range(len(curves), seeds):
            curves.append(function(seed))
            _write(file, known)
            log(f"{study.name}: {name}, seed {seed}: {curves[-1][-1]:.4g}")
    if with_ranks and known["on_ranks"] is None:
        known["on_ranks"] = _launch(study)
        _write(file, known)
        log(f"{study.name}: {study.ranks} real ranks: {known['on_ranks']}")
    curves = {name: known["curves"][name][:seeds] for name in study.runs}
    return Result(curves, known["on_ranks"] if with_ranks else None)


def _read(file: Path, code: str) -> dict[str, Any]:
    """Returns the stored results of the code with this hash."""
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


def _launch(study: Study) -> dict[str, float]:
    """Runs a job of real ranks; returns the results of its rank 0.

    Raises:
        RuntimeError: the job failed.
    """
    script = Path(__file__).with_name(f"{study.name}.py")
    launcher = [str(Path(sys.executable).with_name("tfdistrun")), "-np"]
    done = subprocess.run(
        [*launcher, str(study.ranks), sys.executable, str(script), "--on-ranks"],
        capture_output=True,
        text=True,
        timeout=RANKS_TIMEOUT_S,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{study.name} failed on {study.ranks} ranks: {done.stderr}")
    [line] = [one for one in done.stdout.splitlines() if _FOUND in one]
    return json.loads(line.partition(_FOUND)[2])


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
        found = study.on_ranks()
        if tfdist.rank() == 0:
            print(f"{_FOUND}{json.dumps(found)}", flush=True)
        return
    seeds = 1 if flags.quick else SEEDS
    result = run(study, seeds=seeds, with_ranks=not flags.quick)
    print(as_text(study, result))
    if not all(check.holds for check in checks_of(study, result)):
        raise SystemExit(1)


def as_text(study: Study, result: Result) -> str:
    """Returns the result of a study as lines of text."""
    lines = [f"{study.title}: {study.claim}", f"Workload: {study.workload}."]
    lines += [f"{study.values}:"]
    for name, found in last_of(result.curves).items():
        lines.append(f"  {name:40} {found}")
    for name, number in (result.on_ranks or {}).items():
        lines.append(f"  {study.ranks} real ranks, {name}: {number:.4g}")
    for check in checks_of(study, result):
        verdict = "holds" if check.holds else "DOES NOT HOLD"
        lines.append(f"  {check.text}: {check.found}: {verdict}")
    return "\n".join(lines)
