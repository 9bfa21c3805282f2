"""Options of tfdistrun, and checks of their values."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tfdist.core.version import __version__
from tfdist.launch.binding import KINDS
from tfdist.launch.hosts import Host, HostsError, parse_list, read_file
from tfdist.launch.remote import SSH_COMMAND
from tfdist.launch.signals import SIGNAL_GRACE_S

_DESCRIPTION = """\
Starts COMMAND N times, on this host or on several, as the N ranks of one job.

Each process gets its rank and the number of ranks in TFDIST_RANK and TFDIST_SIZE, which
tfdist.init() reads. The output of all ranks is merged, with the rank in front of each
line, and also written to one file per rank. When a rank fails, the others are killed;
tfdistrun then explains the first failure and returns its exit code (128 + N for signal
N)."""
_EPILOG = """\
examples:
  tfdistrun -np 2 python train.py --epochs 3
  tfdistrun -np 4 --env TF_CPP_MIN_LOG_LEVEL=2 python train.py
  tfdistrun -np 4 -H host1:2,host2:2 python train.py
  tfdistrun -np 4 --nnodes 2 --node-rank 0 --rdzv host1:29400 python train.py
  tfdistrun --horovod -np 2 train_with_horovod.py

The ranks have no standard input. If the standard output of tfdistrun is a terminal, the
standard output of rank 0 is too, and its progress bar is rewritten in place; the other
ranks write to pipes.

SIGINT, SIGTERM and SIGHUP are passed on to the ranks, which then have --signal-grace-s
seconds to exit. If a rank is a shell script that the signal kills, the programs that it
has started get the same time to exit. If a program handles the signal, its workers
(multiprocessing) do not get it. A second signal, at least a second later, kills the
job. SIGUSR1 and SIGUSR2 are passed on to the processes that have a handler for them,
and do not end the job.

After SIGTERM, all ranks of an elastic job (--min-np) end after the same step, and save
if the program does so (StopOnSignal in fit, on_preemption in a loop). The exit code is
then 143: start the job again. If only one rank receives SIGTERM, it leaves after a
step, and the others continue. See docs/preemption.md.

Ranks on other hosts are started through ssh, which must work without a password. They
run in the same folder and with the same python. TFDIST_*, PYTHONPATH and PATH are
passed on to them; for other environment variables, use -x. With --nnodes, you or a
batch system start tfdistrun on every host, without ssh. See docs/hosts.md and
docs/hosts-without-ssh.md."""
_HOST_TIMEOUT_S = 30.0
_NODES_TIMEOUT_S = 300.0  # a batch system may start the hosts at different times
DEFAULT_RESTARTS = 10
_FOREIGN = {
    ("-genv", "-env"): "to set a variable for all ranks, use -x NAME=VALUE",
    ("--nproc_per_node", "--nproc-per-node"): (
        "-np N is the number of ranks on all hosts together"
    ),
    (
        *("--master_addr", "--master-addr", "--master_port", "--master-port"),
        *("--rdzv-endpoint", "--rdzv_endpoint"),
    ): "give an address of the first host, and a port, with --rdzv HOST:PORT",
    ("--rdzv-backend", "--rdzv_backend", "--rdzv-id", "--rdzv_id"): "omit it",
    ("--oversubscribe", "--allow-run-as-root", "--map-by"): (
        "this is an option of Open MPI's mpirun, which tfdistrun does not need"
    ),
    ("-p", "--ssh-port", "-i", "--ssh-identity-file"): (
        "set options of ssh with --ssh-command 'ssh -p PORT -i FILE', or in "
        "~/.ssh/config"
    ),
    ("--network-interface", "--network-interfaces"): (
        "choose the network with TFDIST_ADDRESS: an address, a network or an interface"
    ),
    ("--min-num-proc",): "write --min-np N",
    ("--max-num-proc",): "write --max-np N",
    ("--reset-limit",): (
        "limit the number of processes that are started in place of lost ranks with "
        "--max-restarts N"
    ),
    ("--elastic-timeout",): (
        "omit it; an elastic job waits for replacements as long as any are starting"
    ),
    ("--slots-per-host",): (
        "omit it; the discovery script prints the slots of each host: host1:4"
    ),
    ("--blacklist-cooldown-range",): (
        "omit it; an elastic job uses a lost host again when the discovery script has "
        "stopped listing it, and lists it again"
    ),
}


class _Foreign(argparse.Action):
    """An option of another launcher; the parser's error says what to use instead."""

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


