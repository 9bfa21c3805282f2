"""Starts and stops the engine in this process: init, shutdown, and exit hooks.

This module does not import TensorFlow. The error classes, which do, are imported when
an error is raised.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tfdist.core import (
    allocator,
    engines,
    exit_report,
    failed_rank,
    mpi,
    native,
    runtime,
    tuning,
)
from tfdist.core.deadlock.watcher import DeadlockWatcher
from tfdist.core.process_sets import add
from tfdist.core.rendezvous import (
    child_processes,
    cluster_variables,
    failure_report,
    renewal,
    settings_check,
)
from tfdist.core.rendezvous.connect import Options, connect
from tfdist.core.rendezvous.environment import (
    Placement,
    check_working_folder,
    detect,
)
from tfdist.core.rendezvous.mesh_types import Mesh
from tfdist.core.timeline import recording

_log = logging.getLogger("tfdist")
_SHUTDOWN_TIMEOUT_S = 2.0


@dataclass
class _Program:
    """Exit state of this process, kept across worlds."""

    hooks_installed: bool = False
    reported: bool = False  # the reason why the program ends was reported
    thread_failed: bool = False  # a thread did not catch a tfdist error


_program = _Program()


def init(
    *,
    timeout_s: float | None = None,
    process_sets: Iterable[Iterable[int]] = (),
) -> None:
    """Connects this process with the other ranks of its job and starts the engine.

    Rank and size of this process come from the launcher's variables (tfdistrun, mpirun,
    srun, torchrun). Without a launcher, this process is rank 0 of 1. If tfdist is
    already initialized, `init` only adds the `process_sets`. After `shutdown()`, all
    ranks may call `init` again.

    With more than one rank, `init` also sets two environment variables that make
    TensorFlow keep the memory of freed tensors (docs/memory.md). `tfdistrun` has
    already set them. With any other launcher, they have an effect only if `init` is
    called before the first tensor is created.

    Args:
        timeout_s: seconds to wait for all ranks; default `TFDIST_START_TIMEOUT_S`
            (120).
        process_sets: lists of ranks, the same on every rank. Each list becomes a
            process set, as with `add_process_set`. `process_sets()` returns the sets.

    Raises:
        tfdist.MismatchError: the ranks run different versions or settings.
        tfdist.RankFailedError: a rank failed while the ranks were connecting.
        tfdist.TimeoutError: a rank is missing; the message names it.
        tensorflow.errors.InvalidArgumentError: an environment variable is malformed, or
            the variables of two launchers contradict each other.
        ValueError: `timeout_s` is not in the range 0 < timeout_s <= 86400.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.rank()
        0
    """
    try:
        start(timeout_s=timeout_s, process_sets=process_sets)
    except native.CoreError as error:
        runtime.raise_public(error)


def start(
    *,
    timeout_s: float | None = None,
    process_sets: Iterable[Iterable[int]] = (),
) -> None:
    """As `init`, but raises `native.CoreError`, which does not need TensorFlow."""
    with runtime.lock:
        _refuse_fork()
        _install_hooks()
        if native.timeout_of(timeout_s) > 86400.0:
            raise ValueError(
                f"Expected timeout_s to be at most 86400 seconds, got {timeout_s!r}."
            )
        if runtime.state.topology is None:
            _connect(timeout_s)
        _add_sets(process_sets)


def _connect(timeout_s: float | None) -> None:
    with runtime.lock:
        rows = native.config()
        limit_s = timeout_s or rows["TFDIST_START_TIMEOUT_S"]["value"]
        check_working_folder()
        placement = detect(os.environ)
        cluster_variables.check_one_rank_per_host(placement, os.environ)
        child_processes.refuse_child(os.environ)
        engines.check_unchanged()
        is_newcomer = renewal.is_newcomer(os.environ) and runtime.state.generation == 0
        runtime.state.generation += 1
        _log.debug("rank %d of %d: %s", placement.rank, placement.size, placement)
        if placement.size == 1 or is_newcomer:
            mesh = _single_rank_mesh(runtime.state.generation)
        else:
            child_processes.note_rank(os.environ, placement)
            os.environ.update(allocator.settings(os.environ))  # if not already set
            if engines.uses_mpi():
                deadline = time.monotonic() + limit_s
                mpi.note_world(is_well=False)  # until the ranks are connected
                mpi.start(placement, runtime.state.generation, deadline)
            options = Options(
                generation=runtime.state.generation,
                timeout_s=limit_s,
                transport=rows["TFDIST_TRANSPORT"]["value"],
                shm_bytes=native.shm_bytes(),
                window_bytes=native.window_bytes(),
                rows=rows,
            )
            mesh = connect(os.environ, placement, options)
        try:
            native.start(
                mesh.topology,
                host=mesh.host,
                generation=mesh.generation,
                own_doorbell_fd=mesh.own_doorbell_fd,
                links=mesh.links,
                hosts=mesh.hosts,
                pids=mesh.pids,
                wanted_fd=mesh.on_demand.wanted_fd if mesh.on_demand else -1,
                own_window_fd=mesh.window.fd if mesh.window else -1,
                tuning=mesh.tuning.rules if mesh.tuning else (),
                tuning_hash=mesh.tuning.hash if mesh.tuning else "",
                sharing=mesh.sharing,
            )
        except native.CoreError:
            if mesh.on_demand:
                mesh.on_demand.stop()
            raise
        tuning.log(mesh.tuning, placement.rank, os.environ)
        if mesh.on_demand:
            mesh.on_demand.core_started()
        elif mesh.window:
            mesh.window.close()
        runtime.state.on_demand = mesh.on_demand
        runtime.state.credentials, runtime.state.address = (
            mesh.credentials,
            mesh.address,
        )
        runtime.state.hosts = tuple(mesh.hosts)
        runtime.state.settings = rows
        topology = _expected_topology(placement) if is_newcomer else mesh.topology
        runtime.state.topology = topology
        runtime.state.rehearses = is_newcomer
        failed_rank.begin(topology.rank)
        runtime.state.pid = os.getpid()
        runtime.state.process_sets = []
        runtime.state.reduces_gradients = runtime.state.is_between_steps = False
        if topology.size > 1:
            runtime.state.resources["deadlock watcher"] = DeadlockWatcher(
                rows["TFDIST_TIMEOUT_S"]["value"]
            )
        engine = engines.chosen()
        if engine is not None:
            _start_engine(engine, mesh, limit_s)
        folder = rows["TFDIST_TIMELINE"]["value"]
        if folder:
            _start_timeline(folder, mesh, limit_s)
        mpi.note_world(is_well=True)


def _start_engine(engine: engines.Engine, mesh: Mesh, timeout_s: float) -> None:
    """Starts the engine that moves the tensors; if this fails, every rank raises."""
    runtime.state.resources["engine"] = engine
    try:
        engine.start(mesh, timeout_s)
    except native.CoreError as error:
        native.abort(error.message)
        _disconnect()
        raise


def _start_timeline(folder: str, mesh: Mesh, timeout_s: float) -> None:
    """Begins the timelines of all ranks; if one fails, every rank raises."""
    topology = mesh.topology
    job = (
        mesh.credentials.job if mesh.credentials else f"{os.getpid()} {time.time_ns()}"
    )
    try:
        runtime.state.timeline = recording.begin(
            folder,
            topology,
            host=mesh.host,
            job=job,
            generation=mesh.generation,
            commit_gate=runtime.setting("TFDIST_ATOMIC_STEPS"),
        )
        if topology.size > 1:  # raises on all ranks if one rank failed
            native.register_gradient_list("timeline\n", [True], timeout_s=timeout_s)
            recording.share(runtime.state.timeline, topology.rank)
    except native.CoreError as error:
        native.abort(error.message)
        runtime.state.timeline = None
        _disconnect()
        raise


def start_timeline(folder: str) -> Path:
    """Begins this rank's timeline after `init`; a running timeline continues.

    Each rank must begin its own timeline, in a folder that all ranks can access.

    Returns:
        The folder of the timeline.

    Raises:
        native.CoreError: the timeline cannot be written.
    """
    with runtime.lock:
        topology = runtime.check_initialized()
        if runtime.state.timeline is None:
            runtime.state.timeline = recording.begin(
                folder,
                topology,
                host=os.uname().nodename,
                job=runtime.state.credentials.job
                if runtime.state.credentials
                else f"{os.getpid()}",
                generation=runtime.state.generation,
                commit_gate=runtime.setting("TFDIST_ATOMIC_STEPS"),
            )
        return runtime.state.timeline


def _add_sets(process_sets: Iterable[Iterable[int]]) -> None:
    if not process_sets:
        return
    for ranks in process_sets:
        add(ranks)


def _single_rank_mesh(generation: int) -> Mesh:
    topology = native.Topology(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        cross_rank=0,
        cross_size=1,
        host_of=(0,),
    )
    mesh = Mesh(topology, os.uname().nodename, generation, -1)
    mesh.tuning = settings_check.tuning_of([{"tuning": tuning.record(os.environ)}])
    return mesh


def _expected_topology(placement: Placement) -> native.Topology:
    """Returns the topology that a newcomer of an elastic job shows to its program.

    Until the newcomer joins the other ranks, its engine has only one rank. Meanwhile
    its program builds and traces everything as one of many ranks, and not as rank 0,
    which writes files.
    """
    return native.Topology(
        rank=placement.rank,
        size=placement.size,
        local_rank=placement.local_rank or 0,
        local_size=placement.size,
        cross_rank=0,
        cross_size=1,
        host_of=(0,) * placement.size,
    )


def reconnect(place: renewal.Place, timeout_s: float) -> None:
    """Leaves the generation that has ended, and connects the ranks of the next one.

    The core forgets the earlier generation: gradient lists have to be registered again
    (`collectives.signature.register_again`).

    Args:
        place: this process's place in the next generation.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        native.CoreError: another rank failed meanwhile, or did not connect in time.
    """
    with runtime.lock:
        reduces_gradients = runtime.state.reduces_gradients
        _disconnect()
        os.environ.update(place.variables(os.environ))
        runtime.state.generation = place.generation - 1
        _connect(timeout_s)
        runtime.state.reduces_gradients = reduces_gradients  # traced functions still do


def shutdown() -> None:
    """Leaves the job: notifies the other ranks and stops the engine.

    Called automatically when the process exits. Pending operations end with an error.
    Does nothing if tfdist is not initialized.

    Example:
        >>> import tfdist
        >>> tfdist.init()
        >>> tfdist.shutdown()
        >>> tfdist.is_initialized()
        False
    """
    with runtime.lock:
        if runtime.is_initialized():
            _disconnect()
            runtime.state.shutdowns += 1


def _disconnect() -> None:
    """Leaves the world of this process, if there is one, and stops the engine."""
    with runtime.lock:
        topology = runtime.state.topology
        if topology is None or runtime.state.pid != os.getpid():
            return
        _warn_if_nothing_was_reduced()
        runtime.state.topology = None
        failed_rank.end()
        for helper in runtime.state.resources.values():
            helper.close()
        runtime.state.resources.clear()
        runtime.state.credentials, runtime.state.settings = None, None
        if native.failure() is not None:
            mpi.note_world(is_well=False)
        native.stop(_SHUTDOWN_TIMEOUT_S)
        if runtime.state.on_demand is not None:
            runtime.state.on_demand.stop()
            runtime.state.on_demand = None
        if runtime.state.timeline is not None:
            _finish_timeline(runtime.state.timeline, topology)
            runtime.state.timeline = None


def _warn_if_nothing_was_reduced() -> None:
    topology = runtime.check_initialized()
    if runtime.state.reduces_gradients or topology.rank != 0:
        return
    if native.failure() is not None:
        return
    engine = engines.chosen()
    finished = engine.finished_count() if engine else native.counters()["finished"]
    text = exit_report.unreduced_training(topology.size, int(finished))
    if text is not None:
        _log.warning("%s", text)


def _finish_timeline(folder: Path, topology: native.Topology) -> None:
    trace = recording.finish(folder, topology.rank, topology.size)
    if trace is not None:
        _log.info("timeline of all ranks: %s", trace.path)


def _refuse_fork() -> None:
    if runtime.state.topology is not None and runtime.state.pid != os.getpid():
        message = runtime.fork_message()
        raise native.CoreError(
            native.FAILED_PRECONDITION,
            message,
            {"kind": "not_initialized", "cause": message},
        )


# ---- process exit ----


def _install_hooks() -> None:
    """Installs the hooks for process exit and uncaught exceptions, once."""
    if _program.hooks_installed:
        return
    _program.hooks_installed = True
    atexit.register(_leave)
    previous = sys.excepthook

    def hook(
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if hasattr(sys, "ps1"):  # at the Python prompt, the program goes on
            previous(kind, error, trace)
            return
        notice = exit_report.report_end(error, _current_rank())
        _program.reported = True
        show_full = _log.isEnabledFor(logging.DEBUG)
        if show_full or (not notice.line and not notice.traceback):
            previous(kind, error, trace)
        elif notice.traceback and previous is not sys.__excepthook__:
            previous(kind, error, trace)  # the program's own hook prints it
        elif notice.traceback:
            print(notice.traceback, end="", file=sys.stderr, flush=True)
        if notice.line:
            print(f"[tfdist] {notice.line}", file=sys.stderr, flush=True)

    sys.excepthook = hook
    previous_in_thread = threading.excepthook

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_in_thread(args)
        _record_failed_thread(args)

    threading.excepthook = thread_hook


def _current_rank() -> int | None:
    return runtime.rank() if runtime.is_initialized() else None


def _record_failed_thread(args: threading.ExceptHookArgs) -> None:
    """Treats a tfdist error that ended a thread as the end of the program.

    After other errors, the program continues in its other threads.
    """
    error = args.exc_value
    if error is not None and exit_report.to_tfdist_error(error) is not None:
        _program.thread_failed = True
        exit_report.report_end(error, _current_rank())
        _program.reported = True


def _leave() -> None:
    """Leaves the job at exit; first reports the rank at fault unless already reported.

    Python exits with code 0 even if a thread has raised. A rank that failed with a
    tfdist error must not appear to have finished, so it exits with code 1.
    """
    found = failed_rank.last()
    if found is None and runtime.is_initialized():
        failure = native.failure()
        culprit = exit_report.culprit_rank(failure, runtime.rank()) if failure else None
        if failure and culprit is not None:
            found = (culprit, failure.message)
    if found is not None and not _program.reported:
        culprit, reason = found
        failure_report.send(os.environ, {"error": reason, "blamed": culprit})
    if _program.reported:  # of a failure of the world, `shutdown` notifies mpi
        mpi.note_world(is_well=False)
    shutdown()
    mpi.finish()
    if _program.thread_failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
