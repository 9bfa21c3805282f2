"""init, shutdown, rank, size and build queries, with Horovod's names."""

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
    """Functions common to all of Horovod's frameworks; `basics` is the only instance.

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
        """Connects the ranks and adds process sets; may be called again to add more.

        Args:
            comm: None or an empty list: all ranks. Also accepted are a list of all
                ranks, and an mpi4py communicator in which this process has the same
                rank and size.
            process_sets: process sets to create; or "dynamic": sets are added later,
                which tfdist always allows.

        Raises:
            ValueError: `comm` contains only some of the ranks, a set is given twice, or
                a HOROVOD_* variable has an invalid value.
            TypeError: an entry of `process_sets` is not a `ProcessSet`.
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
        """Returns whether `init()` has been called, and `shutdown()` not yet."""
        return tfdist.is_initialized()

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Starts a timeline for `tfdist timeline` and Perfetto.

        Every rank must call this method. The ranks' parts are assembled into one trace
        when the last rank exits.

        Args:
            file_path: the parts and the trace are written to the folder `file_path` +
                ".d". A run has one folder: if `TFDIST_TIMELINE=<folder>` is set, or
                after an earlier `start_timeline`, the trace continues in the existing
                folder, with a warning unless it is the same folder.
            mark_cycles: ignored; True causes a warning, since tfdist has no cycles.

        Raises:
            ValueError: `hvd.init()` has not been called, or the job is elastic.
            tf.errors.InvalidArgumentError: the folder is not writable.
        """
        check_initialized()
        if mark_cycles:
            warn_once(
                "start_timeline(mark_cycles=True): tfdist processes tensors when they "
                "arrive, not in cycles, so there are no cycles to mark."
            )
        _timeline.start(file_path)

    def stop_timeline(self) -> None:
        """Marks the interval since `start_timeline` in the trace.

        The trace itself continues: events until `shutdown()` are still written.

        Raises:
            ValueError: `hvd.init()` has not been called.
        """
        check_initialized()
        _timeline.stop()

    def size(self) -> int:
        """Returns the number of ranks; ValueError before `init()`."""
        check_initialized()
        return tfdist.size()

    def rank(self) -> int:
        """Returns this process's rank, 0 <= rank < size; ValueError before `init()`."""
        check_initialized()
        return tfdist.rank()

    def local_size(self) -> int:
        """Returns the number of ranks on this host; ValueError before `init()`."""
        check_initialized()
        return tfdist.local_size()

    def local_rank(self) -> int:
        """Returns the rank among the ranks of this host; ValueError before `init()`."""
        check_initialized()
        return tfdist.local_rank()

    def cross_size(self) -> int:
        """Returns how many hosts have this local rank; ValueError before `init()`."""
        check_initialized()
        return tfdist.cross_size()

    def cross_rank(self) -> int:
        """Returns the index of this host among the hosts with this local rank.

        Raises:
            ValueError: before `init()`.
        """
        check_initialized()
        return tfdist.cross_rank()

    def is_homogeneous(self) -> bool:
        """Returns whether all local sizes are equal; ValueError before `init()`."""
        check_initialized()
        hosts = runtime.check_initialized().host_of
        return len(set(collections.Counter(hosts).values())) == 1

    # Build queries, which scripts call to choose a launcher and a transport. "Gloo"
    # stands for communication over TCP and shared memory, without MPI.

    def mpi_built(self) -> bool:
        """Returns False: tfdist neither needs nor uses MPI."""
        return False

    def mpi_enabled(self) -> bool:
        """Returns False, even if `mpirun` has started the ranks."""
        return False

    def mpi_threads_supported(self) -> bool:
        """Raises an error, as Horovod does without MPI.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "MPI is not enabled: tfdist has its own transport. Check hvd.mpi_enabled() "
            "first."
        )

    def gloo_built(self) -> bool:
        """Returns True: "Gloo" stands for communication without MPI."""
        return True

    def gloo_enabled(self) -> bool:
        """Returns True, like `gloo_built`."""
        return True

    def nccl_built(self) -> int:
        """Returns 0: tfdist does not use NCCL; gradients are reduced on the CPU."""
        return 0

    def ddl_built(self) -> bool:
        """Returns False."""
        return False

    def ccl_built(self) -> bool:
        """Returns False."""
        return False

    def cuda_built(self) -> bool:
        """Returns False: collectives do not use CUDA (TensorFlow itself may)."""
        return False

    def rocm_built(self) -> bool:
        """Returns False."""
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
    """Raises ValueError unless `comm` contains all ranks, in rank order."""
    size, rank = tfdist.size(), tfdist.rank()
    if comm is None:
        return
    if isinstance(comm, Iterable):
        listed = list(comm)
        if listed and listed != list(range(size)):
            raise ValueError(
                f"Expected comm=None or all ranks 0..{size - 1}, got {listed}. To use "
                "only some of the ranks, start only those, or create a process set: "
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
            f"got rank {comm.Get_rank()} of {comm.Get_size()}. Omit comm, or "
            "create a process set: hvd.init(process_sets=[hvd.ProcessSet([...])])."
        )


basics = HorovodBasics()