def _number_of_processes(text: str) -> int:
    if not text.isdecimal() or int(text) > 1000000:
        raise argparse.ArgumentTypeError(
            f"expected a number from 0 to 1000000, got {text}"
        )
    return int(text)


def seconds(text: str) -> float:
    """Returns the number of seconds, from 0 to 3600, in the text of an option."""
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


def _exported(text: str) -> tuple[str, str]:
    if "=" in text:
        return _assignment(text)
    if text not in os.environ:
        raise argparse.ArgumentTypeError(
            f"{text} is not set here; set it, or give the value: {text}=VALUE"
        )
    return text, os.environ[text]


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not words:
        raise argparse.ArgumentTypeError("expected a command, e.g. 'ssh -p 2222'")
    return words


def chosen_hosts(options: argparse.Namespace) -> list[Host]:
    """Returns the hosts of -H or --hostfile; an empty list without these options.

    Raises:
        HostsError: the hosts are malformed, or both options are given.
    """
    if options.hosts is not None and options.hostfile is not None:
        raise HostsError("give the hosts with -H or --hostfile, not both")
    if options.hostfile is not None:
        return read_file(options.hostfile)
    return [] if options.hosts is None else parse_list(options.hosts)


def ssh_command(options: argparse.Namespace) -> list[str]:
    """Returns the command that runs a shell line on another host: --ssh-command."""
    return options.ssh_command or _command(SSH_COMMAND)


def host_timeout_s(options: argparse.Namespace) -> float:
    """Returns the seconds within which all hosts must be ready (--host-timeout-s)."""
    given = options.host_timeout_s
    default_s = _HOST_TIMEOUT_S if options.nodes is None else _NODES_TIMEOUT_S
    return default_s if given is None else float(given)


def without_effect(options: argparse.Namespace) -> list[str]:
    """Returns options that have no effect if all ranks run on this host.

    Example:
        >>> from tfdist.launch.options import parser, without_effect
        >>> without_effect(parser().parse_args(["-np", "2", "--host-timeout-s", "9"]))
        ['--host-timeout-s']
    """
    given = {
        "--ssh-command": options.ssh_command,
        "--host-timeout-s": options.host_timeout_s,
    }
    return [name for name, value in given.items() if value is not None]


def elastic_error(options: argparse.Namespace) -> str | None:
    """Returns what is wrong with the options of an elastic job, or None.

    Example:
        >>> from tfdist.launch.options import elastic_error, parser
        >>> options = parser().parse_args(["-np", "2", "--min-np", "3"])
        >>> elastic_error(options)
        '--min-np 3 is more than -np 2: give at most -np'
    """
    if options.min_size is None:
        given = {
            "--max-restarts": options.max_restarts,
            "--spares": options.spares,
            "--max-np": options.max_size,
            "--host-discovery-script": options.discovery_script,
        }
        alone = [name for name, value in given.items() if value is not None]
        return (
            f"{alone[0]} has an effect only with --min-np N; add --min-np N"
            if alone
            else None
        )
    if options.min_size > options.size:
        return (
            f"--min-np {options.min_size} is more than -np {options.size}: give at "
            "most -np"
        )
    return _growth_error(options)


