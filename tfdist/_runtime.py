"""Life of the engine in this process: init, shutdown, and who this process is.

The only module of the package that keeps state. It imports no TensorFlow; the error
classes, which do, are imported when one is raised.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from tfdist import _core, _engine, tuning
from tfdist import _host_memory as host_memory
from tfdist import _last_words as last_words
from tfdist.rendezvous import agreement, children, report
from tfdist.rendezvous.environment import check_working_folder, detect
from tfdist.rendezvous.start import Options, connect
from tfdist.rendezvous.world import Mesh
from tfdist.waits._watch import Watch

if TYPE_CHECKING:
    from tfdist._process_sets import ProcessSet
    from tfdist.rendezvous.late_links import LateLinks
    from tfdist.rendezvous.links import Bond

_Helper = TypeVar("_Helper", bound="Helper")
_log = logging.getLogger("tfdist")
_SHUTDOWN_TIMEOUT_S = 2.0


class Helper(Protocol):
    """Something with threads or sockets that lives until `shutdown`."""

    def close(self) -> None:
        """Ends them; takes 2 s at most, raises nothing."""


@dataclass
class _State:
    """Everything this process remembers of tfdist."""

    topology: _core.Topology | None = None
    pid: int = 0  # process that called init; another one is its fork
    reduces_gradients: bool = False  # whether a list of them was, in this generation
    generation: int = 0
    hooked: bool = False
    reported: bool = False  # why this program ends
    # A rank that has failed, and why, as an error says that was raised in this process.
    culprit: tuple[int, str] | None = None
    thread_failed: bool = False  # an error of tfdist that a thread did not catch
    late: LateLinks | None = None
    process_sets: list[ProcessSet] = field(default_factory=list)  # of this generation
    bond: Bond | None = None
    settings: dict[str, dict[str, Any]] | None = None  # as they were in init
    address: str = ""
    helpers: dict[str, Helper] = field(default_factory=dict)  # of this generation
    timeline: Path | None = None  # its folder


_state = _State()
_lock = threading.RLock()


def init(
    *,
    timeout_s: float | None = None,
    process_sets: Iterable[Iterable[int]] = (),
) -> None:
    """Connects this process with the other ranks of its job and starts the engine.

    Who this process is comes from the launcher's variables (tfdistrun, mpirun, srun,
    torchrun); without a launcher it is rank 0 of 1. Does nothing when tfdist is
    initialized already. After `shutdown()` all ranks may call it again.

    One of several ranks also asks TensorFlow to keep the memory of tensors, by two
    variables of the environment (docs/memory.md). `tfdistrun` has set them already;
    under another launcher they have an effect if no tensor has been made before.

    Args:
        timeout_s: seconds to wait for all ranks; default `TFDIST_START_TIMEOUT_S`
            (120).
        process_sets: lists of ranks, the same on every rank, each of which
            `add_process_set` makes a set of; `process_sets()` returns them.

    Raises:
        tfdist.MismatchError: the ranks run different versions or settings.
        tfdist.RankFailedError: a rank failed while the ranks were connecting.
        tfdist.TimeoutError: a rank is missing; the message names it.
        tensorflow.errors.InvalidArgumentError: a variable is malformed, or two
            launchers contradict each other.
        ValueError: `timeout_s` is not a number above 0 and at most 86400.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.rank()
        0
    """
    try:
        start(timeout_s=timeout_s, process_sets=process_sets)
    except _core.CoreError as error:
        raise_public(error)


def start(
    *,
    timeout_s: float | None = None,
    process_sets: Iterable[Iterable[int]] = (),
) -> None:
    """As `init`, but raises `_core.CoreError`, which needs no TensorFlow."""
    with _lock:
        _refuse_fork()
        _install_hooks()
        if _core.timeout_of(timeout_s) > 86400.0:
            raise ValueError(
                f"Expected timeout_s to be at most 86400 seconds, got {timeout_s!r}."
            )
        if _state.topology is None:
            _connect(timeout_s)
        _add_sets(process_sets)


def _connect(timeout_s: float | None) -> None:
    with _lock:
        rows = _core.config()
        limit_s = timeout_s or rows["TFDIST_START_TIMEOUT_S"]["value"]
        check_working_folder()
        placement = detect(os.environ)
        children.refuse_child(os.environ)
        _engine.check_kept()
        _state.generation += 1
        _state.culprit = None
        _log.debug("rank %d of %d by %s", placement.rank, placement.size, placement)
        if placement.size == 1:
            mesh = _alone(_state.generation)
        else:
            children.note_rank(os.environ, placement)
            os.environ.update(host_memory.settings(os.environ))  # unless by tfdistrun
            options = Options(
                generation=_state.generation,
                timeout_s=limit_s,
                transport=rows["TFDIST_TRANSPORT"]["value"],
                shm_bytes=_core.shm_bytes(),
                window_bytes=_core.window_bytes(),
                rows=rows,
            )
            mesh = connect(os.environ, placement, options)
        try:
            _core.start(
                mesh.topology,
                host=mesh.host,
                generation=mesh.generation,
                own_doorbell_fd=mesh.own_doorbell_fd,
                links=mesh.links,
                hosts=mesh.hosts,
                pids=mesh.pids,
                wanted_fd=mesh.late.wanted_fd if mesh.late else -1,
                own_window_fd=mesh.window.fd if mesh.window else -1,
                tuning=mesh.tuning.rules if mesh.tuning else (),
                tuning_hash=mesh.tuning.hash if mesh.tuning else "",
                sharing=mesh.sharing,
            )
        except _core.CoreError:
            if mesh.late:
                mesh.late.stop()
            raise
        tuning.log(mesh.tuning, placement.rank, os.environ)
        if mesh.late:
            mesh.late.started()
        elif mesh.window:
            mesh.window.close()
        _state.late = mesh.late
        _state.bond, _state.address = mesh.bond, mesh.address
        _state.settings = rows
        _state.topology = mesh.topology
        _state.pid = os.getpid()
        _state.process_sets = []
        _state.reduces_gradients = False
        if mesh.topology.size > 1:
            _state.helpers["waits"] = Watch(rows["TFDIST_TIMEOUT_S"]["value"])
        engine = _engine.chosen()
        if engine is not None:
            _start_engine(engine, mesh, limit_s)
        folder = rows["TFDIST_TIMELINE"]["value"]
        if folder:
            _start_timeline(folder, mesh, limit_s)


def _start_engine(engine: _engine.Engine, mesh: Mesh, timeout_s: float) -> None:
    """Starts what carries the tensors; where it fails, every rank raises."""
    _state.helpers["engine"] = engine
    try:
        engine.start(mesh, timeout_s)
    except _core.CoreError as error:
        _core.abort(error.message)
        shutdown()
        raise


def _start_timeline(folder: str, mesh: Mesh, timeout_s: float) -> None:
    """Begins the timelines of all ranks, or of none: then every rank raises."""
    from tfdist.timeline import recording

    topology = mesh.topology
    job = mesh.bond.job if mesh.bond else f"{os.getpid()} {time.time_ns()}"
    try:
        _state.timeline = recording.begin(
            folder,
            topology,
            host=mesh.host,
            job=job,
            generation=mesh.generation,
            commit_gate=setting("TFDIST_COMMIT_GATE"),
        )
        if topology.size > 1:  # where all have come this far, all can write
            _core.register_group("timeline\n", [True], timeout_s=timeout_s)
            recording.share(_state.timeline, topology.rank)
    except _core.CoreError as error:
        _core.abort(error.message)
        _state.timeline = None
        shutdown()
        raise


def start_timeline(folder: str) -> Path:
    """Begins this rank's timeline after `init`; the one that there is goes on.

    Nothing tells the other ranks: each begins its own, in a folder that all see.

    Returns:
        The folder that is written to.

    Raises:
        _core.CoreError: it cannot be written.
    """
    from tfdist.timeline import recording

    with _lock:
        topology = check_initialized()
        if _state.timeline is None:
            _state.timeline = recording.begin(
                folder,
                topology,
                host=os.uname().nodename,
                job=_state.bond.job if _state.bond else f"{os.getpid()}",
                generation=_state.generation,
                commit_gate=setting("TFDIST_COMMIT_GATE"),
            )
        return _state.timeline


def _add_sets(process_sets: Iterable[Iterable[int]]) -> None:
    if not process_sets:
        return
    from tfdist import _process_sets as sets

    for ranks in process_sets:
        sets.add(ranks)


def _alone(generation: int) -> Mesh:
    topology = _core.Topology(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        cross_rank=0,
        cross_size=1,
        host_of=(0,),
    )
    mesh = Mesh(topology, os.uname().nodename, generation, -1)
    mesh.tuning = agreement.tuning_of([{"tuning": tuning.record(os.environ)}])
    return mesh


def shutdown() -> None:
    """Leaves the job: tells the other ranks, ends the engine.

    Called by itself when the process exits. Pending operations end with an error.
    Does nothing when tfdist is not initialized.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.shutdown()
        >>> tfdist.is_initialized()
        False
    """
    with _lock:
        if _state.topology is None or _state.pid != os.getpid():
            return
        _warn_if_nothing_was_reduced()
        topology, _state.topology = _state.topology, None
        for helper in _state.helpers.values():
            helper.close()
        _state.helpers.clear()
        _state.bond, _state.settings = None, None
        _core.stop(_SHUTDOWN_TIMEOUT_S)
        if _state.late is not None:
            _state.late.stop()
            _state.late = None
        if _state.timeline is not None:
            _finish_timeline(_state.timeline, topology)
            _state.timeline = None


def note_gradients() -> None:
    """Notes that this rank takes part in a reduction of gradients."""
    _state.reduces_gradients = True


def _warn_if_nothing_was_reduced() -> None:
    topology = check_initialized()
    if _state.reduces_gradients or topology.rank != 0 or _core.failure() is not None:
        return
    finished = int(_core.counters()["finished"])
    text = last_words.unreduced_training(topology.size, finished)
    if text is not None:
        _log.warning("%s", text)


def _finish_timeline(folder: Path, topology: _core.Topology) -> None:
    from tfdist.timeline import recording

    trace = recording.finish(folder, topology.rank, topology.size)
    if trace is not None:
        _log.info("timeline of all ranks: %s", trace.path)


def helper(name: str, make: Callable[[], _Helper]) -> _Helper:
    """What `make` has made in this world; `shutdown` closes it.

    Args:
        name: of the helper; the same one is asked for with the same name.
        make: makes it, the first time.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    with _lock:
        check_initialized()
        if name not in _state.helpers:
            _state.helpers[name] = make()
        return _state.helpers[name]  # type: ignore[return-value]


