"""The command line of tfdistrun."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfdist.core import native
from tfdist.core.rendezvous import cluster_variables
from tfdist.core.rendezvous.child_processes import rank_above, without_rank
from tfdist.core.rendezvous.environment import check_working_folder, detect
from tfdist.core.rendezvous.placement import Placement
from tfdist.launch import binding, failure_summary, output, preflight
from tfdist.launch.command import program_from_stdin
from tfdist.launch.discovery import DiscoveryError, HostDiscovery
from tfdist.launch.horovod import mode, variables
from tfdist.launch.host_pool import HostsFailedError
from tfdist.launch.hosts import (
    Host,
    HostsError,
    Slot,
    mark_local,
    nodes,
    places,
    slots_of,
)
from tfdist.launch.job import Job, Plan
from tfdist.launch.nodes.join import join
from tfdist.launch.nodes.place import (
    NodePlace,
    NodesError,
    node_place,
    shared_secret,
    variables_to_remove,
)
from tfdist.launch.options import (
    chosen_hosts,
    elastic_error,
    host_timeout_s,
    parser,
    signal_grace_s,
    without_effect,
)
from tfdist.launch.outcome import Outcome
from tfdist.launch.output import complain
from tfdist.launch.signals import ENDING

_USAGE_ERROR = 2
_TENSORFLOW_BYTES = 200 << 20  # a process with TensorFlow uses at least this much


def _checked_command(command: list[str], *, here: bool) -> list[str]:
    """Returns the command without a leading "--", after checking that it can run.

    Args:
        command: the words that follow the options.
        here: whether ranks on this host run the command.

    Raises:
        SystemExit: with code 127, as in a shell, if the command is not found; with 2 if
            it is missing, or would read its program from standard input.
    """
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        complain("COMMAND is missing; e.g. `tfdistrun -np 2 python train.py`")
        raise SystemExit(_USAGE_ERROR)
    if here and shutil.which(command[0]) is None:
        advice = "is it installed, and is its environment active?"
        if command[0].endswith(".py") and Path(command[0]).is_file():
            advice = f"did you mean `python {command[0]}`?"
        complain(f"{command[0]}: command not found; {advice}")
        raise SystemExit(127)
    if interpreter := program_from_stdin(command):
        name = Path(interpreter).name
        complain(
            f"`{shlex.join(command)}` reads its program from standard input, which "
            f"ranks do not have. Write the program to a file: `{name} FILE`; or pass "
            f"it on the command line: `{name} -c 'PROGRAM'`"
        )
        raise SystemExit(_USAGE_ERROR)
    return command


def _plan(options: Namespace, others: Sequence[Host], *, can_change: bool) -> Plan:
    """Assigns the ranks to hosts, and the CPUs of this host to its ranks.

    Args:
        options: options of the command line.
        others: the hosts that the discovery script lists, or the hosts of --nnodes;
            empty without these options.
        can_change: whether hosts may be added while the job runs.

    Raises:
        SystemExit: with code 2.
    """
    most = options.max_size or options.size
    hosts = [Host("localhost", most, is_local=True)]
    try:
        if chosen := chosen_hosts(options):
            hosts = mark_local(chosen)
        hosts = list(others) or hosts
        ranks = places(hosts, options.size)
        slots = [Slot(place.host, place.local_rank) for place in ranks]
        if options.min_size is not None:
            slots = slots_of(hosts, most)
        bound = {
            number: binding.here(_parts(hosts, slots, number, most), options.bind_to)
            for number, host in enumerate(hosts)
            if host.is_local
        }
        return Plan(hosts, ranks, most, slots, bound, can_get_hosts=can_change)
    except (HostsError, binding.BindingError) as error:
        complain(str(error))
        raise SystemExit(_USAGE_ERROR) from None


def _parts(hosts: Sequence[Host], slots: Sequence[Slot], number: int, most: int) -> int:
    """Returns the number of slots that share the CPUs of host `number`.

    If it is the only host of the job, an elastic job can grow to `most` ranks there.
    """
    own = sum(slot.host == number for slot in slots)
    is_alone = len(hosts) == 1
    return most if is_alone and own < most else own


def _discover(options: Namespace) -> tuple[HostDiscovery | None, list[Host]]:
    """Runs the discovery script, if given, and sets the number of ranks.

    Returns:
        The discovery, and the hosts that the script lists; (None, []) without a script.

    Raises:
        SystemExit: with code 2, or with 128 + N after signal N.
    """
    if options.discovery_script is None:
        return None, []
    discovery = HostDiscovery(options.discovery_script)
    try:
        with _exit_on_signals(discovery.close):
            hosts = discovery.first_hosts()
    except DiscoveryError as error:
        wrong: str | None = str(error)
    else:
        slots = sum(host.slots for host in hosts)
        wrong = _slots_error(options, slots)
    if wrong is not None:
        complain(wrong)
        raise SystemExit(_USAGE_ERROR)
    options.max_size = options.max_size or options.size
    if (size := min(slots, options.max_size)) > options.size:
        is_only_here = len(hosts) == 1 and hosts[0].is_local
        who = "this host has" if is_only_here else "the hosts have"
        complain(f"{who} {slots} slots: the job starts with {size} ranks")
        options.size = size
    return discovery, hosts


@contextlib.contextmanager
def _exit_on_signals(cancel: Callable[[], None]) -> Iterator[None]:
    """Calls `cancel` on ending signals; raises SystemExit when the block has ended.

    An exception raised by the handler itself could come between the start of a process
    and the code that ends it.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        if len(received) == 1:
            cancel()

    previous = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            raise SystemExit(128 + received[0])


