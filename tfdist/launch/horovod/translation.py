"""Pure functions that translate flags of `horovodrun` to arguments of `tfdistrun`."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfdist.launch import binding
from tfdist.launch.horovod.variables import PREFIX, meaning_of
from tfdist.launch.remote import SSH_COMMAND


class FlagError(ValueError):
    """A flag is missing or invalid, or cannot be ignored but is not supported."""


@dataclass
class Arguments:
    """Arguments for `tfdistrun` (`words`), and warnings for the user (`notes`)."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _switch(value: Any) -> str:
    return "1" if value else "0"


def _mib(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:  # a file may also contain .nan
        raise FlagError(f"expected a number of MiB, 0 or more; got {value!r}")
    return str(int(value * (1 << 20)))


# Flag → the variable (without HOROVOD_) in which Horovod's launcher passes the value to
# the ranks, and the function that converts the value to text.
_VARIABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "fusion_threshold_mb": ("FUSION_THRESHOLD", _mib),
    "cycle_time_ms": ("CYCLE_TIME", str),
    "cache_capacity": ("CACHE_CAPACITY", str),
    "hierarchical_allreduce": ("HIERARCHICAL_ALLREDUCE", _switch),
    "hierarchical_allgather": ("HIERARCHICAL_ALLGATHER", _switch),
    "torus_allreduce": ("TORUS_ALLREDUCE", _switch),
    "autotune": ("AUTOTUNE", _switch),
    "autotune_log_file": ("AUTOTUNE_LOG", str),
    "autotune_warmup_samples": ("AUTOTUNE_WARMUP_SAMPLES", str),
    "autotune_steps_per_sample": ("AUTOTUNE_STEPS_PER_SAMPLE", str),
    "autotune_bayes_opt_max_samples": ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", str),
    "autotune_gaussian_process_noise": ("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", str),
    "start_timeout": ("START_TIMEOUT", str),
    "timeline_filename": ("TIMELINE", str),
    "timeline_mark_cycles": ("TIMELINE_MARK_CYCLES", _switch),
    "no_stall_check": ("STALL_CHECK_DISABLE", _switch),
    "stall_check_warning_time_seconds": ("STALL_CHECK_TIME_SECONDS", str),
    "stall_check_shutdown_time_seconds": ("STALL_SHUTDOWN_TIME_SECONDS", str),
    "mpi_threads_disable": ("MPI_THREADS_DISABLE", _switch),
    "num_nccl_streams": ("NUM_NCCL_STREAMS", str),
    "thread_affinity": ("THREAD_AFFINITY", str),
    "gloo_timeout_seconds": ("GLOO_TIMEOUT_SECONDS", str),
    "ccl_bgt_affinity": ("CCL_BGT_AFFINITY", str),
    "log_level": ("LOG_LEVEL", str),
}
_MEANINGLESS = {
    "disable_cache": "hosts are checked each time, and nothing is kept",
    "elastic_timeout": "a replacement has 10 minutes to become ready",
    "blacklist_cooldown_range": "a lost host is used again when the discovery script "
    "has stopped listing it, and lists it again",
    "slots_per_host": "the discovery script prints the slots of each host, host1:2, or "
    "-H host1:2,host2:2 sets them",
    "tcp_flag": "hosts always use TCP; with TFDIST_TRANSPORT=tcp, ranks of one host "
    "use it too",
    "use_gloo": "tfdist connects the ranks itself",
    "use_mpi": "tfdist connects the ranks itself; a program may also be "
    "started with `mpirun -np N python -m tfdist.horovod SCRIPT`",
    "use_jsrun": "the ranks on the hosts of -H start through ssh",
}
# Open MPI's name of a binding → tfdistrun's name.
_BIND_TO = {**{kind: kind for kind in binding.KINDS}, "package": "socket"}
# Options of mpirun that choose the CPUs of a rank; each has a value.
_BINDING = {
    *("bind-to", "map-by", "rankfile", "rf", "cpu-set", "cpu-list"),
    *("cpus-per-proc", "cpus-per-rank"),
}
_WIDTH = re.compile(r"\bpe\b", re.IGNORECASE)  # --map-by slot:PE=4


