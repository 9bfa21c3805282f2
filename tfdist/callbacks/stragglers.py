"""Stragglers: reports ranks that are slower than the others, and can replace them."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._own_work import OwnWork, exchange
from tfdist.callbacks._progress_text import duration, straggler
from tfdist.callbacks.uneven_data import UnevenData
from tfdist.core import engines, generations, runtime
from tfdist.core.rendezvous import renewal
from tfdist.core.timeline.stragglers import (
    SLOW_RANKS,
    SlowRank,
    SlowRanks,
    Standing,
    compare,
    steps_to_next,
)

_logger = logging.getLogger("tfdist")
_ASK_AGAIN_S = 60.0


class Stragglers(RankCallback):
    """Reports ranks that are slower than the others, and replaces them if asked to.

    All ranks take the same time for a step, because they wait for the slowest one.
    Therefore this callback compares the time of each rank's own work: computation, data
    loading and callbacks, but not the time spent waiting for operations of tfdist. A
    rank is slow if its work takes at least `factor` times as long as that of the median
    rank, and the others lose at least 10 % of their time because of it. (If the number
    of ranks is even, the median is the lower of the two in the middle; of two ranks,
    the slower one is compared with the faster one.)

    When a rank has been slow for `seconds`, the lowest rank logs one warning, and
    `Progress` shows the slow rank::

        rank 3 (host b) has been 2.1 times slower than the median for 40s

    When the rank has kept up with the others again for `seconds`, this is logged as
    well. A single pause, such as saving a file, is not reported. The first step,
    validation, and the time between two epochs are not compared.

    The ranks compare their times in one reduction of 24 bytes per rank, about every 5 s
    (more often if `seconds` is below 30). There is no communication in the other steps.

    In a loop over `steps` or `batches` of a `tfdist.elastic.State`, pass this object as
    `stragglers`. In any other custom loop, call the hooks through a
    `keras.callbacks.CallbackList`.

    Args:
        factor: a rank is slow if its work takes at least `factor` times as long as that
            of the median rank; above 1; default 1.5.
        seconds: seconds for which a rank has to be slow before it is reported; above 0;
            default 30.
        replace: whether a slow rank is replaced, in an elastic job (`tfdistrun
            --min-np`). tfdistrun starts a new process, on the same host if the job has
            only one. When the new process is ready, the slow rank exits after a step,
            as after SIGTERM, and the new process continues in its place. At most one
            rank in ten minutes is replaced, so that a rank that is slow because of its
            host is not replaced again and again.
        batch: number of samples of this rank in a step; pass it on all ranks or on
            none. With it, times are compared per sample, so that a rank with larger
            batches does not count as slow. Default: all ranks have the same number.

    Raises:
        ValueError: an argument is invalid. Before the first step: `replace` is True,
            and the job is not elastic.
        NotImplementedError: before the first step: `replace` is True, but this rank
            cannot hand over to another process (it runs neither `fit` with `Elastic`
            nor a loop over `State.steps`); or `TFDIST_ENGINE` selects an engine other
            than tfdist's core.
        tfdist.MismatchError: at the start of `fit`, on all ranks: the ranks' arguments
            differ.

    Example:
        >>> import tfdist
        >>> callbacks = [tfdist.callbacks.MetricAverage(),
        ...              tfdist.callbacks.Stragglers(factor=2, seconds=60),
        ...              tfdist.callbacks.Progress(256)]
    """

    def __init__(
        self,
        *,
        factor: float = 1.5,
        seconds: float = 30.0,
        replace: bool = False,
        batch: int | None = None,
    ) -> None:
        super().__init__()
        self.factor = _number("factor", factor, 1.0)
        self.seconds = _number("seconds", seconds, 0.0)
        if replace not in (True, False):
            raise ValueError(f"Expected replace=True or False, got {replace!r}.")
        self.replace = replace
        self.batch = None if batch is None else _number("batch", batch, 0.0)
        self._work = OwnWork()
        self._is_compiled = False  # whether Keras trains the model, not a custom loop
        self._steps: int | None = None  # in an epoch, the same number on all ranks
        self._starts_each_epoch = False
        self._restart()

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the settings with which the ranks decide together."""
        return {
            "factor": self.factor,
            "seconds": self.seconds,
            "replace": self.replace,
            "batch": "given" if self.batch is not None else None,
        }

    @property
    def meets_at_steps(self) -> bool:
        """Returns True, because the ranks wait for each other after some steps."""
        return True

    # ---- hooks of fit ----

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model if `fit` runs, and whether slow ranks can be replaced."""
        self._is_compiled = bool(getattr(self.model, "compiled", False))
        if self._is_compiled:
            super().on_train_begin(logs)
        self._check()
        self._starts_each_epoch = any(isinstance(c, UnevenData) for c in self._listed)
        steps = (self.params or {}).get("steps")
        self._steps = None if self._starts_each_epoch else steps
        self._restart()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Discards the measurements; in `fit`, also undoes changes to the model."""
        self._forget()
        if self._is_compiled:
            super().on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restarts with `UnevenData`, because ranks may have missed comparisons."""
        super().on_epoch_begin(epoch, logs)
        if self._starts_each_epoch:
            self._restart()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Starts the clock in the first step of an epoch."""
        if self._is_compiled:
            super().on_train_batch_begin(batch, logs)
        if self._compared_at is None:
            self._check_handover()
        else:
            self._work.resume()

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts the step, and compares the ranks when a comparison is due."""
        if self._is_compiled:
            super().on_train_batch_end(batch, logs)
        self._count += 1
        if self._steps is None:
            self._end_step(self._count)
            return
        # Not self._count: after the loss of a rank, it may differ between the ranks.
        self._end_step(self._epoch * self._steps + batch + 1)
        if batch + 1 >= self._steps:
            self._work.pause()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        self._work.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        self._work.pause()

    def on_ranks_changed(self, *, becomes_first: bool) -> None:
        """Discards measurements, but keeps the step of the next comparison."""
        self._forget()

    # ---- hooks of an elastic loop ----

    def on_loop_begin(self) -> None:
        """Called when a loop over `State.steps` begins, and when its ranks change."""
        self._check()
        self._check_handover()
        self._restart()

    def on_commit(self, committed: int) -> None:
        """Called after each committed step of a loop over `State.steps`.

        Args:
            committed: number of committed steps.
        """
        self._end_step(committed)
        self._work.resume()

    # ---- comparing ----

    def _restart(self) -> None:
        """Discards measurements and the times of comparisons."""
        self._count = 0
        self._compared_at: int | None = None  # last compared step; None: no step yet
        self._compares_at = 0  # step of the next comparison
        self._forget()
        self._is_partial = False

    def _forget(self) -> None:
        """Discards measurements, and shows no rank as slow."""
        self._work.reset()
        self._is_partial = True  # the ranks may begin to measure at different steps
        self._standings: dict[int, Standing] = {}
        self._asked_s: float | None = None
        shown = runtime.state.resources.get(SLOW_RANKS)
        if isinstance(shown, SlowRanks):
            shown.ranks = ()

    def _end_step(self, step: int) -> None:
        """Handles the end of a step, whose number is the same on all ranks."""
        if self._compared_at is None:  # the first step traces
            self._compared_at, self._compares_at = step, step + 1
        elif step >= self._compares_at:
            self._compare(step)

    def _compare(self, step: int) -> None:
        times = exchange(self._work.take(self.batch or 1.0), self._ranks)
        elapsed_s = max(one.elapsed_s for one in times.values())
        steps = step - (self._compared_at or 0)
        self._compared_at = step
        self._compares_at = step + steps_to_next(steps, elapsed_s, self.seconds)
        is_partial, self._is_partial = self._is_partial, False
        if is_partial:
            return
        before = self._standings
        self._standings = compare(
            before, times, factor=self.factor, seconds=self.seconds
        )
        self._report(before)
        self._ask_for_replacement()

    def _report(self, before: dict[int, Standing]) -> None:
        """Logs changes on the first rank, and shows slow ranks to `Progress`."""
        slow = [_named(r, s) for r, s in self._standings.items() if s.is_slow]
        slow.sort(key=lambda one: -one.factor)
        shown = runtime.get_resource(SLOW_RANKS, SlowRanks)
        shown.ranks = tuple(slow)
        if runtime.rank() != self._first:
            return
        for rank, standing in self._standings.items():
            if standing.is_slow == before.get(rank, Standing()).is_slow:
                continue
            found = _named(rank, standing)
            if standing.is_slow:
                _logger.warning("%s%s", straggler(found), self._advice())
            else:
                _logger.info(
                    "rank %d (host %s) is as fast as the others again; it was %.1f "
                    "times slower than the median for %s",
                    *(rank, found.host, found.factor, duration(found.seconds)),
                )

    def _advice(self) -> str:
        if self.replace:
            return "; tfdistrun is asked to replace it"
        return (
            ", and the other ranks wait for it. Possible reasons are slow data, "
            "callbacks that run on this rank only, other programs on its host, and a "
            "slow or hot processor."
        )

    # ---- replacing ----

    def _check(self) -> None:
        runtime.check_initialized()
        if engines.chosen() is not None:
            raise NotImplementedError(
                "Stragglers needs the native engine, which measures how long a rank "
                "waits. Unset TFDIST_ENGINE, or remove Stragglers."
            )
        if self.replace and not renewal.is_elastic(os.environ):
            raise ValueError(
                "Stragglers(replace=True) replaces ranks of an elastic job, and this "
                "job is not elastic. Start it with tfdistrun --min-np, or omit replace."
            )

    def _check_handover(self) -> None:
        if self.replace and not generations.can_hand_over():
            raise NotImplementedError(
                "Stragglers(replace=True) needs training that can hand over to another "
                "process: fit with tfdist.callbacks.Elastic, or `for step in "
                "tfdist.elastic.State(...).steps(total, stragglers=...)`. Use one of "
                "them, and no handler of your own for SIGTERM, or omit replace."
            )

    def _ask_for_replacement(self) -> None:
        """Asks tfdistrun to replace this rank if it is slow, at most once a minute."""
        own = self._standings.get(runtime.rank(), Standing())
        if not (self.replace and own.is_slow):
            self._asked_s = None
            return
        now_s = time.monotonic()
        if self._asked_s is None or now_s >= self._asked_s + _ASK_AGAIN_S:
            self._asked_s = now_s
            renewal.ask_to_leave(os.environ, is_slow=True)


def _named(rank: int, standing: Standing) -> SlowRank:
    return SlowRank(rank, runtime.host_of(rank), standing.factor, standing.slow_s)


def _number(name: str, value: Any, above: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value < float("inf"):
        raise ValueError(
            f"Expected {name} to be a number above {above:g}, got {value!r}."
        )
    return float(value)
