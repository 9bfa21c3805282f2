"""The command line of tfdistrun."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tfdist import __version__, _core
from tfdist.launch import limits, output, process, report, tree
from tfdist.launch.supervisor import Outcome, Signals, Supervisor
from tfdist.rendezvous import auth
from tfdist.rendezvous.environment import LAUNCHER_JOB, detect
from tfdist.rendezvous.report import PREFIX
from tfdist.rendezvous.secret import keep_in_memory
from tfdist.rendezvous.store import StoreThread

_USAGE_ERROR = 2
_DESCRIPTION = """\
Starts COMMAND N times on this host, as the N ranks of one job.

Each rank finds its place in TFDIST_RANK and TFDIST_SIZE; tfdist.init() reads them. The
output of all ranks is merged, with the rank's name in front of each line, and kept in
one file a rank. When a rank fails the others are ended, the first failure is explained,
and its exit code returned (128 + N for signal N)."""
_EPILOG = """\
examples:
  tfdistrun -np 2 python train.py --epochs 3
  tfdistrun -np 4 --env TF_CPP_MIN_LOG_LEVEL=2 python train.py

The ranks get no standard input. Standard output of rank 0 is a terminal when that of
tfdistrun is one, so that its progress bar moves; the other ranks write to pipes.
SIGINT, SIGTERM and SIGHUP are passed on; the ranks then have 25 s. A second one kills.
More than one host: start the ranks with mpirun or srun (docs/troubleshooting.md)."""
_FOREIGN = {
    ("-H", "-host", "--host", "--hosts", "-hostfile", "--hostfile", "-f"): (
        "tfdistrun starts ranks on this host only; for several hosts use mpirun or srun"
    ),
    ("-x", "-genv", "-env"): "to set a variable for all ranks use --env NAME=VALUE",
    ("--nproc_per_node", "--nproc-per-node"): "the number of ranks is -np N",
    ("--nnodes", "--node_rank", "--node-rank", "--master_addr", "--master_port"): (
        "tfdistrun starts ranks on this host only; for several hosts use mpirun or srun"
    ),
    ("--oversubscribe", "--allow-run-as-root", "--bind-to", "--map-by"): (
        "that is an option of Open MPI's mpirun, which tfdistrun does not need"
    ),
}


class _Foreign(argparse.Action):
    """An option of another launcher: says what to use instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        del namespace, values
        parser.error(f"{option_string}: {self.const}")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(
            f"expected a number from 1 to 4096, got {text}"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 3600.0:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to 3600, got {text}")
    return value


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def parser() -> argparse.ArgumentParser:
    """The options of tfdistrun."""
    made = argparse.ArgumentParser(
        prog="tfdistrun",
        usage="tfdistrun -np N [options] COMMAND [ARGUMENT...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"tfdist {__version__}")
    made.add_argument(
        "-np",
        "-n",
        "--np",
        dest="size",
        type=_count,
        required=True,
        metavar="N",
        help="number of ranks",
    )
    made.add_argument(
        "--env",
        action="append",
        default=[],
        type=_assignment,
        metavar="NAME=VALUE",
        help="variable for all ranks; may be given several times",
    )
    made.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder of the ranks' output, one file each (default: TFDIST_LOG_DIR, or "
        "tfdist-logs/<time>-<process>)",
    )
    made.add_argument(
        "--grace-s",
        type=_seconds,
        default=3.0,
        metavar="S",
        help="seconds from the first failure until the other ranks are ended "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--timestamps", action="store_true", help="the time in front of each line"
    )
    made.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="program and its arguments",
    )
    for names, advice in _FOREIGN.items():
        made.add_argument(
            *names, action=_Foreign, nargs="?", const=advice, help=argparse.SUPPRESS
        )
    return made


@dataclass
class _Streams:
    """This process's own standard output and error."""

    stdout: output.Screen
    stderr: output.Screen

    @classmethod
    def own(cls) -> _Streams:
        out = output.Sink(sys.stdout.buffer, is_terminal=sys.stdout.isatty())
        err = output.Sink(sys.stderr.buffer, is_terminal=sys.stderr.isatty())
        screen = output.Screen(out)
        # On one terminal both share the line at the bottom.
        shared = out.is_terminal and err.is_terminal
        return cls(screen, screen if shared else output.Screen(err))