def bond() -> tuple[Bond | None, str]:
    """By what this rank proves who it is, None when it is alone; its IP address."""
    return _state.bond, _state.address


def setting(name: str) -> Any:
    """The value of a TFDIST_* variable as it was in `init()`, before that as it is.

    What a program changes in its environment afterwards means nothing: the ranks have
    compared what was there in `init()`.

    Raises:
        _core.CoreError: before `init()`: a variable of the environment is malformed.
    """
    rows = _state.settings
    return _core.value(name) if rows is None else rows[name]["value"]


def generation() -> int:
    """How often this process has been connected; the same on all ranks."""
    return _state.generation


def live_sets() -> list[ProcessSet]:
    """The process sets that were added and not removed since `init()`."""
    return _state.process_sets


def ranks_of_set(number: int) -> frozenset[int]:
    """The ranks of a process set, by its number; 0 is that of all ranks."""
    for known in _state.process_sets:
        if known.id == number:
            return frozenset(known.ranks)
    return frozenset(range(size()))


def is_initialized() -> bool:
    """Whether `init()` has been called in this process, and `shutdown()` not since."""
    return _state.topology is not None and _state.pid == os.getpid()


def check_initialized() -> _core.Topology:
    """The place of this rank.

    Raises:
        tfdist.NotInitializedError: `init()` has not been called, or this process is a
            fork of one where it has.
    """
    topology = _state.topology
    if topology is None or _state.pid != os.getpid():
        _raise_not_initialized()
    return topology


