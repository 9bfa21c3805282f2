"""init, shutdown, rank, size and what was built, by Horovod's names."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import tfdist
from tfdist.core import runtime
from tfdist.horovod._environment import adopt_variables
from tfdist.horovod._warnings import warn_once
from tfdist.horovod.common import process_sets as _sets
from tfdist.horovod.common import timeline as _timeline
from tfdist.horovod.common.process_sets import ProcessSet, check_initialized
from tfdist.horovod.common.reduce_ops import ReduceOps


class HorovodBasics:
    """The functions that every framework of Horovod has; `basics` is the one object.

    Example:
        >>> from tfdist.horovod.common.basics import basics
        >>> basics.init()
        >>> basics.rank(), basics.size()
        (0, 1)
    """

    Average, Sum, Adasum, Min, Max, Product = ReduceOps

    def init(
        self,
        comm: Any = None,
        process_sets: Sequence[ProcessSet] | str | None = None,
    ) -> None:
        """Connects the ranks. Does nothing but add the sets when they are connected.

        Args:
            comm: None or an empty list: all ranks. A list of all ranks, or an mpi4py
                communicator in which this process has the same rank and size, says
                the same.
            process_sets: sets to bind; or "dynamic": sets are added later, which
                needs no setting here.

        Raises:
            ValueError: `comm` names some of the ranks only, a set is given twice, or a
                HOROVOD_* variable has a value that means nothing.
            TypeError: something in `process_sets` is no `ProcessSet`.
            tf.errors.FailedPreconditionError: the ranks run different versions.
            tf.errors.DeadlineExceededError: a rank is missing.
        """
        adopt_variables()
        tfdist.init()
        _check_communicator(comm)
        _sets.bind(_listed(process_sets))

    def shutdown(self) -> None:
        """Leaves the job."""
        tfdist.shutdown()

    def is_initialized(self) -> bool:
        """Whether `init()` has been called, and `shutdown()` not since."""
        return tfdist.is_initialized()

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Writes what happens from now on, for `tfdist timeline` and Perfetto.

        Every rank calls it. The trace is put together when the last rank ends.

        Args:
            file_path: the folder `file_path` + ".d" gets the parts and the trace. A run
                has one: with `TFDIST_TIMELINE=<folder>`, or after another
                `start_timeline`, it goes on in that, and a warning says so.
            mark_cycles: there are no cycles to mark: True warns.

        Raises:
            ValueError: before `hvd.init()`.
            tf.errors.InvalidArgumentError: the folder cannot be written.
        """
        check_initialized()
        if mark_cycles:
            warn_once(
                "start_timeline(mark_cycles=True): tfdist works when tensors come, not "
                "in cycles, so there are none to mark."
            )
        _timeline.start(file_path)

    def stop_timeline(self) -> None:
        """Marks in the trace where the part that was asked for ends.

        What follows until `shutdown()` is written too.

        Raises:
            ValueError: before `hvd.init()`.
        """
        check_initialized()
        _timeline.stop()

    def size(self) -> int:
        """Number of ranks; ValueError before `init()`."""
        check_initialized()
        return tfdist.size()

    def rank(self) -> int:
        """Index of this process: 0 <= rank < size; ValueError before `init()`."""
        check_initialized()
        return tfdist.rank()

    def local_size(self) -> int:
        """Number of ranks on this host; ValueError before `init()`."""
        check_initialized()
        return tfdist.local_size()

    def local_rank(self) -> int:
        """Index among the ranks of this host; ValueError before `init()`."""
        check_initialized()
        return tfdist.local_rank()

    def cross_size(self) -> int:
        """Number of hosts that have this local rank; ValueError before `init()`."""
        check_initialized()
        return tfdist.cross_size()

    def cross_rank(self) -> int:
        """Index among the ranks of equal local rank; ValueError before `init()`."""
        check_initialized()
        return tfdist.cross_rank()

    def is_homogeneous(self) -> bool:
        """Whether every host has as many ranks; ValueError before `init()`."""
        check_initialized()
        hosts = runtime.check_initialized().host_of
        return len(set(collections.Counter(hosts).values())) == 1

    # What was built. Scripts ask to choose how they start and whom they talk to: the
    # answer "Gloo" is that of a world that needs no MPI, over TCP and shared memory.

    def mpi_built(self) -> bool:
        """False: tfdist neither needs nor uses MPI."""
        return False

    def mpi_enabled(self) -> bool:
        """False, also under `mpirun`, which may start the ranks."""
        return False

    def mpi_threads_supported(self) -> bool:
        """Always an error, as of a Horovod without MPI.

        Raises:
            ValueError: there is no MPI.
        """
        raise ValueError(
            "MPI is not enabled: tfdist has its own transport. Ask hvd.mpi_enabled() "
            "first."
        )

    def gloo_built(self) -> bool:
        """True: ranks find each other without MPI, which scripts ask by this name."""
        return True

    def gloo_enabled(self) -> bool:
        """True, as `gloo_built`."""
        return True

    def nccl_built(self) -> int:
        """0: no NCCL; gradients are reduced on the CPU."""
        return 0

    def ddl_built(self) -> bool:
        """False."""
        return False

    def ccl_built(self) -> bool:
        """False."""
        return False

    def cuda_built(self) -> bool:
        """False: the collectives use no CUDA (TensorFlow may)."""
        return False

    def rocm_built(self) -> bool:
        """False."""
        return False

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        check_initialized()
        return _sets.ids_and_ranks()


def _listed(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                "Expected process_sets to be a list of hvd.ProcessSet, or 'dynamic', "
                f"got {process_sets!r}."
            )
        return []
    return list(process_sets)


def _check_communicator(comm: Any) -> None:
    """Raises ValueError unless `comm` stands for all ranks, in their order."""
    size, rank = tfdist.size(), tfdist.rank()
    if comm is None:
        return
    if isinstance(comm, Iterable):
        listed = list(comm)
        if listed and listed != list(range(size)):
            raise ValueError(
                f"Expected comm=None or all ranks 0..{size - 1}, got {listed}. For "
                "some of the ranks start only those, or make a process set: "
                "hvd.init(process_sets=[hvd.ProcessSet([...])])."
            )
    elif not hasattr(comm, "Get_rank") or not hasattr(comm, "Get_size"):
        raise ValueError(
            "Expected comm to be a list of ranks or an mpi4py communicator, got "
            f"{comm!r}."
        )
    elif (comm.Get_rank(), comm.Get_size()) != (rank, size):
        raise ValueError(
            f"Expected a communicator in which this process is rank {rank} of {size}, "
            f"got rank {comm.Get_rank()} of {comm.Get_size()}. Leave comm out, or make "
            "a process set: hvd.init(process_sets=[hvd.ProcessSet([...])])."
        )


basics = HorovodBasics()
