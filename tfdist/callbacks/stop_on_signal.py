"""StopOnSignal: a signal to any rank ends all ranks at the same step, and saves."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from tfdist.callbacks._base import RankCallback, finished_operations
from tfdist.callbacks._callback_list import is_in_fit
from tfdist.callbacks.checkpoint import Checkpoint, LastLogs, between_updates
from tfdist.collectives import ReduceOp, allreduce
from tfdist.core import runtime
from tfdist.core.process_sets import members_of
from tfdist.training.model_building import unbuilt_layers

_logger = logging.getLogger("tfdist")
_HANDLED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class StopOnSignal(RankCallback):
    """Saves a checkpoint when the job is asked to end; then all ranks exit.

    Batch systems and clouds send a signal some seconds before they take a machine away;
    Ctrl-C in `tfdistrun` reaches all ranks likewise. The ranks agree where they stop,
    save the checkpoint there, and leave `fit` by `SystemExit` with 128 + the signal's
    number, as a shell would say it. Callbacks do not get the end of the epoch:

    - A step, and the accumulation of gradients that it is part of, is finished first.
    - A validation is broken off after the batch that is running, and has no result.
      Where its batches contain operations of all ranks it is finished first.
    - Before the first step the initial state is saved, if the model is built. While
      TensorFlow traces a function, and while a checkpoint is written, that is finished
      first.

    When the signal comes, the lowest rank logs what has to end before the save, and how
    long the launcher waits (`tfdistrun --signal-grace-s`, 25 s by default; under other
    launchers set `TFDIST_SIGNAL_GRACE_S` if you want it in the message). A rank that
    alone receives the signal in a validation waits for the validation of the others.

    When the data of a rank have ended (`UnevenData`) it cannot save with the others:
    then a signal ends the training of the epoch on all ranks, and the job before the
    validation. If the model has validation data, all ranks have to have some. A second
    signal has the effect that it had before this callback.

    It costs one reduction of a single number before the first step, after each step,
    before and after each validation, and after each epoch.

    Args:
        checkpoint: saves; it need not be in the list of callbacks itself. Its
            `save_best_only` has to be False: a stop is not a choice. What has no value
            at that step, as `{val_loss}`, is "none" in the name of the file.
        signals: numbers of the signals; default SIGTERM, SIGINT and SIGUSR1 (Slurm's
            `--signal=USR1@60` sends that one). They are handled during `fit` only,
            also when it ends with an error; a loop of your own calls `on_train_end`.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: `checkpoint` keeps the best only; `signals` is empty or has one that
            a program cannot handle; or, at the start of `fit`, this is not the main
            thread, which alone can handle signals.
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
        if not self.signals or not set(self.signals) <= _HANDLED:
            raise ValueError(
                "Expected signals that a program can handle, such as "
                f"(signal.SIGTERM, signal.SIGUSR1), got {signals!r}."
            )
        self.timeout_s = timeout_s
        self._received = 0
        self._before: dict[int, Any] = {}
        self._is_of_fit = False
        self._listens = False  # for the fit that is about to start
        self._training = False  # not a `model.evaluate` that was given this callback
        self._at_start = False  # no step has been begun
        self._doing = ""  # for the message when a signal comes
        self._logs: dict[str, Any] = {}  # the last ones, for the checkpoint's name
        self._operations: int | None = None  # finished at the first batch of validation

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
        # The callbacks before this one may take a while in `on_train_begin`.
        if is_in_fit(model) and _is_main_thread():
            self._listen()

    # ---- where the ranks agree ----

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to listen."""
        super().on_train_begin(logs)
        if not _is_main_thread():
            raise ValueError(
                "tfdist.callbacks.StopOnSignal needs the main thread, which alone "
                "handles signals in Python. Call fit there, or leave it out."
            )
        if not (self._listens and is_in_fit(self.model)):
            self._listen()
        self._listens = False  # the next fit begins anew
        self._training = self._at_start = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remembers the epoch, for the checkpoint's name too."""
        super().on_epoch_begin(epoch, logs)
        self.checkpoint.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Before the very first step, which may take minutes: asks all ranks."""
        super().on_train_batch_begin(batch, logs)
        if self._at_start:
            self._at_start = False
            self._logs = logs or {}
            self._end_before_first_step(batch)
        self._doing = f"step {batch + 1} of epoch {self._epoch + 1}"

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Asks all ranks whether one of them received a signal; if so, all end."""
        super().on_train_batch_end(batch, logs)
        self._logs = logs or {}
        if between_updates(self.model):  # on all ranks alike
            return
        received = self._asked("StopOnSignal")
        if received and self._can_all_save(True):
            self._end(received, f"after step {batch + 1} of", batch)
        elif received:
            self.model.stop_training = True  # all ranks meet before the validation

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Before a validation: asks all ranks."""
        if self._training:
            self._doing = f"the validation of epoch {self._epoch + 1}"
            self._operations = None
            if received := self._asked("StopOnSignal in validation"):
                self._end(received, "after", None)

    def on_test_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Notes at the first batch which operations are not of the validation."""
        if self._training and self._operations is None:
            self._operations = finished_operations()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """After a signal to this rank: leaves the validation, if it can do so alone."""
        if self._training and self._received:
            if finished_operations() == self._operations:
                self.model.stop_evaluating = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """After a validation, or the part of it that was done: asks all ranks."""
        if self._training:
            self._doing = f"the end of epoch {self._epoch + 1}"
            if received := self._asked("StopOnSignal in validation"):
                self._end(received, "after", None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Asks all ranks once more: other callbacks came in between, and may save."""
        super().on_epoch_end(epoch, logs)
        if received := self._asked("StopOnSignal"):
            self._logs = logs or self._logs
            self._end(received, "after", None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the signals back; one that came too late has its former effect."""
        super().on_train_end(logs)
        self._training = False
        self._give_back()
        if self._received:
            signal.raise_signal(self._received)

    def _end_before_first_step(self, batch: int) -> None:
        received = self._asked("StopOnSignal before the first step")
        if received and self._can_all_save(not unbuilt_layers(self.model)):
            self._end(received, "at the start of", batch - 1)

    def _asked(self, name: str) -> int:
        """The signal that one of the ranks received, known to all from now on; or 0."""
        received = self._largest_of_all(self._received, name, self.timeout_s)
        if received:  # else this rank may have received one meanwhile
            self._received = received
        return received

    def _end(self, received: int, where: str, batch: int | None) -> None:
        if runtime.rank() == self._first:
            _logger.warning(
                "%s: saving %s epoch %d, then the job ends.",
                signal.Signals(received).name,
                where,
                self._epoch + 1,
            )
        self.checkpoint.save_now(LastLogs(self._logs), batch)
        self._training = False
        self._give_back()
        raise SystemExit(128 + received)

    def _can_all_save(self, own: bool) -> bool:
        """Whether all ranks can: one that has joined, which counts 0, cannot."""
        if runtime.size() == 1:
            return own
        able = allreduce(
            tf.constant(int(own), tf.int32),
            op=ReduceOp.SUM,
            name="StopOnSignal, ranks with data",
            timeout_s=self.timeout_s,
            process_set=self._ranks,
        )
        return int(able) == len(members_of(self._ranks))

    # ---- signals of this process ----

    def _listen(self) -> None:
        self._give_back()  # a fit that raised has not
        self._listens = True
        self._received = 0
        self._is_of_fit = is_in_fit(self.model)
        self._doing = "the start of fit"
        for number in self.signals:
            self._give_back_of_another(number)
            # None: a handler that was not set by Python, and cannot be set again.
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._before[number])
        if self._still_runs():
            self._received = number
            self._announce(number)
        else:  # fit has raised, and nobody would ask
            self._give_back()
            signal.raise_signal(number)

    def _announce(self, number: int) -> None:
        if runtime.is_initialized() and runtime.rank() != self._first:
            return
        grace_s = runtime.setting("TFDIST_SIGNAL_GRACE_S")
        _logger.warning(
            "%s during %s: a checkpoint is saved as soon as the ranks can%s.",
            signal.Signals(number).name,
            self._doing,
            f"; the launcher gives them {float(grace_s):g} s" if grace_s else "",
        )

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


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
