"""Command line of `horovodrun`: every flag of Horovod's launcher."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tfdist.core.version import __version__
from tfdist.launch.horovod.variables import LEVELS

_DESCRIPTION = """\
Starts COMMAND on N ranks with the flags of Horovod's launcher. `tfdistrun --horovod`
does the same with fewer and clearer options. Flags that tfdist ignores are named in a
warning that says what to use instead."""


class _Remembers(argparse.Action):
    """Stores a value, and records in `given` that the flag was used.

    The record is needed because flags override the file of --config-file.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        setattr(namespace, self.dest, value)
        namespace.given = {**namespace.given, self.dest: option_string}


class _Collects(_Remembers):
    """Joins the values of a flag that is given several times, with commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Adds a value to the earlier ones."""
        before = getattr(namespace, self.dest)
        joined = f"{before},{values}" if before else values
        super().__call__(parser, namespace, joined, option_string)


def parser() -> argparse.ArgumentParser:
    """Returns a parser of all flags.

    The attribute `given` of the parsed options maps the name of each option on the
    command line to the flag as the user wrote it.
    """
    made = argparse.ArgumentParser(
        prog="horovodrun",
        usage="horovodrun -np N [options] COMMAND [ARGUMENT...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.set_defaults(given={})
    made.add_argument(
        "-v", "--version", action="version", version=f"tfdist {__version__}"
    )
    for add in (_job, _ssh, _tunable, _elastic, _records, _library, _logging, _hosts):
        add(made)
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return made


def _value(made: Any, *names: str, help: str, **options: Any) -> None:
    options = {"action": _Remembers, **options}
    made.add_argument(*names, default=None, help=help, **options)


def _switch(made: Any, *names: str, help: str, value: bool = True, dest: str) -> None:
    made.add_argument(
        *names,
        action=_Remembers,
        nargs=0,
        const=value,
        default=None,
        dest=dest,
        help=help,
    )


def _pair(made: Any, name: str, *, help: str, off_help: str | None = None) -> None:
    """Adds --name and --no-name."""
    dest = name.replace("-", "_")
    both = made.add_mutually_exclusive_group()
    _switch(both, f"--{name}", dest=dest, help=help)
    hidden = off_help or argparse.SUPPRESS
    _switch(both, f"--no-{name}", dest=dest, value=False, help=hidden)


def _job(made: argparse.ArgumentParser) -> None:
    _value(
        made,
        *("-np", "--num-proc"),
        dest="num_proc",
        type=int,
        metavar="N",
        help="number of ranks",
    )
    _switch(
        made,
        *("-cb", "--check-build"),
        dest="check_build",
        help="print what is available, and exit",
    )
    _switch(
        made,
        "--disable-cache",
        dest="disable_cache",
        help="ignored: there is no cache",
    )
    _value(
        made,
        "--start-timeout",
        type=int,
        metavar="S",
        help="seconds within which all ranks must have started (default: 120)",
    )
    _value(
        made,
        *("--network-interface", "--network-interfaces"),
        action=_Collects,
        dest="network_interfaces",
        metavar="NAME",
        help="network interface for traffic between hosts",
    )
    _value(
        made,
        "--output-filename",
        metavar="DIR",
        help="folder for the output of the ranks, one file for each",
    )
    _switch(
        made,
        "--verbose",
        dest="verbose",
        help="same as --log-level INFO, if no level is set",
    )
    _value(
        made,
        "--config-file",
        metavar="FILE",
        help="YAML file with parameters; flags take precedence",
    )


def _ssh(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("ssh")
    _value(group, "-p", "--ssh-port", type=int, help="port of the ssh servers")
    _value(
        group,
        *("-i", "--ssh-identity-file"),
        metavar="FILE",
        help="file with the private key",
    )


def _tunable(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("parameters")
    _value(
        group,
        "--fusion-threshold-mb",
        type=int,
        metavar="MIB",
        help="maximum size of fused tensors, in MiB; 0: no fusion",
    )
    _value(group, "--cycle-time-ms", type=float, metavar="MS", help="ignored")
    _value(group, "--cache-capacity", type=int, metavar="N", help="ignored")
    for what in ("hierarchical", "torus"):
        help = f"use the {what} algorithm for allreduce"
        _pair(group, f"{what}-allreduce", help=help)
    _pair(group, "hierarchical-allgather", help="ignored: tfdist chooses the algorithm")
    _pair(group, "autotune", help="ignored: use `tfdist bench --tune`")
    for name, kind in (
        ("log-file", str),
        ("warmup-samples", int),
        ("steps-per-sample", int),
        ("bayes-opt-max-samples", int),
        ("gaussian-process-noise", float),
    ):
        _value(group, f"--autotune-{name}", type=kind, help="ignored, like --autotune")


def _elastic(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("elastic training")
    _value(
        group,
        *("--min-np", "--min-num-proc"),
        dest="min_num_proc",
        type=int,
        metavar="N",
        help="keep running when ranks are lost; with fewer than N, wait for "
        "replacements",
    )
    _value(
        group,
        *("--max-np", "--max-num-proc"),
        dest="max_num_proc",
        type=int,
        metavar="N",
        help="with --host-discovery-script: largest number of ranks (default: -np)",
    )
    _value(
        group,
        "--reset-limit",
        type=int,
        metavar="N",
        help="maximum number of processes that are started in place of lost ranks",
    )
    _value(
        group,
        "--slots-per-host",
        type=int,
        metavar="N",
        help="ignored: the discovery script prints the slots, host:N",
    )
    _value(
        group,
        "--elastic-timeout",
        type=int,
        metavar="S",
        help="ignored: a replacement has 10 minutes to become ready",
    )
    _value(
        group,
        "--blacklist-cooldown-range",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="ignored: a lost host is used again when the discovery script has "
        "stopped listing it, and lists it again",
    )


def _records(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("timeline and stalls")
    _value(
        group,
        "--timeline-filename",
        metavar="PATH",
        help="write the timeline of all ranks to the folder PATH.d",
    )
    _pair(group, "timeline-mark-cycles", help="ignored: there are no cycles")
    both = group.add_mutually_exclusive_group()
    _switch(
        both,
        "--no-stall-check",
        dest="no_stall_check",
        help="do not warn about late ranks",
    )
    _switch(
        both,
        "--stall-check",
        dest="no_stall_check",
        value=False,
        help="warn about late ranks (the default)",
    )
    _value(
        group,
        "--stall-check-warning-time-seconds",
        type=int,
        metavar="S",
        help="seconds after which a warning names late ranks (default: 30)",
    )
    _value(
        group,
        "--stall-check-shutdown-time-seconds",
        type=int,
        metavar="S",
        help="raise an error after S seconds of waiting for late ranks (default: 300)",
    )


def _library(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("libraries")
    _pair(group, "mpi-threads-disable", help="ignored: MPI is not used")
    _value(
        group,
        "--mpi-args",
        metavar="TEXT",
        help="arguments for mpirun: -x NAME[=VALUE] and --bind-to are used, the "
        "others are ignored",
    )
    _switch(group, "--tcp", dest="tcp_flag", help="ignored: always used between hosts")
    _value(
        group,
        "--binding-args",
        metavar="TEXT",
        help="arguments for mpirun: --bind-to is used, the others are ignored",
    )
    _value(group, "--num-nccl-streams", type=int, metavar="N", help="ignored")
    _value(group, "--thread-affinity", type=int, metavar="CORE", help="ignored")
    _value(group, "--gloo-timeout-seconds", type=int, metavar="S", help="ignored")


def _logging(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("logging")
    _value(
        group,
        "--log-level",
        choices=[name.upper() for name in LEVELS],
        help="lowest severity of messages on stderr (default: WARNING)",
    )
    both = group.add_mutually_exclusive_group()
    dest = "log_with_timestamp"
    time = "print the time at the start of each line of output"
    _switch(both, "--log-with-timestamp", dest=dest, help=time)
    _switch(
        both, "--log-without-timestamp", dest=dest, value=False, help="print no time"
    )
    for name, value in (
        ("--log-hide-timestamp", False),
        ("--no-log-hide-timestamp", True),
    ):
        _switch(both, name, dest=dest, value=value, help=argparse.SUPPRESS)
    _switch(
        both,
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        dest="prefix_output_with_timestamp",
        help=time,
    )


def _hosts(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("hosts").add_mutually_exclusive_group()
    _value(
        group, "-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, filled in order"
    )
    _value(
        group,
        *("-hostfile", "--hostfile"),
        dest="hostfile",
        metavar="FILE",
        help="file that lists the hosts, one per line: `host slots=N`",
    )
    _value(
        group,
        "--host-discovery-script",
        metavar="FILE",
        help="executable file that prints the hosts that the job may use, `host:N`; "
        "the job grows, shrinks and moves with them",
    )
    group = made.add_argument_group("controllers").add_mutually_exclusive_group()
    for name in ("gloo", "mpi", "jsrun"):
        _switch(group, f"--{name}", dest=f"use_{name}", help="ignored")