def translate(options: argparse.Namespace) -> Arguments:
    """Translates options of `horovodrun` to arguments of `tfdistrun`.

    Args:
        options: result of `flags.parser`, merged with the file of --config-file.

    Raises:
        FlagError: -np is missing, or a flag is invalid or not supported.

    Example:
        >>> from tfdist.launch.horovod import flags, translation
        >>> given = flags.parser().parse_args(["-np", "2", "python", "train.py"])
        >>> translation.translate(given).words
        ['--horovod', '-np', '2', '--', 'python', 'train.py']
    """
    given: Mapping[str, str] = options.given
    _refuse(options, given)
    made = Arguments(["--horovod", "-np", str(options.num_proc)])
    for option, flag in (("hosts", "-H"), ("hostfile", "--hostfile")):
        if option in given:
            made.words += [flag, getattr(options, option)]
    if "output_filename" in given:
        made.words += ["--log-dir", options.output_filename]
    if getattr(options, "log_with_timestamp", None) or (
        options.prefix_output_with_timestamp
    ):
        made.words.append("--timestamps")
    for option, flag in (
        ("min_num_proc", "--min-np"),
        ("reset_limit", "--max-restarts"),
    ):
        if option in given:
            made.words += [flag, str(getattr(options, option))]
    _add_growth(made, options, given)
    if "start_timeout" in given:
        made.words += ["--host-timeout-s", str(min(options.start_timeout, 3600))]
    _add_ssh(made, options)
    _add_variables(made, options, given)
    _add_interface(made, options, given)
    names = [name for name in ("mpi_args", "binding_args") if name in given]
    _add_mpi(made, {given[name]: getattr(options, name) for name in names})
    for name, note in _MEANINGLESS.items():
        if getattr(options, name, None):
            made.notes.append(f"{given[name]} has no effect: {note}")
    command = options.command
    made.words += ["--", *(command[1:] if command[:1] == ["--"] else command)]
    return made


def _refuse(options: argparse.Namespace, given: Mapping[str, str]) -> None:
    if options.num_proc is None:
        raise FlagError("-np N is missing: the number of ranks")
    follows_script = "host_discovery_script" in given
    is_other = "max_num_proc" in given and options.max_num_proc != options.num_proc
    if is_other and not follows_script:
        raise FlagError(
            f"{given['max_num_proc']}: without --host-discovery-script FILE, a job "
            f"never has more ranks than -np {options.num_proc}; add "
            "--host-discovery-script, or remove this option"
        )
    is_elastic = "min_num_proc" in given or follows_script
    if "reset_limit" in given and not is_elastic:
        raise FlagError(
            f"{given['reset_limit']} limits the replacements of lost ranks, which only "
            "a job with --min-np N or --host-discovery-script FILE has; add --min-np N"
        )
    if options.use_jsrun and not (options.hosts or options.hostfile):
        raise FlagError(
            "--jsrun: hosts are not taken from LSF; give them with -H host1:2,host2:2"
        )