def complain(*lines: str) -> None:
    """Writes to standard error, in the name of tfdistrun."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    for line in lines:
        style = "" if line.startswith("  | ") else "bold red"
        console.print(f"tfdistrun: {line}", style=style if console.is_terminal else "")


def _checked_command(command: list[str]) -> list[str]:
    """The command without a leading "--", when it can be started.

    Raises:
        SystemExit: with 127, as a shell would.
    """
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        complain("COMMAND is missing; e.g. `tfdistrun -np 2 python train.py`")
        raise SystemExit(_USAGE_ERROR)
    if shutil.which(command[0]) is None:
        advice = "is it installed, and its environment active?"
        if command[0].endswith(".py") and Path(command[0]).is_file():
            advice = f"did you mean `python {command[0]}`?"
        complain(f"{command[0]}: command not found; {advice}")
        raise SystemExit(127)
    return command


def _check_machine(size: int) -> None:
    """Reports settings and limits that cannot work before anything starts.

    Raises:
        SystemExit: with 2.
    """
    try:
        outer = detect(os.environ)
        if outer.size > 1:
            raise _core.CoreError(
                _core.INVALID_ARGUMENT,
                f"this is already rank {outer.rank} of {outer.size} "
                f"({outer.variables}); start tfdistrun once, outside of it, or unset "
                "these variables",
            )
        shm_bytes = 0
        if _core.LIBRARY_PATH.is_file():
            transport = _core.config()["TFDIST_TRANSPORT"]["value"]
            shm_bytes = 0 if transport == "tcp" else _core.shm_bytes()
    except _core.CoreError as error:
        complain(error.message)
        raise SystemExit(_USAGE_ERROR) from None
    found = limits.check(size, shm_bytes=shm_bytes)
    for warning in found.warnings:
        complain(f"warning: {warning}")
    if found.errors:
        complain(*found.errors)
        raise SystemExit(_USAGE_ERROR)


def _rank_environ(rank: int, size: int, common: dict[str, str]) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",  # else the last lines of a killed rank are lost
        **os.environ,
        **common,
        "TFDIST_RANK": str(rank),
        "TFDIST_SIZE": str(size),
        "TFDIST_LOCAL_RANK": str(rank),
        "TFDIST_LOCAL_SIZE": str(size),
        "TFDIST_CROSS_RANK": "0",
        "TFDIST_CROSS_SIZE": "1",
    }


@contextlib.contextmanager
def _rendezvous(job: str) -> Iterator[tuple[StoreThread, dict[str, str]]]:
    """The store of the job, and the variables by which ranks find it."""
    secret = auth.new_secret()
    fd, path = keep_in_memory(secret)
    store = StoreThread(secret, job=job)
    store.start()
    try:
        yield (
            store,
            {
                "TFDIST_RENDEZVOUS": store.address,
                "TFDIST_SECRET_FILE": path,
                "TFDIST_JOB_ID": job,
            },
        )
    finally:
        store.close()
        os.close(fd)


def _told(store: StoreThread) -> dict[int, dict[str, Any]]:
    """What the ranks reported, by rank."""
    return {int(told["rank"]): told for told in store.values(PREFIX).values()}


def _start_rank(
    rank: int,
    options: argparse.Namespace,
    environ: dict[str, str],
    streams: _Streams,
    log: BinaryIO,
) -> tuple[
    process.RankProcess, output.RankOutput, output.StreamMerger, output.StreamMerger
]:
    own = output.RankOutput(rank, options.size, log, options.timestamps)
    color = streams.stdout.sink.is_terminal and "NO_COLOR" not in os.environ
    columns = None
    if rank == 0 and streams.stdout.sink.is_terminal:
        columns = shutil.get_terminal_size().columns - len(own.prefix(color=False))
    started = process.start(rank, options.command, environ, terminal_columns=columns)
    return (
        started,
        own,
        output.StreamMerger(own, streams.stdout, color=color),
        output.StreamMerger(own, streams.stderr, color=color),
    )


def _run_job(options: argparse.Namespace, folder: Path) -> Outcome:
    """Starts all ranks, watches them to the end, leaves nothing behind."""
    job = f"{LAUNCHER_JOB}{os.getpid()}:{secrets.token_hex(8)}"
    streams = _Streams.own()
    signals = Signals()
    tree.adopt_orphans()
    guard = tree.Guard(job)
    try:
        with contextlib.ExitStack() as stack:
            store, found = stack.enter_context(_rendezvous(job))
            supervisor = Supervisor(
                job=job,
                spare=guard.pid,
                grace_s=options.grace_s,
                told=lambda: _told(store),
                sinks=[streams.stdout.sink, streams.stderr.sink],
            )
            for rank in range(options.size):
                log = stack.enter_context(
                    open(folder / f"rank-{rank}.log", "ab", buffering=0)
                )
                environ = _rank_environ(rank, options.size, found)
                supervisor.add(*_start_rank(rank, options, environ, streams, log))
            return supervisor.run(signals)
    finally:
        left = tree.kill_all(job, spare=guard.pid)
        guard.dismiss()
        signals.close()
        if left:
            complain(f"these processes cannot be ended: {left}")


def _conclude(outcome: Outcome, started_s: float, folder: Path) -> int:
    """Explains a failure; returns the exit code of tfdistrun."""
    first = report.first_failure(outcome.ends)
    if outcome.signal is not None:
        name = report.signal_name(outcome.signal)
        complain(f"ended by {name}; output: {folder}")
        forwarded = (0, -outcome.signal, 128 + outcome.signal)
        if first is None or first.code in forwarded:
            clean = all(end.code == 0 for end in outcome.ends)
            return 0 if clean else 128 + outcome.signal
    if first is None:
        return 0
    complain(
        *report.explain(
            first,
            outcome.ends,
            host=socket.gethostname(),
            started_s=started_s,
            log=folder / f"rank-{first.rank}.log",
        )
    )
    return first.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs tfdistrun; returns its exit code."""
    logging.basicConfig(format="tfdistrun: warning: %(message)s")
    options = parser().parse_args(arguments)
    options.command = _checked_command(options.command)
    os.environ.update(options.env)
    _check_machine(options.size)
    started_s = time.monotonic()
    try:
        folder = output.log_folder(options.log_dir or os.environ.get("TFDIST_LOG_DIR"))
        outcome = _run_job(options, folder)
    except OSError as error:
        complain(f"cannot start the ranks: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return _conclude(outcome, started_s, folder)
