"""StopOnSignal: a signal to any rank ends all ranks at the same step, and saves."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from tfdist import _runtime
from tfdist._process_sets import members_of
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._listing import is_in_fit
from tfdist.callbacks.checkpoint import Checkpoint, LastLogs, between_updates
from tfdist.collectives import ReduceOp, allreduce

_logger = logging.getLogger("tfdist")


class StopOnSignal(RankCallback):
    """Saves a checkpoint at the current step when the job is asked to end, and exits.

    Batch systems and clouds send a signal some seconds before they take a machine away;
    Ctrl-C in `tfdistrun` reaches all ranks likewise. The step that is running is
    finished, all ranks agree on it, the checkpoint is saved, and every rank leaves
    `fit` by `SystemExit` with 128 + the signal's number, as a shell would say it. No
    validation, no end of the epoch: seconds count. A signal while validation is running
    ends the job when that is done and the epoch with it: put this callback last (or
    before `StopTogether`), after those that save and write at the end of an epoch. When
    the data of a rank have ended (`UnevenData`) it cannot save with the others: then a
    signal ends the epoch on all ranks, and the job with it. A second signal has the
    effect that it had before this callback.

    It costs one reduction of a single number after each step and each epoch.

    Args:
        checkpoint: saves; it need not be in the list of callbacks itself. Its
            `save_best_only` has to be False: a stop is not a choice. What has no value
            at that step, as `{val_loss}`, is "none" in the name of the file.
        signals: numbers of the signals; default SIGTERM, SIGINT and SIGUSR1 (Slurm's
            `--signal=USR1@60` sends that one). They are handled during `fit` only,
            also when it ends with an error; a loop of your own calls `on_train_end`.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: `checkpoint` keeps the best only; or, at the start of `fit`, this is
            not the main thread, which alone can handle signals.
        SystemExit: on all ranks, after the checkpoint is saved.

    Example:
        >>> import tfdist
        >>> latest = tfdist.callbacks.Checkpoint("latest-{step}.keras", keep=2)
        >>> callbacks = [latest, tfdist.callbacks.StopOnSignal(latest)]
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        if checkpoint.save_best_only:
            raise ValueError(
                "Expected a Checkpoint that saves whatever there is, got one with "
                "save_best_only=True. Give StopOnSignal a Checkpoint of its own."
            )
        self.checkpoint = checkpoint
        self.signals = tuple(signals)
        self.timeout_s = timeout_s
        self._received = 0
        self._before: dict[int, Any] = {}
        self._is_of_fit = False

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Which signals are waited for."""
        return {"signals": [int(number) for number in self.signals]}

    @property
    def meets_at_steps(self) -> bool:
        """After each."""
        return True

    def set_model(self, model: Any) -> None:
        """Gives the model to the checkpoint too, which may not be in the list."""
        super().set_model(model)
        self.checkpoint.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to listen."""
        self._give_back()  # a fit that raised has not
        super().on_train_begin(logs)
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "tfdist.callbacks.StopOnSignal needs the main thread, which alone "
                "handles signals in Python. Call fit there, or leave it out."
            )
        self._received = 0
        self._is_of_fit = is_in_fit(self.model)
        for number in self.signals:
            self._give_back_of_another(number)
            # None: a handler that was not set by Python, and cannot be set again.
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._note)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers the epoch, for the checkpoint's name too."""
        super().on_epoch_begin(epoch, logs)
        self.checkpoint.on_epoch_begin(epoch, logs)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Asks all ranks whether one of them received a signal; if so, all end."""
        super().on_train_batch_end(batch, logs)
        if not between_updates(self.model):  # on all ranks alike
            self._end_if_asked(logs or {}, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The same, for a signal that came during validation."""
        super().on_epoch_end(epoch, logs)
        self._end_if_asked(logs or {}, None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the signals back; one that came too late has its former effect."""
        super().on_train_end(logs)
        self._give_back()
        if self._received:
            signal.raise_signal(self._received)

    def _end_if_asked(self, logs: dict[str, Any], batch: int | None) -> None:
        received = self._largest_of_all(
            self._received, "stop_on_signal", self.timeout_s
        )
        if not received:
            return
        if batch is not None and not self._are_all_here():
            self._received = received
            self.model.stop_training = True  # all ranks meet at the end of the epoch
            return
        if _runtime.rank() == self._first:
            _logger.warning(
                "%s: saving after %sepoch %d, then the job ends.",
                signal.Signals(received).name,
                "" if batch is None else f"step {batch + 1} of ",
                self._epoch + 1,
            )
        self.checkpoint.save_now(LastLogs(logs), batch)
        self._give_back()
        raise SystemExit(128 + received)

    def _are_all_here(self) -> bool:
        """Whether no rank has joined, which would count 0, and cannot save."""
        if _runtime.size() == 1:
            return True
        here = allreduce(
            tf.constant(1, tf.int32),
            op=ReduceOp.SUM,
            name="stop_on_signal.here",
            timeout_s=self.timeout_s,
            process_set=self._ranks,
        )
        return int(here) == len(members_of(self._ranks))

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._before[number])
        if self._still_runs():
            self._received = number
        else:  # fit has raised, and nobody would ask
            self._give_back()
            signal.raise_signal(number)

    def _still_runs(self) -> bool:
        """Whether the training goes on, asked in the main thread, which trains."""
        return not self._is_of_fit or is_in_fit(self.model)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # not what was set since
                signal.signal(number, handler)

    def _give_back_of_another(self, number: int) -> None:
        """Makes one give a signal back whose fit of this model, or any, has raised."""
        other = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(other, StopOnSignal) and (
            other.model is self.model or not other._still_runs()
        ):
            other._give_back()