def _add_growth(
    made: Arguments, options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    """Adds the options of a job that follows a discovery script."""
    if "host_discovery_script" not in given:
        return
    made.words += ["--host-discovery-script", options.host_discovery_script]
    if "min_num_proc" not in given:
        made.words += ["--min-np", str(options.num_proc)]  # Horovod's default
    if "max_num_proc" in given:
        made.words += ["--max-np", str(options.max_num_proc)]
    else:
        made.notes.append(
            "without --max-np, the job never has more ranks than -np "
            f"{options.num_proc}, whatever the discovery script prints"
        )


def _add_ssh(made: Arguments, options: argparse.Namespace) -> None:
    words = shlex.split(SSH_COMMAND)
    if options.ssh_port is not None:
        words += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        words += ["-i", options.ssh_identity_file]
    if words != shlex.split(SSH_COMMAND):
        made.words += ["--ssh-command", shlex.join(words)]


def _add_variables(
    made: Arguments, options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    for name, (short, text_of) in _VARIABLES.items():
        if name not in given:
            continue
        value = getattr(options, name)
        meaning = meaning_of(PREFIX + short)
        if meaning.becomes:
            try:
                text = text_of(value)
            except FlagError as error:
                raise FlagError(f"{given[name]}: {error}") from None
            made.words += ["-x", f"{PREFIX}{short}={text}"]
        elif value is not False:
            made.notes.append(f"{given[name]} has no effect: {meaning.note}")
    if options.verbose and "log_level" not in given:
        made.words += ["-x", f"{PREFIX}LOG_LEVEL=INFO"]


def _add_interface(
    made: Arguments, options: argparse.Namespace, given: Mapping[str, str]
) -> None:
    if "network_interfaces" not in given:
        return
    first, _, more = options.network_interfaces.partition(",")
    made.words += ["-x", f"{PREFIX}GLOO_IFACE={first.strip()}"]
    if more:
        made.notes.append(
            f"{given['network_interfaces']}: the ranks use one interface, {first}; "
            "TFDIST_ADDRESS may also name a network, such as 10.1.0.0/16"
        )


def _split(text: Any, flag: str) -> list[str]:
    if not isinstance(text, str):
        raise FlagError(
            f'{flag}: expected words in one string, e.g. "-x NAME=VALUE"; got {text!r}'
        )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise FlagError(f"{flag}: {error}") from None


def _add_mpi(made: Arguments, texts: Mapping[str, Any]) -> None:
    """Translates -x and --bind-to of mpirun; other arguments get a note.

    Args:
        made: arguments to which the translation is added.
        texts: flag → arguments for mpirun, as a string; all flags are combined.
    """
    said: list[str] = []  # binding arguments, as they were given
    kinds: list[str | None] = []  # tfdistrun's bindings; None: it has no such binding
    for flag, text in texts.items():
        words = _split(text, flag)
        others: list[str] = []
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word == "-x":
                if not words:
                    raise FlagError(f"{flag}: -x needs NAME or NAME=VALUE")
                made.words += ["-x", words.pop(0)]
            elif name.startswith("-") and name.lstrip("-") in _BINDING:
                if not equals and words and not words[0].startswith("-"):
                    value = words.pop(0)
                if name.lstrip("-") == "bind-to":
                    kinds.append(_bind_to(value))
                elif name.lstrip("-") != "map-by" or _WIDTH.search(value):
                    kinds.append(None)
                elif value == "slot":  # the default
                    continue
                else:
                    others += filter(None, [name, value])
                    continue
                said.append(f"{flag} {shlex.join(filter(None, [name, value]))}")
            else:
                others.append(word)
        if others:
            made.notes.append(
                f"{flag} {shlex.join(others)} has no effect: MPI is not used"
            )
    if None in kinds:
        made.notes.append(
            f"{', '.join(said)}: ranks are not bound, since tfdistrun has no such "
            "binding; `tfdistrun --bind-to slice`, or --bind-to slice among these "
            "arguments, gives each rank an equal share of its host (docs/binding.md)"
        )
        return
    for kind in kinds:
        made.words += ["--bind-to", str(kind)]


def _bind_to(value: str) -> str | None:
    """Returns tfdistrun's name for a binding of mpirun; None if it has no such binding.

    It has no core:4, which means four cores, and no core:overload-allowed, because it
    refuses more ranks than cores.
    """
    kind, _, qualifier = value.partition(":")
    return _BIND_TO.get(kind) if qualifier in ("", "if-supported") else None