def rank() -> int:
    """Index of this process: 0 <= rank < size.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    return check_initialized().rank


def size() -> int:
    """Number of processes of the job.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    return check_initialized().size


def local_rank() -> int:
    """Index of this process among those of its host; chooses the GPU.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    return check_initialized().local_rank


def local_size() -> int:
    """Number of processes of the job on this host.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    return check_initialized().local_size


def cross_rank() -> int:
    """Index of this process among those of equal local rank, one a host.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    return check_initialized().cross_rank


def cross_size() -> int:
    """Number of processes of equal local rank, one a host.

    Raises:
        tfdist.NotInitializedError: call `tfdist.init()` first.
    """
    return check_initialized().cross_size


def _refuse_fork() -> None:
    if _state.topology is not None and _state.pid != os.getpid():
        message = _fork_message()
        raise _core.CoreError(
            _core.FAILED_PRECONDITION,
            message,
            {"kind": "not_initialized", "cause": message},
        )


def _fork_message() -> str:
    return (
        f"process {os.getpid()} is a fork of process {_state.pid}, which called "
        "tfdist.init(), and has no engine; start helper processes before "
        "tfdist.init(), or with multiprocessing's 'spawn' method"
    )


def _raise_not_initialized() -> NoReturn:
    message = "tfdist is not initialized; call tfdist.init() first"
    if _state.topology is not None:
        message = _fork_message()
    elif is_child := children.refusal(os.environ):
        message = is_child
    raise_public(
        _core.CoreError(
            _core.FAILED_PRECONDITION,
            message,
            {"kind": "not_initialized", "cause": message},
        )
    )


def raise_public(error: _core.CoreError) -> NoReturn:
    """Raises the exception that users see for an error of the core."""
    from tfdist import errors

    raise errors.from_core(error) from None


# ---- the end of the process ----


def _install_hooks() -> None:
    """Once: leaves at exit, reports an exception that nobody catches."""
    if _state.hooked:
        return
    _state.hooked = True
    atexit.register(_leave)
    previous = sys.excepthook

    def hook(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        said = last_words.tell(error, rank() if is_initialized() else None)
        _state.reported = True
        whole = _log.isEnabledFor(logging.DEBUG)
        if whole or (not said.line and not said.traceback):
            previous(kind, error, trace)
        elif said.traceback and previous is not sys.__excepthook__:
            previous(kind, error, trace)  # somebody else's way to show it
        elif said.traceback:
            print(said.traceback, end="", file=sys.stderr, flush=True)
        if said.line:
            print(f"[tfdist] {said.line}", file=sys.stderr, flush=True)

    sys.excepthook = hook
    previous_in_thread = threading.excepthook

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_in_thread(args)
        _note_failed_thread(args)

    threading.excepthook = thread_hook


def _note_failed_thread(args: threading.ExceptHookArgs) -> None:
    """A thread that an error of tfdist has ended counts as the end of the program.

    Other errors are the program's own business: its other threads go on.
    """
    error = args.exc_value
    if error is not None and last_words.ours(error) is not None:
        _state.thread_failed = True
        last_words.tell(error, rank() if is_initialized() else None)
        _state.reported = True


def note_failure(rank: int, reason: str) -> None:
    """Remembers that an error was raised here because of another rank.

    A program that catches it may end with `sys.exit(1)`, of which no hook is told.
    """
    if is_initialized() and rank != _state.topology.rank:  # type: ignore[union-attr]
        _state.culprit = (rank, reason)


def _leave() -> None:
    """At exit: says which rank is at fault, if the program has not, and leaves.

    Python ends with code 0 whatever threads have raised. A rank that an error of tfdist
    has taken out of the job must not look as if it had finished.
    """
    if _state.culprit is None and is_initialized():
        failure = _core.failure()
        culprit = last_words.blamed(failure, rank()) if failure else None
        if failure and culprit is not None:
            _state.culprit = (culprit, failure.message)
    if _state.culprit is not None and not _state.reported:
        culprit, reason = _state.culprit
        report.send(os.environ, {"error": reason, "blamed": culprit})
    shutdown()
    if _state.thread_failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
