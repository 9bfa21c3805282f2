"""Meaning of Horovod's environment variables in tfdist: a table and pure functions.

A Horovod variable is translated into a tfdist variable, is kept for the program (rank,
size and the like), or has no effect. For a variable without effect, a note says what is
used instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PREFIX = "HOROVOD_"
# State of the last translation; not TFDIST_..., since it is not a setting.
STATE = "_TFDIST_HOROVOD"
_NEVER_S = "86400"  # the longest time that tfdist waits
_MOST_FUSED_BYTES = 4 << 30
LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
}


class VariableError(ValueError):
    """A variable has an invalid value, is not supported, or contradicts another one."""


@dataclass(frozen=True)
class Meaning:
    """Meaning of a Horovod variable in tfdist.

    Attributes:
        becomes: name of the tfdist variable; "" if there is none.
        convert: function that converts Horovod's value to tfdist's value, or to None to
            keep tfdist's default.
        note: text about what is used instead; shown unless the variable's value is off
            (see `is_on`).
    """

    becomes: str = ""
    convert: Callable[[str], str | None] = lambda text: text
    note: str = ""


@dataclass
class Translation:
    """Names and values of tfdist variables to set, and notes for the user."""

    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# ---- values ----


def is_on(text: str) -> bool:
    """Returns whether a switch is on: any value but 0, false and the empty string."""
    return text.strip().lower() not in ("", "0", "false")


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1e15:
        raise VariableError(f"expected {what}, 0 or more")
    return value


def _fusion_bytes(text: str) -> str:
    return str(min(int(_number(text, "a number of bytes")), _MOST_FUSED_BYTES))


def _seconds(text: str, *, least: float) -> float:
    return min(max(_number(text, "a number of seconds"), least), float(_NEVER_S))


def _warning_s(text: str) -> str:
    value = _seconds(text, least=0.0)
    return f"{max(value, 0.1):g}" if value else _NEVER_S


def _shutdown_s(text: str) -> str | None:
    value = _seconds(text, least=0.0)
    return f"{max(value, 0.1):g}" if value else None


def _start_s(text: str) -> str:
    return f"{_seconds(text, least=1.0):g}"


def _when_on(value: str) -> Callable[[str], str | None]:
    return lambda text: value if is_on(text) else None


def _level(text: str) -> str:
    found = LEVELS.get(text.strip().lower())
    if found is None:
        raise VariableError(f"expected one of {', '.join(LEVELS)}")
    return found


def timeline_folder(path: str) -> str | None:
    """Returns the timeline folder that replaces Horovod's timeline file `path`.

    Example:
        >>> from tfdist.launch.horovod import variables
        >>> variables.timeline_folder("/tmp/timeline.json")
        '/tmp/timeline.json.d'
    """
    if path == "DYNAMIC":  # start_timeline() sets the folder
        return None
    return path + ".d"  # as in hvd.start_timeline(path)


# ---- the table ----

_CYCLES = "there are no cycles: a collective starts when all ranks are ready for it"
_TUNING = (
    "measure once with `tfdist bench -np N --tune FILE`, then set "
    "TFDIST_TUNING_FILE=FILE"
)
_OWN_CORE = "data moves through tfdist's own core (shared memory and TCP)"
_NO_MPI = "MPI is not used"
_NO_NCCL = "NCCL is not used: gradients are reduced in host memory"
_ELASTIC = "tfdistrun --min-np N starts an elastic job (docs/elastic.md)"
_LAUNCHER = "tfdistrun connects the ranks itself"
_BUILD = "it is for building Horovod"

TABLE: dict[str, Meaning] = {
    "FUSION_THRESHOLD": Meaning("TFDIST_FUSION_BYTES", _fusion_bytes),
    "STALL_CHECK_TIME_SECONDS": Meaning("TFDIST_STALL_WARNING_S", _warning_s),
    "STALL_CHECK_DISABLE": Meaning("TFDIST_STALL_WARNING_S", _when_on(_NEVER_S)),
    "STALL_SHUTDOWN_TIME_SECONDS": Meaning("TFDIST_TIMEOUT_S", _shutdown_s),
    "TIMELINE": Meaning("TFDIST_TIMELINE", timeline_folder),
    "LOG_LEVEL": Meaning("TFDIST_LOG_LEVEL", _level),
    "START_TIMEOUT": Meaning("TFDIST_START_TIMEOUT_S", _start_s),
    "GLOO_IFACE": Meaning("TFDIST_ADDRESS"),
    "HIERARCHICAL_ALLREDUCE": Meaning(
        "TFDIST_ALLREDUCE_ALGORITHM", _when_on("two_level")
    ),
    "TORUS_ALLREDUCE": Meaning("TFDIST_ALLREDUCE_ALGORITHM", _when_on("torus")),
    # Not translated, and without a note: a rank's place, and features that tfdist
    # always has.
    **{
        name: Meaning()
        for name in (
            *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
            *("HOSTNAME", "DYNAMIC_PROCESS_SETS"),
        )
    },
    "HIERARCHICAL_ALLGATHER": Meaning(
        note="tfdist chooses the algorithm; TFDIST_ALLGATHER_ALGORITHM sets it"
    ),
    "CYCLE_TIME": Meaning(note=_CYCLES),
    "TIMELINE_MARK_CYCLES": Meaning(note=_CYCLES),
    "CACHE_CAPACITY": Meaning(
        note="an operation is never negotiated a second time, however many there are"
    ),
    "AUTOTUNE": Meaning(note=_TUNING),
    "AUTOTUNE_LOG": Meaning(note=_TUNING),
    "AUTOTUNE_WARMUP_SAMPLES": Meaning(note=_TUNING),
    "AUTOTUNE_STEPS_PER_SAMPLE": Meaning(note=_TUNING),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": Meaning(note=_TUNING),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": Meaning(note=_TUNING),
    "LOG_HIDE_TIME": Meaning(note="`tfdistrun --timestamps` adds the time to lines"),
    "LOG_TIMESTAMP": Meaning(note="`tfdistrun --timestamps` adds the time to lines"),
    "CONTROLLER": Meaning(note=_OWN_CORE),
    "CPU_OPERATIONS": Meaning(note=_OWN_CORE),
    "GLOO_TIMEOUT_SECONDS": Meaning(
        note="TFDIST_TIMEOUT_S limits every wait for a rank, TFDIST_PEER_TIMEOUT_S how "
        "long a rank may be silent"
    ),
    "GLOO_RENDEZVOUS_ADDR": Meaning(note=_LAUNCHER),
    "GLOO_RENDEZVOUS_PORT": Meaning(note=_LAUNCHER),
    "RENDEZVOUS_ADDR": Meaning(note=_LAUNCHER),
    "RENDEZVOUS_PORT": Meaning(note=_LAUNCHER),
    "SECRET_KEY": Meaning(note="TFDIST_SECRET_FILE names a file with the secret"),
    "NUM_NCCL_STREAMS": Meaning(note=_NO_NCCL),
    "BATCH_D2D_MEMCOPIES": Meaning(note=_NO_NCCL),
    "ENABLE_ASYNC_COMPLETION": Meaning(note=_NO_NCCL),
    "DISABLE_NVTX_RANGES": Meaning(note=_NO_NCCL),
    "ENABLE_XLA_OPS": Meaning(
        note="jit_compile=True works without it, also with the library that "
        "`make xla` builds"
    ),
    "DISABLE_GROUP_FUSION": Meaning(
        note="`groups=` of the optimizer sets which gradients are reduced together"
    ),
    "THREAD_AFFINITY": Meaning(note="`tfdistrun --bind-to` binds ranks, not threads"),
    "MPI_THREADS_DISABLE": Meaning(note=_NO_MPI),
    "ADASUM_MPI_CHUNK_SIZE": Meaning(note=_NO_MPI),
    "CCL_CACHE": Meaning(note=_OWN_CORE),
    "CCL_BGT_AFFINITY": Meaning(note=_OWN_CORE),
    "ELASTIC": Meaning(note=_ELASTIC),
    "ELASTIC_TIMEOUT": Meaning(note=_ELASTIC),
}
_FAMILIES = (
    (("WITH_", "WITHOUT_", "GPU", "BUILD_", "NCCL_", "CUDA_", "ROCM_"), _BUILD),
    (("MPI_HOME", "SKIP_COMPILE", "DEBUG"), _BUILD),
    (("SPARK_",), "tfdist has no launcher for Spark"),
    (("RAY_",), "tfdist has no launcher for Ray"),
)


def meaning_of(name: str) -> Meaning:
    """Returns the meaning of a HOROVOD_... variable; if unknown, a note says so."""
    short = name.removeprefix(PREFIX)
    if short in TABLE:
        return TABLE[short]
    for starts, note in _FAMILIES:
        if short.startswith(starts):
            return Meaning(note=note)
    return Meaning(note="Horovod has no such variable either")


def translate(environ: Mapping[str, str]) -> Translation:
    """Translates the Horovod variables in `environ` to tfdist variables.

    Args:
        environ: variables; those without the prefix HOROVOD_ are ignored.

    Raises:
        VariableError: a value is invalid, or variables contradict each other.

    Example:
        >>> from tfdist.launch.horovod import variables
        >>> found = variables.translate({"HOROVOD_FUSION_THRESHOLD": "1024"})
        >>> found.settings
        {'TFDIST_FUSION_BYTES': '1024'}
    """
    found = Translation()
    source: dict[str, str] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or not environ[name].strip():
            continue
        meaning, text = meaning_of(name), environ[name]
        if not meaning.becomes:
            if meaning.note and is_on(text):
                found.notes.append(f"{name} has no effect: {meaning.note}")
            continue
        try:
            value = meaning.convert(text)
        except VariableError as error:
            raise VariableError(f"{name}={text!r}: {error}") from None
        if value is None:
            if meaning.becomes == "TFDIST_TIMEOUT_S":
                found.notes.append(
                    f"{name}={text}: in tfdist every wait ends after TFDIST_TIMEOUT_S "
                    "(default 300 s, at most 86400)"
                )
            continue
        _set(found, source, name, meaning.becomes, value)
        if meaning.becomes == "TFDIST_TIMELINE":
            found.notes.append(
                f"{name}: the timeline of all ranks is written into the folder {value}"
            )
    return found


def _set(
    found: Translation, source: dict[str, str], name: str, becomes: str, value: str
) -> None:
    if becomes in found.settings and found.settings[becomes] != value:
        other = source[becomes]
        if becomes == "TFDIST_ALLREDUCE_ALGORITHM":
            raise VariableError(
                f"{other} and {name} name different algorithms; set only one of them"
            )
        if name.endswith("STALL_CHECK_TIME_SECONDS"):
            return  # the check is turned off
    found.settings[becomes] = value
    source[becomes] = name


# ---- what has been translated already ----


@dataclass(frozen=True)
class Update:
    """Changes since the last `update`.

    Attributes:
        settings: tfdist variables to set.
        removed: tfdist variables that an earlier update has set, and that are to be
            removed.
        notes: notes for the user about Horovod variables that are new or have changed.
        state: new value of STATE.
    """

    settings: dict[str, str]
    removed: list[str]
    notes: list[str]
    state: str


def update(environ: Mapping[str, str]) -> Update:
    """Translates the Horovod variables in `environ`, and compares with the last update.

    The launcher calls this first. Each rank calls it again, since a program may set or
    delete variables itself. `environ[STATE]` contains the last update. A tfdist
    variable that the user has set takes precedence over the Horovod variable.

    Raises:
        VariableError: as in `translate`.

    Example:
        >>> from tfdist.launch.horovod import variables
        >>> told = variables.update({"HOROVOD_CYCLE_TIME": "5"})
        >>> len(told.notes)
        1
        >>> again = {"HOROVOD_CYCLE_TIME": "5", variables.STATE: told.state}
        >>> variables.update(again).notes
        []
    """
    before = json.loads(environ.get(STATE) or '{"seen": {}, "set": {}}')
    now = {k: v for k, v in environ.items() if k.startswith(PREFIX)}
    changed = {k: v for k, v in now.items() if before["seen"].get(k) != v}
    own = {k: v for k, v in before["set"].items() if environ.get(k) == v}
    found = translate(now).settings
    found = {k: v for k, v in found.items() if k not in environ or k in own}
    settings = {k: v for k, v in found.items() if environ.get(k) != v}
    removed = sorted(own.keys() - found.keys())
    state = json.dumps({"seen": now, "set": own | found})
    return Update(settings, removed, translate(changed).notes, state)


def of_rank(
    rank: int,
    size: int,
    *,
    local_rank: int,
    local_size: int,
    cross_rank: int,
    cross_size: int,
) -> dict[str, str]:
    """Returns the variables in which Horovod's launcher passes rank and size."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(cross_rank),
        "HOROVOD_CROSS_SIZE": str(cross_size),
    }