def _growth_error(options: argparse.Namespace) -> str | None:
    """Returns what is wrong with the options of a job that can grow, or None."""
    if options.discovery_script is not None:
        if options.hosts is not None or options.hostfile is not None:
            return (
                "--host-discovery-script lists the hosts and their slots, which -H and "
                "--hostfile would set too: omit these"
            )
    elif options.max_size is not None and options.max_size > options.size:
        return (
            f"--max-np {options.max_size} is more than -np {options.size}, but nothing "
            "says when the job may grow: add --host-discovery-script FILE, or start "
            f"with -np {options.max_size}"
        )
    if options.max_size is not None and options.max_size < options.size:
        return (
            f"--max-np {options.max_size} is less than -np {options.size}: give at "
            "least -np"
        )
    return None


def signal_grace_s(options: argparse.Namespace, environ: Mapping[str, str]) -> float:
    """Returns the seconds from a signal that ends the job until the ranks are killed.

    Args:
        options: options of the command line.
        environ: environment variables; TFDIST_SIGNAL_GRACE_S, if set, must be valid.

    Example:
        >>> from argparse import Namespace
        >>> from tfdist.launch.options import signal_grace_s
        >>> signal_grace_s(Namespace(signal_grace_s=None), {})
        25.0
    """
    if options.signal_grace_s is not None:
        return float(options.signal_grace_s)
    return float(environ.get("TFDIST_SIGNAL_GRACE_S") or SIGNAL_GRACE_S)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of tfdistrun's options."""
    made = argparse.ArgumentParser(
        prog="tfdistrun",
        usage="tfdistrun -np N [options] COMMAND [ARGUMENT...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"tfdist {__version__}")
    adders = (
        *(_add_ranks, _add_hosts, _add_nodes, _add_output, _add_limits),
        *(_add_elastic, _add_binding),
    )
    for add in adders:
        add(made)
    made.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="program to start, with its arguments",
    )
    for names, advice in _FOREIGN.items():
        made.add_argument(
            *names, action=_Foreign, nargs="?", const=advice, help=argparse.SUPPRESS
        )
    return made


def _add_ranks(made: argparse.ArgumentParser) -> None:
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
        "-x",
        "--env",
        dest="env",
        action="append",
        default=[],
        type=_exported,
        metavar="NAME[=VALUE]",
        help="environment variable to set for all ranks, on all hosts; without a "
        "value, its value here is used. May be given several times",
    )
    made.add_argument(
        "--horovod",
        action="store_true",
        help="run a program written for Horovod: `import horovod` loads tfdist, common "
        "names and arguments of Keras 2 work, HOROVOD_* variables are translated, and "
        "gradients that are not reduced raise an error. See docs/from-horovod.md",
    )


def _add_output(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--log-dir",
        metavar="DIR",
        help="folder for the output of the ranks, one file for each (default: "
        "TFDIST_LOG_DIR, or tfdist-logs/<time>-<process>)",
    )
    made.add_argument(
        "--timestamps",
        action="store_true",
        help="print the time at the start of each line of output",
    )


def _add_limits(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--grace-s",
        type=seconds,
        default=3.0,
        metavar="S",
        help="seconds from the first failure until the other ranks are killed "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--signal-grace-s",
        type=seconds,
        metavar="S",
        help="seconds from SIGINT, SIGTERM or SIGHUP until the ranks that are still "
        "running are killed; 0: at once. Must be enough for StopOnSignal, or a loop "
        "of an elastic job, to finish a step (or trace a function) and save. The same "
        "limit applies if only one rank of an elastic job gets SIGTERM (default: "
        f"TFDIST_SIGNAL_GRACE_S, or {SIGNAL_GRACE_S:g})",
    )


