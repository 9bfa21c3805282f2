"""The state of a training loop that continues when a rank is lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfdist import collectives, errors
from tfdist.collectives.objects import broadcast_object
from tfdist.collectives.per_rank_variables import note_broadcast
from tfdist.collectives.signature import describe_variable
from tfdist.collectives.variables import broadcast_variables
from tfdist.core import runtime
from tfdist.core.generations import Generations
from tfdist.core.weights_state import note_between_steps
from tfdist.elastic.batches import PerRankBatches
from tfdist.elastic.seeds import SeedsByRank
from tfdist.elastic.sharing import (
    NEWCOMER_COMMITS,
    Newest,
    check_arrived,
    check_supported,
    enter_next,
)
from tfdist.elastic.snapshot import Snapshot, variables_of
from tfdist.elastic.updates import update_out_of_place

_logger = logging.getLogger("tfdist")


@dataclass
class _Program:
    """Facts about the program that runs in this process."""

    was_used: bool = False  # a loop has run


_program = _Program()


class StepObserver(Protocol):
    """An object whose methods `State.steps` calls, such as a `Stragglers`."""

    def on_loop_begin(self) -> None:
        """Called when the loop begins, and when its ranks have changed."""

    def on_commit(self, committed: int) -> None:
        """Called after each committed step, on all ranks; may use an allreduce."""


class State:
    """The state of a custom training loop, which survives the loss of ranks.

    In a job started with `tfdistrun --min-np`, the other ranks continue when a rank is
    lost: they restore the state of the last committed step, reconnect, and repeat the
    step with the new number of ranks, without tracing anything again. tfdistrun starts
    a process in place of the lost one. The new process joins at a later step, and gets
    the state from another rank. In a job started in any other way, the loop runs as
    without this class, and the loss of a rank ends it.

    In a loop over `steps`, the global batch of a step has to depend only on the step,
    and be divided between the current ranks (`tfdist.data.samples_of_step`). Then every
    sample is used exactly as often as without a failure. To keep the per-rank batch
    constant instead, use `batches`.

    All ranks start with the values of rank 0. Only the random number generators of
    layers (dropout) get a different stream on each rank, derived from the seed of rank
    0, as with `tfdist.layers.broadcast_seed_generators`. The stream belongs to the
    rank, so a process that takes the place of a lost rank continues the rank's stream.

    Args:
        objects: everything that a step changes: Keras models, layers, optimizers and
            metrics, which have to be built, seed generators, and variables. A compiled
            model includes its optimizer. Pass each metric separately, including the
            metrics of `compile`.

    Raises:
        TypeError: an object is none of these.
        ValueError: an object is not built or is a metric without variables, or no
            object has variables.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> w = tf.Variable([1.0, 2.0])
        >>> state = tfdist.elastic.State(w)
        >>> for step in state.steps(2):
        ...     with tfdist.DistributedGradientTape() as tape:
        ...         loss = tf.reduce_sum(w)
        ...     _ = w.assign_sub(tape.gradient(loss, w))
        ...     _ = state.commit()
        >>> w.numpy().tolist()
        [-1.0, 0.0]
    """

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        own = variables_of(objects)
        if not own:
            raise ValueError("Expected at least one object with variables, got none.")
        self._count = len(own)
        self._seeds = SeedsByRank(own)
        self._variables = [*own, *self._seeds.variables]
        self._generations = Generations(progress=self._progress)
        self._on_preemption: Callable[[int], Any] | None = None
        self._stragglers: StepObserver | None = None
        self._committed = NEWCOMER_COMMITS if self._generations.is_newcomer else 0
        self._snapshot: Snapshot | None = None  # of an elastic job, from the first step
        self._total = 0
        self._batches: PerRankBatches | None = None
        self._running: int | None = None
        self._next = 0
        self._was_used = False
        self._were_checked = False  # the variables, after the first step

    @property
    def committed(self) -> int:
        """Number of committed steps."""
        return max(self._committed, 0)

    @property
    def position(self) -> int:
        """Number of samples, over all epochs, that `batches` has used or skipped.

        A step counts once it is committed. In a loop over `steps`, the number is 0.
        """
        return self._batches.committed if self._batches is not None else 0

    def steps(
        self,
        total: int,
        *,
        start: int = 0,
        on_preemption: Callable[[int], Any] | None = None,
        stragglers: StepObserver | None = None,
    ) -> Iterator[int]:
        """Yields the numbers of the steps to run.

        A number is yielded again if a rank was lost before the step was committed. A
        process that replaces a lost rank runs one step without the other ranks, up to
        its first `commit`, so that everything is traced before it joins. This step has
        no effect on the state.

        Leave the loop early only on all ranks after the same committed step.

        If SIGTERM is sent to a rank of an elastic job, or the job shrinks, the rank
        finishes its step and leaves: its `commit` raises SystemExit with code 143, and
        the other ranks continue after the same step. If SIGTERM is sent to tfdistrun,
        or too few ranks would be left, all ranks call `on_preemption` after the same
        step and then exit in the same way. So the code after the loop runs only when
        all steps are done. If the program has its own handler for SIGTERM, the signal
        only calls this handler. See docs/preemption.md.

        Args:
            total: number of steps of the whole training, at least 0; equal on all
                ranks.
            start: number of steps that an earlier job has done, e.g. the result of
                `tfdist.restore`; default 0. All ranks use the value of rank 0.
            on_preemption: function that saves the state, with the number of committed
                steps as argument. All ranks call it, and it may use collective
                operations. Default: nothing is saved.
            stragglers: a `tfdist.callbacks.Stragglers`, which names slow ranks and may
                replace them. Default: the speed of the ranks is not compared.

        Raises:
            ValueError: 0 <= start <= total does not hold; or `stragglers` replaces
                ranks, and the job is not elastic; or the job is elastic, and there are
                process sets, `TFDIST_TIMELINE` is set, or the engine is not native.
            RuntimeError: a loop over `steps` or `batches` of this object has already
                run, or, in an elastic job, such a loop of any `State`. (A process that
                joins later could not know in which loop the other ranks are.)
            tfdist.RankFailedError: a rank was lost and the job cannot continue; the
                message says why. The variables have the values of the last commit.
            SystemExit: with code 143: this rank leaves (SIGTERM, the job shrinks, or
                it was slow and has been replaced), or the whole job was preempted.
        """
        if not 0 <= start <= total:
            raise ValueError(
                f"Expected 0 <= start <= total, got start {start}, total {total}."
            )
        self._check_first_loop()
        self._total = total
        self._on_preemption = on_preemption
        self._stragglers = stragglers
        yield from self._run(start)

    def batches(
        self,
        total: int,
        *,
        per_rank_batch: int,
        epochs: int,
        seed: int,
        start: int = 0,
        on_preemption: Callable[[int], Any] | None = None,
        stragglers: StepObserver | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the indices of this rank's `per_rank_batch` samples for each step.

        Use it in place of `steps` to keep the per-rank batch constant: with more ranks,
        a step uses more samples, and an epoch has fewer steps. Each epoch uses the
        samples in the order of `tfdist.data.epoch_order`, each at most once, however
        often the ranks change. Samples at the end of an epoch that are too few for a
        step of the current ranks are skipped. If the job grows in the last epoch, and
        the remaining samples are then too few for a step, the last step takes its
        samples from one more epoch.

        The loss of ranks, their replacement and preemption are handled as in `steps`.

        Args:
            total: number of samples. This and the next three arguments must be equal on
                all ranks.
            per_rank_batch: number of samples of one rank in a step.
            epochs: number of passes over the samples, at least 0.
            seed: seed of the order of the samples, 0..2**64 - 1.
            start: the `position` at which an earlier job has ended; default 0. All
                ranks use the value of rank 0.
            on_preemption: as in `steps`; the function should also save `position`.
            stragglers: as in `steps`.

        Returns:
            Iterator over int64 arrays of shape `[per_rank_batch]`, the indices of the
            samples.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: an argument is out of range, there are too few samples for one
                step of the largest number of ranks, or as in `steps`.
            RuntimeError: as in `steps`.
            tfdist.RankFailedError: as in `steps`.
            SystemExit: as in `steps`.

        Example:
            >>> import tensorflow as tf, tfdist
            >>> tfdist.init()
            >>> state = tfdist.elastic.State(tf.Variable(0.0))
            >>> for rows in state.batches(8, per_rank_batch=4, epochs=1, seed=1):
            ...     print(rows, state.commit(), state.position)
            [3 5 2 7] True 4
            [0 6 1 4] True 8
        """
        batches = PerRankBatches(
            total, batch=per_rank_batch, epochs=epochs, seed=seed, start=start
        )
        self._check_first_loop()
        self._batches = batches
        self._variables.append(batches.variable)
        self._on_preemption = on_preemption
        self._stragglers = stragglers
        with contextlib.closing(self._run(0)) as steps:
            for _ in steps:
                yield batches.begin_step()

    def commit(self) -> bool:
        """Commits a step: after this, the loss of a rank does not undo the step.

        A step that does not call `commit` is committed by the next call; until then,
        the loss of a rank undoes it. Use the results of a step (to decide, print or
        write) only after the call, and only if it returns True: results of a step that
        is undone are wrong.

        Returns:
            True if the step is committed. False if it was undone: `steps` yields its
            number again, and `batches` continues from the last commit.

        Raises:
            RuntimeError: `commit` was called outside a loop over `steps` or `batches`,
                or twice in a step; or, in an elastic job, the number of the objects'
                variables has changed since the State was created.
            tfdist.RankFailedError: a rank was lost and the job cannot continue.
            SystemExit: with code 143: this rank leaves, or the whole job was preempted
                (see `steps`).
        """
        if self._running is None:
            raise RuntimeError(
                "State.commit() was called outside of a loop over state.steps(...) or "
                "state.batches(...), or a second time in a step."
            )
        step, self._running = self._running, None
        if self._snapshot is None:
            self._note_commit(step)
            return True
        if not self._were_checked:
            self._check_variables()
        if self._generations.is_newcomer:
            self._enter_next_generation(self._snapshot)
            return False
        if not self._generations.is_step_valid():
            self._enter_next_generation(self._snapshot)
            # Another rank may have committed the step before the loss.
            return self._committed > step
        self._snapshot.save()
        note_between_steps()
        self._note_commit(step)
        if self._generations.ends_after_commit():
            self._enter_next_generation(self._snapshot)
        return True

    def _progress(self) -> tuple[int, int]:
        """Returns the numbers of committed steps and of all steps.

        In a loop over `batches`, the second number only shows whether more steps
        follow: it is then larger than the first.
        """
        if self._batches is None:
            return self.committed, self._total
        return self.committed, self.committed + (not self._batches.is_over())

    def _note_commit(self, step: int) -> None:
        self._committed = step + 1
        if self._batches is not None:
            self._batches.note_commit()
        if self._stragglers is not None:
            self._stragglers.on_commit(self._committed)

    def _check_variables(self) -> None:
        self._were_checked = True
        found = len(variables_of(self._objects))
        if found != self._count:
            raise RuntimeError(
                f"Expected the {self._count} variables that the objects had when the "
                f"State was created, found {found}. Create all variables before "
                "State(...): build the models, layers and optimizers."
            )

    def _check_first_loop(self) -> None:
        if self._was_used or (self._generations.is_elastic and _program.was_used):
            raise RuntimeError(
                "A loop over State.steps() or State.batches() has already run in this "
                "program. Run all steps of the training in one loop."
            )
        self._was_used = True
        _program.was_used = True

    def _begin(self, start: int) -> None:
        runtime.check_initialized()
        if self._generations.is_elastic:
            check_supported()
        if self._generations.is_newcomer:
            note_broadcast(self._variables)  # tracing depends on it
            self._next = start
        else:
            broadcast_variables(self._variables)
            self._next = self._committed = broadcast_object(start)
            if self._batches is not None:
                self._batches.note_commit()  # the position of rank 0
        self._seeds.set_for_rank()
        if self._generations.is_elastic:
            update_out_of_place(self._objects)
            self._snapshot = Snapshot(self._variables)
            self._generations.begin()
            note_between_steps()
        if self._stragglers is not None:
            self._stragglers.on_loop_begin()

    def _run(self, start: int) -> Generator[int, None, None]:
        """Yields the numbers of the steps, from the beginning to the end of the loop.

        Args:
            start: number of steps that an earlier job has done.
        """
        self._begin(start)
        try:
            yield from self._run_all()
        finally:
            self._generations.end()
            self._running = None
        self._generations.raise_late_signal()

    def _has_next(self) -> bool:
        if self._batches is not None:
            return self._batches.has_next()
        return self._next < self._total

    def _run_all(self) -> Iterator[int]:
        while True:
            while self._has_next():
                self._running = self._next
                self._next += 1
                note_between_steps(False)
                yield self._running
                if self._snapshot is not None and self._generations.has_ended():
                    self._enter_next_generation(self._snapshot)
            if self._snapshot is None or self._all_have_finished(self._snapshot):
                return

    def _all_have_finished(self, snapshot: Snapshot) -> bool:
        """Waits for the other ranks; returns False if one was lost meanwhile."""
        try:
            collectives.barrier(name="end of the elastic loop")
        except errors.RankFailedError:
            self._enter_next_generation(snapshot)
            return False
        return True

    # ---- from one generation to the next ----

    def _enter_next_generation(self, snapshot: Snapshot) -> None:
        snapshot.restore()
        lines = [describe_variable(v) for v in self._variables]
        work = f"{self._total} steps"
        if self._batches is not None:
            work = self._batches.describe()
        enter_next(
            self._generations,
            self._committed,
            [*lines, work],
            lambda newest: self._share(snapshot, newest),
        )
        note_between_steps()
        self._running, self._next = None, self.committed
        if self._generations.is_last:
            if self._on_preemption is not None:
                self._on_preemption(self.committed)
            self._generations.exit_preempted()
        if self._stragglers is not None:
            self._stragglers.on_loop_begin()

    def _share(self, snapshot: Snapshot, newest: Newest) -> None:
        """Gives all ranks the state of `newest.root`, if not all ranks have it."""
        snapshot.restore()  # a rank may have been lost in an earlier call
        if not newest.is_everywhere:
            self._copy_state(newest.root)
        self._seeds.set_for_rank()
        snapshot.save()
        self._committed = newest.committed
        if self._batches is not None:
            self._batches.note_commit()

    def _copy_state(self, root: int) -> None:
        begin_s = time.monotonic()
        broadcast_variables(self._variables, root)
        check_arrived(self._variables, root)
        seconds = time.monotonic() - begin_s
        _logger.info("state copied from rank %d in %.3f s", root, seconds)
