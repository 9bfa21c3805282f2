"""Progress: a progress line for all ranks, with training speed in the logs."""

from __future__ import annotations

import math
import operator
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from tfdist.callbacks import _progress_rate, _progress_text
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._progress_terminal import Display
from tfdist.collectives.objects import allgather_object
from tfdist.core import engines, native, runtime
from tfdist.core.process_sets import members_of
from tfdist.core.timeline.exposed_communication import exposed_us
from tfdist.core.timeline.slowest_rank import slowest
from tfdist.core.timeline.stragglers import SLOW_RANKS, SlowRank, SlowRanks

SAMPLES_PER_S = "samples_per_s"
EXPOSED = "exposed_communication"
EPOCH_S = "epoch_s"
SLOWEST = "slowest_rank"
WAITED = "waited_for_slowest"
_WORTH_A_WORD = 0.1  # share of the step time from which the slowest rank is shown


@dataclass
class _Clock:
    """Times of this process, which an elastic `fit` therefore does not send."""

    epoch_began_s: float | None = None
    last_step_s: float | None = None  # end of the latest step


class Progress(RankCallback):
    """Shows the progress of training on all ranks in one line on rank 0.

    It replaces the progress bar of Keras, so call `fit(verbose=0)`::

        epoch 3/90  120/5004  loss 2.300  acc 0.451  1523/s  exposed 4%  ETA 20h33m

    On a terminal the line is updated in place and fits the width: less important parts
    are shortened or omitted. In a file or pipe a line is written every 10 s. At the end
    of an epoch, a line with the validation metrics remains. All numbers are explained
    in `docs/progress.md`.

    At the end of an epoch, every rank adds the same numbers to its logs (for History,
    CSVLogger and TensorBoard, which have to come after this callback):

    - `samples_per_s`: samples of all ranks per second of training, excluding validation
      and the first step of `fit`, which builds the graph;
    - `exposed_communication`: the share (0..1) of the step time in which a rank waited
      for its last gradients to be reduced, averaged over the ranks; 0 if one rank
      trains;
    - `slowest_rank`: the rank for which the other ranks waited;
    - `waited_for_slowest`: the share (0..1) of the step time in which the other ranks
      waited for the slowest rank, minus the share in which that rank itself waited; 0
      if only one rank trains;
    - `epoch_s`: duration of the epoch in seconds, including validation.

    Numbers that could not be measured in an epoch are NaN.

    After every step, the callback takes the records of finished operations from
    tfdist's C++ core (`tfdist.core.native.take_records`), so other code cannot read
    them.

    Args:
        global_batch: number of samples in one step on all ranks together. With gradient
            accumulation, the number in one micro-batch.
        unit: name of the samples in the line, in the plural, e.g. "images".
        total_epochs: epoch at which the whole training ends; default: the `epochs` of
            `fit`.
        steps_per_epoch: number of steps in a whole epoch; default: the number that
            Keras reports. If Keras does not know it, the number of steps of the first
            epoch is used from the second epoch on.
        first_step: number of steps of the first epoch that an earlier run has taken;
            needs `steps_per_epoch`. With `Elastic(start=...)` the number is known.
        every_s: seconds between two lines; default 0.25 on a terminal, otherwise 10.
        file: text stream for the line; default standard output.

    Raises:
        ValueError: an argument is invalid.
        tfdist.MismatchError: at the start of `fit`, on all ranks: the ranks' arguments
            differ.

    Example:
        >>> import keras, tfdist
        >>> log = keras.callbacks.CSVLogger("training.csv")
        >>> callbacks = [tfdist.callbacks.MetricAverage(),
        ...              tfdist.callbacks.Progress(256, unit="images"),
        ...              tfdist.callbacks.RankZeroOnly(log)]
    """

    def __init__(
        self,
        global_batch: int,
        *,
        unit: str = "samples",
        total_epochs: int | None = None,
        steps_per_epoch: int | None = None,
        first_step: int = 0,
        every_s: float | None = None,
        file: TextIO | None = None,
    ) -> None:
        super().__init__()
        self.global_batch = _count("global_batch", global_batch, 1)
        self.total_epochs = _count_or_none("total_epochs", total_epochs)
        self.steps_per_epoch = _count_or_none("steps_per_epoch", steps_per_epoch)
        self.first_step = _count("first_step", first_step, 0)
        if self.first_step >= (self.steps_per_epoch or 1) and self.first_step > 0:
            raise ValueError(
                "Expected first_step, the number of completed steps of the first "
                f"epoch, to be below steps_per_epoch, got first_step={first_step} "
                f"and steps_per_epoch={steps_per_epoch}. Pass both."
            )
        if every_s is not None and not every_s > 0:
            raise ValueError(f"Expected every_s above 0 seconds, got {every_s!r}.")
        if not isinstance(unit, str) or not unit:
            raise ValueError(
                f"Expected unit to be a name in the plural, e.g. 'images', got {unit!r}"
                "."
            )
        self.unit = unit
        self.every_s = every_s
        self._file = file
        self._display: Display | None = None
        self._done_before = self.first_step  # steps of this epoch in an earlier run
        self._known_steps: int | None = None
        self._forget()

    def _forget(self) -> None:
        """Resets the measurements of one call of `fit`."""
        self._step = self._first_batch = 0
        self._in_epoch = False
        self._is_warm = False  # the first step has ended, so the graph is built
        self._watches = False  # True if new records belong to whole steps
        self._clock = _Clock()
        self._pauses_s: list[float] = []
        self._window = _progress_rate.Window()
        self._epoch_totals = _progress_rate.Totals()
        self._epoch_cold = _progress_rate.Totals()
        self._waited_from_s = self._waited_until_s = 0.0  # as counted by the core
        self._metrics: dict[str, float] = {}

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the settings that determine the line, which only rank 0 shows."""
        return {
            "global_batch": self.global_batch,
            "total_epochs": self.total_epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "first_step": self.first_step,
        }

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model if `fit` runs."""
        if self._is_compiled:
            super().on_train_begin(logs)
        runtime.check_initialized()
        self._alone = len(members_of(self._ranks)) == 1
        self._display = None
        if runtime.rank() == self._first:
            self._display = Display(self._file or sys.stdout, self.every_s)
        self._forget()

    def on_ranks_changed(self, *, becomes_first: bool) -> None:
        """Adapts the measurements to the new ranks; a new rank 0 shows the line."""
        self._alone = len(members_of(self._ranks)) == 1
        self._waited_from_s = self._waited_until_s = 0.0
        self._watches = False
        if self._clock.epoch_began_s is None:  # joins in the middle of an epoch
            self._clock = _Clock(time.monotonic(), time.monotonic())
        if becomes_first:
            self._display = Display(self._file or sys.stdout, self.every_s)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the line."""
        if self._is_compiled:
            super().on_train_end(logs)
        if self._display is not None:
            self._display.finish()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the counts of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._step = 0
        self._epoch_totals = _progress_rate.Totals()
        self._epoch_cold = _progress_rate.Totals()
        self._waited_from_s = self._waited_until_s = 0.0
        self._metrics = {}
        self._in_epoch = True
        self._clock.epoch_began_s = time.monotonic()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Starts the clock; a later step begins where the previous one has ended."""
        if self._is_compiled:
            super().on_train_batch_begin(batch, logs)
        if self._step > 0:
            return
        self._first_batch = batch
        if batch > 0:  # an Elastic(start=...) has skipped the steps of an earlier run
            self._done_before = batch
        now_s = time.monotonic()
        if self._clock.last_step_s is not None:
            self._pauses_s[-1:] = [now_s - self._clock.last_step_s]
        self._clock.last_step_s = now_s
        if not self._alone:
            native.take_records()  # drops the records of validation and callbacks
            self._waited_from_s = self._waited_until_s = _waited_s()
        if self._display is not None and self._display.is_terminal:
            self._show(self._display, "" if self._is_warm else "first step", now_s)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts the finished steps and updates the line when it is due."""
        if self._is_compiled:
            super().on_train_batch_end(batch, logs)
        now_s = time.monotonic()
        self._count_steps(batch + 1 - self._first_batch, now_s)
        if self._display is not None and self._display.is_due(now_s):
            self._metrics = dict(logs or {})
            self._show(self._display, "", now_s)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Shows the progress of validation."""
        if self._display is None or not self._in_epoch or not self._display.is_terminal:
            return
        now_s = time.monotonic()
        if self._display.is_due(now_s):
            self._show(self._display, f"validation {batch + 1}", now_s)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the numbers of all ranks to the logs and ends the line of the epoch."""
        self._in_epoch = False
        now_s = time.monotonic()
        took_s = now_s - (self._clock.epoch_began_s or now_s)
        speed, exposed, took_s, late = self._of_all_ranks(took_s)
        logs = {} if logs is None else logs
        # Always all of these keys, because a CSVLogger writes its header only once.
        logs[EPOCH_S] = took_s
        logs[SAMPLES_PER_S] = math.nan if speed is None else speed
        logs[EXPOSED] = math.nan if exposed is None else exposed
        logs[SLOWEST], logs[WAITED] = late
        self._known_steps = self._done_before + self._step
        if self._clock.last_step_s is not None:  # the rest is added in the next epoch
            self._pauses_s.append(time.monotonic() - self._clock.last_step_s)
        if self._display is not None:
            is_last = self._epochs is not None and self._epoch + 1 >= self._epochs
            status = self._status(
                logs,
                step=self._step,
                samples_per_s=speed,
                exposed=None if self._alone else exposed,
                left_s=None if is_last else self._left_s(self._steps or 0),
                took_s=took_s,
                slowest=(int(late[0]), late[1]) if late[1] >= _WORTH_A_WORD else None,
            )
            self._display.finish(_progress_text.line(status, self._display.width))
        self._done_before = 0

    # ---- measuring ----

    def _count_steps(self, done: int, now_s: float) -> None:
        """Records that `done` steps of the epoch have ended in this run."""
        steps = self._steps
        if steps is not None:  # Keras rounds up to whole executions
            done = min(done, max(self._step + 1, steps - self._done_before))
        took_s = now_s - (self._clock.last_step_s or now_s)
        watched_s = exposed_s = 0.0
        # Until the first update is checked, the check itself needs the records.
        if self._alone:
            watched_s = took_s
        elif engines.chosen() is not None:
            pass  # the engine keeps no records, so communication is not measured
        elif self._checked or not self._is_compiled:
            exposed_s = exposed_us(native.take_records()) / 1e6
            watched_s, exposed_s = (took_s, exposed_s) if self._watches else (0.0, 0.0)
            self._watches = True
        totals = _progress_rate.Totals(done - self._step, took_s, watched_s, exposed_s)
        if self._is_warm:
            self._window.add(totals)
            self._epoch_totals = self._epoch_totals.plus(totals)
        else:
            self._epoch_cold = self._epoch_cold.plus(totals)
        if not self._alone:
            self._waited_until_s = _waited_s()
            if not self._is_warm:  # this step waited for other ranks to trace
                self._waited_from_s = self._waited_until_s
        self._is_warm = True
        self._step = done
        self._clock.last_step_s = now_s

    def _of_all_ranks(
        self, took_s: float
    ) -> tuple[float | None, float | None, float, tuple[float, float]]:
        """Returns the speed, exposed communication, duration and slowest rank."""
        own = self._epoch_totals
        if own.steps == 0:  # the epoch has at most the first step of `fit`
            own = self._epoch_cold
        share = self.global_batch / len(members_of(self._ranks))
        numbers = [own.steps * share, own.seconds, own.watched_s, own.exposed_s, took_s]
        numbers += [
            self._epoch_totals.seconds,
            self._waited_until_s - self._waited_from_s,
        ]
        shared = [numbers]
        if not self._alone:
            shared = allgather_object(
                numbers, name="Progress at the end of an epoch", process_set=self._ranks
            )
        told = zip(members_of(self._ranks), shared, strict=True)
        found = {rank: n for rank, n in told if n is not None}  # None if joined
        speed, exposed = _progress_rate.of_all_ranks([n[:4] for n in found.values()])
        late = self._late(
            {rank: n[6] for rank, n in found.items() if n[5] > 0},  # ranks with data
            max(n[5] for n in found.values()),
        )
        return speed, exposed, max(n[4] for n in found.values()), late

    def _late(self, waited_s: dict[int, float], seconds: float) -> tuple[float, float]:
        """Returns the slowest rank and the share of time that others waited for it."""
        if self._alone:
            return self._first, 0.0
        if seconds <= 0 or engines.chosen() is not None:
            return math.nan, math.nan
        rank, cost_s = slowest(waited_s)
        if rank is None:  # only one rank has data
            return min(waited_s), 0.0
        return rank, min(1.0, cost_s / seconds)

    # ---- known values ----

    @property
    def _is_compiled(self) -> bool:
        """Returns whether Keras trains the model, rather than a custom loop."""
        return bool(getattr(self.model, "compiled", False))

    @property
    def _epochs(self) -> int | None:
        """The number of epochs of the whole training."""
        return self.total_epochs or (self.params or {}).get("epochs")

    @property
    def _steps(self) -> int | None:
        """The number of steps of a whole epoch."""
        told = (self.params or {}).get("steps")
        return self.steps_per_epoch or told or self._known_steps

    def _left_s(self, step: int) -> float | None:
        """Estimates the seconds from `step` of this epoch to the end of training."""
        epochs, steps = self._epochs, self._steps
        if epochs is None or steps is None:
            return None
        later = max(0, epochs - self._epoch - 1)
        return _progress_rate.seconds_left(
            steps=later * steps + max(0, steps - step),
            steps_per_s=self._window.recent.steps_per_s,
            epoch_ends=later + self._in_epoch,
            pauses_s=self._pauses_s,
        )

    # ---- showing ----

    def _status(self, logs: dict[str, Any], **known: Any) -> _progress_text.Status:
        """Returns a status with the metrics of these logs and other known values."""
        return _progress_text.Status(
            epoch=self._epoch + 1,
            epochs=self._epochs,
            steps=self._steps,
            metrics=_ordered(logs),
            unit=self.unit,
            stragglers=_slow_ranks(),
            **known,
        )

    def _show(self, display: Display, note: str, now_s: float) -> None:
        recent = self._window.recent
        step = self._done_before + self._step
        status = self._status(
            self._metrics,
            step=step,
            samples_per_s=recent.steps_per_s and recent.steps_per_s * self.global_batch,
            exposed=None if self._alone else recent.exposed,
            left_s=self._left_s(step),
            note=note,
        )
        line = _progress_text.line(status, display.width, bar=display.bar)
        display.show(line, now_s)


def _ordered(logs: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics in the logs: the loss first, then the others."""
    own = (SAMPLES_PER_S, EXPOSED, EPOCH_S, SLOWEST, WAITED)
    names = [n for n, v in logs.items() if isinstance(v, float) and n not in own]
    return {name: logs[name] for name in sorted(names, key=lambda n: n != "loss")}


def _slow_ranks() -> tuple[SlowRank, ...]:
    """Returns the ranks that a `Stragglers` has found to be slow."""
    found = runtime.state.resources.get(SLOW_RANKS)
    return found.ranks if isinstance(found, SlowRanks) else ()


def _waited_s() -> float:
    """Returns the seconds that this rank has waited for others since `init`."""
    return float(native.counters()["waited_us"]) / 1e6


def _count(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ValueError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    return number


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _count(name, value, 1)