def _slots_error(options: Namespace, slots: int) -> str | None:
    """Returns what is wrong with the first answer of the discovery script, or None."""
    if slots >= options.size:
        return None
    return (
        f"{options.discovery_script} printed {slots} slot{'s' if slots > 1 else ''}, "
        f"but the job needs -np {options.size} to start: give a smaller -np, or start "
        "the job when more slots are free"
    )


def _node_place(options: Namespace) -> NodePlace | None:
    """Returns this host's place among the hosts of --nnodes; None without --nnodes.

    If another launcher has numbered the hosts, removes its environment variables.

    Raises:
        SystemExit: with code 2.
    """
    try:
        place = node_place(options, os.environ)
        if place is not None:
            for name in variables_to_remove(os.environ):
                del os.environ[name]
    except native.CoreError as error:
        complain(error.message)
        raise SystemExit(_USAGE_ERROR) from None
    return place


def _join(options: Namespace, place: NodePlace) -> int:
    """Runs the ranks of this host, for the tfdistrun on the first host of --nnodes."""
    environ = dict(options.env)
    if options.horovod:
        _prepare_horovod(options)
        environ["PYTHONPATH"] = dict(options.env)["PYTHONPATH"]
    # If the command is not found, the agent reports it to the first host.
    options.command = _checked_command(options.command, here=False)

    def work() -> int:
        if native.LIBRARY_PATH.is_file():
            native.config()  # checks the variables
        options.signal_grace_s = signal_grace_s(options, os.environ)
        secret = shared_secret(os.environ)
        return join(options, place, secret, environ, host_timeout_s(options))

    return _explaining(work)


