"""`horovod.runner` and `horovod.run`: runs a function on ranks started from Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.core import native, pickling
from tfdist.launch.hosts import HostsError, mark_local, parse_file, parse_list
from tfdist.launch.run_function import FunctionCall, check_picklable, finish

__all__ = ["run"]

_INSTEAD = (
    "Or put the function's lines into a separate script, and start it with "
    "`tfdistrun --horovod -np N script.py`"
)
# Parameter → flag of horovodrun, which reports flags that have no effect.
_FLAGS = {
    "num_proc": "--num-proc",
    "min_num_proc": "--min-num-proc",
    "max_num_proc": "--max-num-proc",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "mpi_args": "--mpi-args",
    "network_interfaces": "--network-interfaces",
}
# Older name of a parameter → its name since Horovod 0.26.
_OLDER = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}
_SWITCHES = {
    "disable_cache": "--disable-cache",
    "verbose": "--verbose",
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    host_discovery_script: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    network_interface: str | Sequence[str] | None = None,
) -> list[Any]:
    """Starts ranks on this host, calls a function on each, and returns the results.

    The function, its arguments and its results are pickled and passed through files
    that only this user can read. This requires `TFDIST_OBJECTS=pickle`. A function
    defined in the program itself or in a notebook also requires the package
    cloudpickle. The output of the ranks is printed as with tfdistrun.

    Args:
        func: the function; it calls `hvd.init()`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; default 1.
        min_num_proc: as `--min-num-proc` of horovodrun.
        max_num_proc: as `--max-num-proc`; must equal `num_proc`.
        slots: as `--slots-per-host`.
        reset_limit: as `--reset-limit`.
        cooldown_range: as `--blacklist-cooldown-range`.
        hosts: this host only, such as "localhost:4".
        hostfile: path of a hostfile that lists this host only.
        start_timeout: seconds within which all ranks must have started.
        ssh_port: as `--ssh-port`.
        ssh_identity_file: as `--ssh-identity-file`.
        disable_cache: as `--disable-cache`.
        output_filename: folder for the output, one file per rank.
        verbose: as `--verbose`.
        use_gloo: as `--gloo`.
        use_mpi: as `--mpi`.
        mpi_args: as `--mpi-args`.
        network_interfaces: as `--network-interfaces`.
        executable: Python interpreter for the ranks; default: this interpreter.
        host_discovery_script: refused, because the number of results would change.
        np: an older name of `num_proc`.
        min_np: an older name of `min_num_proc`.
        max_np: an older name of `max_num_proc`.
        network_interface: an older name of `network_interfaces`.

    Returns:
        A list of the function's results, in rank order. With `min_num_proc`, these are
        the results of all ranks with which the job has ended, not only the first
        `min_num_proc` as in Horovod.

    Raises:
        RuntimeError: `TFDIST_OBJECTS=pickle` is not set, or a rank failed; see the
            report above the error.
        NotImplementedError: another host, or a discovery script, is given.
        TypeError: the function or its arguments cannot be pickled.
        ValueError: the hosts are malformed.

    Example:
        >>> from tfdist.horovod.runner import run
        >>> run(max, args=(1, 2), np=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: horovod.run sends functions by pickle, which must be enabled...
    """
    given = {name: value for name, value in locals().items() if value is not None}
    if native.value(pickling.VARIABLE) != "pickle":
        raise RuntimeError(
            "horovod.run sends functions by pickle, which must be enabled: set "
            f"{pickling.VARIABLE}=pickle (docs/security.md). {_INSTEAD}."
        )
    if host_discovery_script is not None:
        raise NotImplementedError(
            "horovod.run returns one result for each rank, but with a "
            "host_discovery_script the number of ranks changes. Omit it, or "
            "move the function's body into a script, and start it with `tfdistrun "
            "--horovod -np N --min-np M --host-discovery-script FILE script.py`."
        )
    _check_hosts(hosts, hostfile)
    check_picklable(func, "horovod.run", f"{_INSTEAD}.")
    for older, name in _OLDER.items():
        if older in given:
            given.setdefault(name, given[older])
    given.setdefault("num_proc", 1)
    with FunctionCall(func, args, kwargs or {}) as call:
        python = executable or sys.executable
        command = [python, "-m", __name__, str(call.folder)]
        code = finish("tfdist.launch.horovod", [*words_of(given), "--", *command])
        if code != 0:
            raise RuntimeError(
                f"horovod.run: the ranks ended with exit code {code}; see the report "
                "of the first failure above."
            )
        return call.results()


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Returns the command-line arguments for horovodrun.

    Example:
        >>> from tfdist.horovod.runner import words_of
        >>> words_of({"num_proc": 2, "use_mpi": False, "verbose": 1, "func": print})
        ['--num-proc=2', '--verbose']
    """
    words = []
    for name, flag in _FLAGS.items():
        if name in given:
            value = given[name]
            many = isinstance(value, Sequence) and not isinstance(value, str)
            words.append(f"{flag}={','.join(map(str, value)) if many else value}")
    if "cooldown_range" in given:
        words.append("--blacklist-cooldown-range")
        words += map(str, given["cooldown_range"])
    return words + [flag for name, flag in _SWITCHES.items() if given.get(name)]


def _check_hosts(hosts: str | None, hostfile: str | None) -> None:
    found = []
    try:
        if hosts is not None:
            found = parse_list(hosts)
        elif hostfile is not None:
            found = parse_file(Path(hostfile).read_text(encoding="utf-8"), hostfile)
    except (HostsError, OSError) as error:
        raise ValueError(f"horovod.run: {error}") from None
    far = [host.name for host in mark_local(found) if not host.is_local]
    if far:
        raise NotImplementedError(
            f"horovod.run starts ranks only on this host, got {', '.join(far)}. "
            "Put the function's lines into a separate script, and start it with "
            "`tfdistrun --horovod -np N -H HOST:SLOTS,... script.py`."
        )
