"""`tfdist doctor`: checks this machine and starts the ranks, or runs as one of them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tfdist.core import native, runtime, world
from tfdist.core.rendezvous.environment import detect
from tfdist.launch import cli as tfdistrun
from tfdist.launch.options import seconds
from tfdist.tools.doctor import checks, trial
from tfdist.tools.doctor.finding import ERROR, OK, WARNING, Finding, worst

HELP = "find out what is wrong with a machine or a job, and how to fix it"
START_TIMEOUT_S = 10.0
_INTERRUPTED = 128 + signal.SIGINT
_EXAMPLES = """examples:
  tfdist doctor                                         this machine, with 2 ranks
  tfdist doctor -np 1                                   this machine, without ranks
  tfdistrun -np 4 -H host1:2,host2:2 tfdist doctor      all hosts of a job
  srun --mpi=pmi2 -N 16 tfdist doctor --failing-hosts bad.txt
                                                        then: srun -x ./bad.txt ...

The exit code is 0 without errors (there may be warnings), 1 with an error, and 2 for
invalid options."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser for the options of `tfdist doctor`."""
    arguments = argparse.ArgumentParser(
        prog="tfdist doctor",
        description=f"Checks to {HELP}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_argument(
        "-np",
        dest="size",
        type=_number,
        metavar="N",
        help="start N ranks on this machine (default: 2; not under a launcher)",
    )
    arguments.add_argument(
        "--seconds",
        type=seconds,
        default=20.0,
        metavar="S",
        help="minimum time in seconds for which the ranks reduce arrays (default: 20)",
    )
    arguments.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all findings as JSON"
    )
    arguments.add_argument(
        "--failing-hosts",
        type=Path,
        metavar="FILE",
        help="write the names of the hosts with an error, a low speed or a wrong clock",
    )
    return arguments


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"expected 1 to 4096 ranks, got {text!r}")
    return int(text)


class Report:
    """The findings of all checks, which are printed and written to files."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._found: list[tuple[str, Finding]] = []  # with the host

    def add(
        self, host: str, finding: Finding, *, named: bool, shown: bool = True
    ) -> None:
        """Adds a finding.

        Args:
            host: the host that was checked; "" for the job as a whole.
            finding: result of the check.
            named: whether the host is printed with the finding.
            shown: whether the finding is printed; otherwise it is only written to the
                files.
        """
        self._found.append((host, finding))
        if shown:
            print("\n".join(finding.lines(host if named else "")), flush=True)

    @property
    def level(self) -> str:
        """The highest level of all findings."""
        return worst([finding for _, finding in self._found])

    def end(self) -> int:
        """Prints the last line and writes the files; returns the exit code."""
        if path := self._options.json:
            rows = [{"host": host, **one.as_json()} for host, one in self._found]
            content = {"level": self.level, "findings": rows}
            path.write_text(json.dumps(content, indent=2) + "\n")
        failing = {
            host
            for host, one in self._found
            if host and (one.level == ERROR or one.check in trial.COMPARED)
        }
        if path := self._options.failing_hosts:
            path.write_text("".join(f"{host}\n" for host in sorted(failing)))
        count = sum(one.level == ERROR for _, one in self._found)
        warnings = sum(one.level == WARNING for _, one in self._found)
        print(
            "no problem was found"
            if self.level == OK
            else f"{count} error{'s' if count != 1 else ''}, "
            f"{warnings} warning{'s' if warnings != 1 else ''}"
        )
        return 1 if count else 0


def main(words: Sequence[str]) -> int:
    """Runs `tfdist doctor`; returns its exit code."""
    options = parser().parse_args(list(words))
    size = _size_of_job()
    if size > 1 and options.size not in (None, size):
        parser().error(f"-np was given on a rank of a job of {size} ranks; omit it")
    if size == 1 or detect(os.environ).rank == 0:
        for path in (options.json, options.failing_hosts):
            if path is not None and not _is_writable(path):
                parser().error(f"expected a file that can be written, got {path}")
    try:
        if size > 1:
            return _as_rank(options)
        return _alone(options, words)
    except KeyboardInterrupt:  # tfdistrun reports it
        return _INTERRUPTED


def _is_writable(path: Path) -> bool:
    if path.is_dir():
        return False
    return os.access(path if path.exists() else path.parent, os.W_OK)


def _size_of_job() -> int:
    try:
        return detect(os.environ).size
    except native.CoreError:
        return 1  # `checks.launcher` reports it


def _alone(options: Namespace, words: Sequence[str]) -> int:
    size = options.size or 2
    report, host = Report(options), trial.host_name()
    for finding in checks.machine(os.environ, size):
        report.add(host, finding, named=False)
    if report.level == ERROR or size == 1:
        return report.end()
    program = [sys.executable, "-m", "tfdist.tools", "doctor", *words]
    # tfdistrun shows the output of the ranks; its files are not needed.
    with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as folder:
        start = ["-np", str(size), "--log-dir", folder, "--", *program]
        return tfdistrun.main(start)


def _as_rank(options: Namespace) -> int:
    """Checks this rank's machine, and tries the collectives with the other ranks."""
    findings = checks.machine(os.environ, detect(os.environ).local_size or 1)
    report, host = Report(options), trial.host_name()
    try:
        if worst(findings) == ERROR:
            raise native.CoreError(
                native.INVALID_ARGUMENT, "this rank does not start: see above", {}
            )
        # A healthy job starts in a second. The variable can set a longer limit.
        is_set = os.environ.get("TFDIST_START_TIMEOUT_S")
        world.start(timeout_s=None if is_set else START_TIMEOUT_S)
        ranks_trial = trial.Trial(runtime.check_initialized())
        ranks = ranks_trial.exchange(findings)
        rates = ranks_trial.line_rates()
        sums = ranks_trial.sums(options.seconds)
    except native.CoreError as error:
        for finding in findings:
            report.add(host, finding, named=True, shown=finding.level != OK)
        report.add("", Finding("job", ERROR, error.message), named=False)
        return report.end() if detect(os.environ).rank == 0 else 1
    finally:
        world.shutdown()
    if ranks_trial.place.rank != 0:
        return 0
    for name, finding in trial.about_ranks(ranks):
        report.add(name, finding, named=True, shown=finding.level != OK)
    for finding in trial.about_lines(rates, ranks):
        report.add("", finding, named=False)
    report.add("", trial.about_sums(sums, ranks), named=False)
    return report.end()