def _explaining(work: Callable[[], int]) -> int:
    """Returns the exit code that `work` returns; explains an error that it raises."""
    try:
        return work()
    except HostsFailedError as error:
        complain(*error.lines)
        return error.code
    except NodesError as error:
        complain(str(error))
        return error.code
    except native.CoreError as error:
        complain(error.message)
        return _USAGE_ERROR
    except OSError as error:
        complain(f"cannot start the ranks, or watch them: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _check_working_folder() -> None:
    """Raises SystemExit(2) if the working directory was deleted."""
    try:
        check_working_folder()
    except native.CoreError as error:
        complain(error.message)
        raise SystemExit(_USAGE_ERROR) from None


def _leave_outer_job() -> None:
    """Removes the variables of an outer job if one of its ranks runs this program."""
    with contextlib.suppress(
        native.CoreError
    ):  # a malformed variable is reported later
        if rank_above(os.environ):
            for name in os.environ.keys() - without_rank(os.environ).keys():
                del os.environ[name]


def _prepare_horovod(options: Namespace) -> None:
    """Prepares the options and the environment for Horovod programs.

    Prints warnings about settings that have no effect.

    Raises:
        SystemExit: with code 2.
    """
    try:
        notes = mode.prepare(options, os.environ)
    except variables.VariableError as error:
        complain(str(error))
        raise SystemExit(_USAGE_ERROR) from None
    os.environ.update(options.env)
    for note in notes:
        complain(f"warning: {note}")


def _check_machine(plan: Plan) -> int:
    """Checks settings and limits, and reports those that cannot work, before the start.

    Returns:
        Bytes of shared memory per link; 0 if the ranks of a host use TCP, or if the
        native library is not built.

    Raises:
        SystemExit: with code 2.
    """
    try:
        outer = detect(os.environ)
        if outer.size > 1 and outer.source in cluster_variables.SOURCES:
            _check_hosts(plan, outer)
        elif outer.size > 1:
            raise native.CoreError(
                native.INVALID_ARGUMENT,
                f"this is already rank {outer.rank} of {outer.size} "
                f"({outer.variables}); start tfdistrun once, outside of that job, or "
                "on each host with --nnodes, or unset these variables",
            )
        shm_bytes = 0
        if native.LIBRARY_PATH.is_file():
            transport = native.config()["TFDIST_TRANSPORT"]["value"]
            if transport != "tcp":
                shm_bytes = native.shm_bytes() + 2 * native.window_bytes()
    except native.CoreError as error:
        complain(error.message)
        raise SystemExit(_USAGE_ERROR) from None
    here = min(sum(map(len, plan.bound.values())), plan.max_size)
    found = preflight.check(
        here, shm_bytes=shm_bytes, world=plan.max_size, at_start=len(plan.local)
    )
    for warning in found.warnings:
        complain(f"warning: {warning}")
    if found.errors:
        complain(*found.errors)
        raise SystemExit(_USAGE_ERROR)
    return shm_bytes


def _check_hosts(plan: Plan, outer: Placement) -> None:
    """Raises if every host that a platform describes would run a job of its own.

    Raises:
        native.CoreError: tfdistrun does not run on the first host, or does not start
            ranks on all hosts.
    """
    if outer.rank == 0 and len(plan.used) >= outer.size:
        return
    raise native.CoreError(
        native.INVALID_ARGUMENT,
        f"the platform started this on host {outer.rank} of {outer.size} "
        f"({outer.variables}), and each host would train separately; add --nnodes "
        f"{outer.size} on all hosts, start tfdistrun on the first host only, with all "
        "hosts in -H, or unset these variables",
    )


def _warn_if_alone(outcome: Outcome) -> None:
    """Warns if no rank of a training program has called `tfdist.init()`."""
    ranks = len(outcome.ends)
    # A single rank has nothing to reduce; a program without TensorFlow trains nothing.
    if ranks > 1 and not outcome.joined and outcome.memory_bytes > _TENSORFLOW_BYTES:
        complain(
            f"warning: {ranks} processes ended without calling tfdist.init(): each ran "
            "independently, and nothing was reduced. To train together, call "
            "tfdist.init() and wrap the optimizer; for programs written for Horovod, "
            "use --horovod"
        )


def _conclude(outcome: Outcome, started_s: float, folder: Path) -> int:
    """Explains a failure; returns the exit code of tfdistrun."""
    first = outcome.first_failure
    if outcome.is_preempted and first is None:
        complain(
            "preempted before the last step: start the job again, from a checkpoint if "
            f"the program has saved one; output: {folder}"
        )
    elif outcome.signal is not None:
        name = failure_summary.signal_name(outcome.signal)
        complain(f"ended by {name}; output: {folder}")
    elif first is None:
        _warn_if_alone(outcome)
    if first is not None:
        complain(
            *failure_summary.explain(
                first,
                outcome.ends,
                started_s=started_s,
                log=first.log,
            )
        )
    return outcome.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs tfdistrun; returns its exit code."""
    logging.basicConfig(format="tfdistrun: warning: %(message)s")
    _leave_outer_job()
    _check_working_folder()
    options = parser().parse_args(arguments)
    os.environ.update(options.env)  # first, because COMMAND is looked up in PATH
    if wrong := elastic_error(options):
        complain(wrong)
        return _USAGE_ERROR
    place = _node_place(options)
    if place is not None and place.rank > 0:
        return _join(options, place)
    discovery, hosts = _discover(options)
    if place is not None:
        hosts = nodes(place.count, options.size)
    plan = _plan(options, hosts, can_change=discovery is not None)
    if options.horovod:
        _prepare_horovod(options)
    options.command = _checked_command(options.command, here=bool(plan.local_hosts))
    shm_bytes = _check_machine(plan)
    can_be_remote = plan.remote or plan.can_get_hosts
    if not can_be_remote and (names := without_effect(options)):
        complain(f"warning: no effect, as all ranks run here: {', '.join(names)}")
    options.signal_grace_s = signal_grace_s(options, os.environ)
    os.environ["TFDIST_SIGNAL_GRACE_S"] = f"{options.signal_grace_s:g}"  # for the ranks
    started_s = time.monotonic()
    try:
        folder = output.log_folder(options.log_dir or os.environ.get("TFDIST_LOG_DIR"))
    except OSError as error:
        complain(
            f"the folder for the output of the ranks cannot be used: {error}; choose "
            "another with --log-dir"
        )
        return _USAGE_ERROR

    def work() -> int:
        try:
            with output.reserved(folder):
                job = Job(options, plan, folder, shm_bytes, discovery, place)
                outcome = job.run()
        except output.FolderInUseError:
            complain(
                f"another running tfdistrun writes its output to {folder}; choose "
                "another folder with --log-dir"
            )
            return _USAGE_ERROR
        return _conclude(outcome, started_s, folder)

    return _explaining(work)