def _add_elastic(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--min-np",
        dest="min_size",
        type=_count,
        metavar="N",
        help="keep running when ranks are lost, and start a replacement for each. "
        "While fewer than N ranks are connected, the job waits. The program has to use "
        "tfdist.callbacks.Elastic in fit, loop over steps or batches of a "
        "tfdist.elastic.State, or use hvd.elastic.run. See docs/elastic.md",
    )
    made.add_argument(
        "--max-np",
        dest="max_size",
        type=_count,
        metavar="N",
        help="with --host-discovery-script: largest number of ranks (default: -np)",
    )
    made.add_argument(
        "--host-discovery-script",
        dest="discovery_script",
        metavar="FILE",
        help="with --min-np: executable file that prints a line `host:slots` for each "
        "host that the job may use, with the number of ranks that fit there. It is "
        "called every second. The job needs -np slots to start. It uses all listed "
        "slots up to --max-np, and grows, shrinks and moves with the list, down to "
        "--min-np ranks",
    )
    made.add_argument(
        "--max-restarts",
        type=_number_of_processes,
        metavar="N",
        help="with --min-np: largest number of processes that are started in place of "
        f"lost ranks (default: {DEFAULT_RESTARTS}). Replacements of ranks that "
        "left after SIGTERM or because they were slow do not count; with 0, such ranks "
        "are not replaced, except by a spare",
    )
    made.add_argument(
        "--spares",
        type=_number_of_processes,
        metavar="N",
        help="with --min-np: number of further processes that are kept ready to take "
        "the place of a lost rank at once (default: 0). Spares do not count as "
        "restarts, but the processes that are started in place of used spares do",
    )


def _add_binding(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--bind-to",
        "-bind-to",
        dest="bind_to",
        choices=KINDS,
        default=KINDS[0],
        help="processors that each rank may use: all of its host (none, the default); "
        "those of one core, NUMA node or socket (core, numa, socket); or an equal "
        "share (slice), which is best for TensorFlow on CPUs. See docs/binding.md",
    )
    made.add_argument(
        "--report-bindings",
        action="store_true",
        help="print the processors of each rank, and of the free slots of an elastic "
        "job, at the start",
    )


def _add_hosts(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "-H",
        "--hosts",
        "--host",
        dest="hosts",
        metavar="HOST:SLOTS,...",
        help="hosts, filled in this order, and the number of ranks on each (default: "
        "1); without hosts, all ranks run here",
    )
    made.add_argument(
        "--hostfile",
        "--machinefile",
        metavar="FILE",
        help="file that lists the hosts, one per line: `host slots=N` or `host:N`; # "
        "starts a comment",
    )
    made.add_argument(
        "--ssh-command",
        type=_command,
        metavar="COMMAND",
        help="command that runs a shell line on another host, called as COMMAND HOST "
        f"LINE (default: {SSH_COMMAND})",
    )
    made.add_argument(
        "--host-timeout-s",
        type=seconds,
        metavar="S",
        help="seconds within which every host must be ready to start its ranks "
        f"(default: {_HOST_TIMEOUT_S:g}, with --nnodes {_NODES_TIMEOUT_S:g})",
    )


def _add_nodes(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--nnodes",
        dest="nodes",
        type=_count,
        metavar="N",
        help="number of hosts; tfdistrun is started on each, with the same options. "
        "-np is the number of ranks on all of them together. TFDIST_SECRET_FILE has to "
        "name a file with the same 32 random bytes on every host. The host with "
        "--node-rank 0 shows and saves the output of all ranks",
    )
    made.add_argument(
        "--node-rank",
        "--node_rank",
        type=_number_of_processes,
        metavar="K",
        help="with --nnodes: number of this host, 0 on the first one (default: what a "
        "launcher has set, such as PET_NODE_RANK, SLURM_PROCID, RANK or "
        "JOB_COMPLETION_INDEX)",
    )
    made.add_argument(
        "--rdzv",
        metavar="HOST:PORT",
        help="with --nnodes: an address of the host with --node-rank 0 that the others "
        "can reach, and a port that is free there (default: what a launcher has set, "
        "such as MASTER_ADDR and MASTER_PORT, or TFDIST_RENDEZVOUS)",
    )
