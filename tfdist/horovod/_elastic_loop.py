"""Calls the function of `hvd.elastic.run` in each generation of an elastic job.

A generation lasts until a rank is lost, joins or leaves (`tfdist.core.generations`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist import collectives, errors
from tfdist.core.generations import Generations
from tfdist.elastic.sharing import (
    NEWCOMER_COMMITS,
    Newest,
    check_supported,
    enter_next,
    is_loss,
)
from tfdist.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

if TYPE_CHECKING:
    from tfdist.horovod.common.elastic import State


@dataclass
class _State:
    """Process-wide state, kept when the ranks are connected again."""

    was_called: bool = False


_state = _State()


class ElasticLoop:
    """Loop that calls the function of `hvd.elastic.run` once in each generation.

    Args:
        state: the first argument of the function.

    Raises:
        RuntimeError: a loop was created before in this process.
        ValueError: there are process sets, `TFDIST_TIMELINE` is set, or the engine is
            not the native one.
    """

    def __init__(self, state: State) -> None:
        if _state.was_called:
            raise RuntimeError(
                "A function wrapped by hvd.elastic.run was called before. In a job "
                "started with --min-np, call only one such function, and only once: a "
                "process that joins later could not determine which call the other "
                "ranks are executing."
            )
        _state.was_called = True
        check_supported()
        self._state = state
        self._generations = Generations(hides_failures=False)
        self._newest = Newest(root=0, committed=0, is_everywhere=True)
        self._has_changed = False  # whether the ranks have changed
        self._syncs = True  # whether to sync before the next call

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function until it returns on all ranks; returns its result.

        Raises:
            tfdist.RankFailedError: a rank was lost and the job cannot continue. The
                state is that of the last commit.
            SystemExit: this rank has left the job.
            Exception: any other exception of the function.
        """
        state = self._state
        is_new = self._generations.is_newcomer
        state._commits = NEWCOMER_COMMITS if is_new else 0
        self._generations.begin()
        while True:
            if is_new:
                self._enter_next_generation()
            try:
                if is_new:
                    state.on_reset()
                if self._syncs:
                    self._sync()
                state._loop = self
                result = function(state, *args, **kwargs)
                collectives.barrier(name="end of hvd.elastic.run")
                return result
            except HostsUpdatedInterrupt as interrupt:
                self._syncs = not interrupt.skip_sync
                if not isinstance(interrupt, _RanksChange):
                    self._generations.leave()
            except Exception as error:
                if not _is_loss(error):
                    raise
                self._generations.leave()
                state.restore()
                self._syncs = True
            finally:
                state._loop = None
            is_new = True

    def check_for_change(self) -> None:
        """Raises on all ranks if newcomers join or ranks leave; all ranks call it.

        Raises:
            HostsUpdatedInterrupt: the ranks are about to change.
            tfdist.RankFailedError: a rank was lost.
        """
        is_due = collectives.allreduce(
            tf.constant(self._generations.is_change_due()),
            op=collectives.ReduceOp.LOGICAL_OR,
            name="elastic.change",
        )
        if is_due:
            raise _RanksChange(skip_sync=False)

    def _enter_next_generation(self) -> None:
        state = self._state
        try:
            enter_next(
                self._generations, state._commits, state._describe(), self._share
            )
        except errors.RankFailedError:
            state.restore()  # not restored yet after an interrupt
            raise

    def _share(self, newest: Newest) -> None:
        """Decides, equally on all ranks, whether they sync and with which root."""
        self._newest, self._has_changed = newest, True
        own = tf.constant(self._syncs or not newest.is_everywhere)
        found = collectives.allreduce(
            own, op=collectives.ReduceOp.LOGICAL_OR, name="elastic.sync"
        )
        self._syncs = bool(found)

    def _sync(self) -> None:
        state = self._state
        state._newest_rank = self._newest.root
        if self._has_changed:
            state._is_newest = state._commits == self._newest.committed
        try:
            state.sync()
        finally:
            state._newest_rank, state._is_newest = 0, None
        state._commits = self._newest.committed


class _RanksChange(HostsUpdatedInterrupt):
    """The interrupt that `check_for_change` raises, on all ranks together."""


def _is_loss(error: Exception) -> bool:
    """Returns whether a rank was lost, or the function raised HorovodInternalError."""
    return isinstance(error, HorovodInternalError) or is_loss(error)
