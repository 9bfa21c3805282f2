"""StopOnSignal: on a signal to any rank, all ranks save and stop at the same step."""

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
    """Saves a checkpoint on a signal and then exits on all ranks.

    Batch systems and clouds send a signal some seconds before they reclaim a machine;
    Ctrl-C in `tfdistrun` reaches all ranks in the same way. The ranks agree on a step,
    save the checkpoint there, and leave `fit` with `SystemExit`, whose code is 128 +
    the number of the signal, as in a shell. `on_epoch_end` of other callbacks is not
    called. Work in progress is handled as follows:

    - A step, and the gradient accumulation of which it is a part, is finished first.
    - A validation is stopped after the current batch, without a result. If its batches
      contain collective operations, it is finished first.
    - Before the first step the initial state is saved, if the model is built. If
      TensorFlow is tracing, or a checkpoint is being written, this is finished first.

    On a signal, the lowest rank logs what has to end before the save, and how long the
    launcher waits (`tfdistrun --signal-grace-s`, 25 s by default; under other launchers
    set `TFDIST_SIGNAL_GRACE_S` to include it in the message). If only one rank receives
    the signal during a validation, it waits until the others have validated.

    If a rank has run out of data (`UnevenData`), all ranks first end the epoch, and
    then save and exit before the validation. A signal that reaches only ranks without
    data has no effect before the other ranks end the epoch. Pass validation data to all
    ranks or to none.

    If `TFDIST_SIGNAL_GRACE_S` is set, as by `tfdistrun`, a repeated signal is ignored;
    otherwise it has the same effect as without this callback.

    In an elastic job with `Elastic`, a rank that receives SIGTERM leaves, and the
    others continue. The checkpoint is saved if the whole job receives SIGTERM.

    The cost is one reduction of a single number before the first step, after each step
    (with gradient accumulation, after each update), before and after each validation,
    and after each epoch.

    Args:
        checkpoint: the callback that saves; it need not be in the callback list. Its
            `save_best_only` has to be False. A name without a value at that step, such
            as `{val_loss}`, is "none" in the file name.
        signals: signal numbers; default SIGTERM, SIGINT and SIGUSR1 (sent by Slurm with
            `--signal=USR1@60`). They are handled only while `fit` runs; after it has
            ended, even with an error, they have their previous effect. A custom loop
            has to call `on_train_end`. If the loop raises an error first, the signals
            are handled until `tfdist.shutdown()`.
        timeout_s: seconds to wait for the slowest rank; default `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: `checkpoint` has `save_best_only=True`; `signals` is empty or has a
            signal that a program cannot handle; or `fit` does not run in the main
            thread, the only one that can handle signals.
        SystemExit: on all ranks, after the checkpoint is saved; also if a save in the
            background has failed, after a warning.

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
                "Expected a Checkpoint with save_best_only=False, got True. Pass a "
                "separate Checkpoint to StopOnSignal."
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
        self._shutdowns = 0  # in this process, when the handlers were installed
        self._listens = False  # whether handlers are installed for the coming fit
        self._training = False  # in `fit`, not in a separate `model.evaluate`
        self._at_start = False  # before the first step
        self._doing = ""  # current activity, for the message on a signal
        self._logs: dict[str, Any] = {}  # latest logs, for the checkpoint's name
        self._operations: int | None = None  # finished before the validation

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the handled signals."""
        return {"signals": [int(number) for number in self.signals]}

    @property
    def meets_at_steps(self) -> bool:
        """Returns True, because this callback waits for all ranks after each step."""
        return True

    def set_model(self, model: Any) -> None:
        """Passes the model to the checkpoint, which may not be in the list."""
        super().set_model(model)
        self.checkpoint.set_model(model)
        # The callbacks before this one may take a while in `on_train_begin`.
        if is_in_fit(model) and _is_main_thread():
            self._listen()

    # ---- where the ranks agree ----

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Installs the signal handlers, unless `set_model` has done so."""
        super().on_train_begin(logs)
        if not _is_main_thread():
            raise ValueError(
                "tfdist.callbacks.StopOnSignal needs the main thread, the only thread "
                "that can handle signals in Python. Call fit in the main thread, or "
                "remove StopOnSignal."
            )
        if not (self._listens and is_in_fit(self.model)):
            self._listen()
        self._listens = False  # for the next fit
        self._training = self._at_start = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch number, which the checkpoint's name may contain."""
        super().on_epoch_begin(epoch, logs)
        self.checkpoint.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Checks for signals before the very first step, which may take minutes."""
        super().on_train_batch_begin(batch, logs)
        if self._at_start:
            self._at_start = False
            self._logs = logs or {}
            self._end_before_first_step(batch)
            for one in self._listed or [self]:
                # The exchange above reduces no gradients.
                if isinstance(one, RankCallback):
                    one._note_operations()
        self._doing = f"step {batch + 1} of epoch {self._epoch + 1}"

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Checks whether any rank received a signal; if so, all ranks stop."""
        super().on_train_batch_end(batch, logs)
        self._logs = logs or {}
        if between_updates(self.model):  # the same on all ranks
            return
        received = self._asked("StopOnSignal")
        if received and self._can_all_save(True):
            self._end(received, f"after step {batch + 1} of", batch)
        elif received:
            self.model.stop_training = True  # checked again before the validation

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks for signals before a validation."""
        if self._training:
            self._doing = f"the validation of epoch {self._epoch + 1}"
            self._operations = None
            if received := self._asked("StopOnSignal in validation"):
                self._end(received, "after", None)

    def on_test_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Stores the number of operations before the first batch of the validation."""
        if self._training and self._operations is None:
            self._operations = finished_operations()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the validation after a signal, if it has no collective operations."""
        if self._training and self._received:
            if finished_operations() == self._operations:
                self.model.stop_evaluating = True

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Checks for signals after a complete or stopped validation."""
        if self._training:
            self._doing = f"the end of epoch {self._epoch + 1}"
            if received := self._asked("StopOnSignal in validation"):
                self._end(received, "after", None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Checks for signals again, as other callbacks ran in between and may save."""
        super().on_epoch_end(epoch, logs)
        if received := self._asked("StopOnSignal"):
            self._logs = logs or self._logs
            self._end(received, "after", None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the signal handlers; a late signal goes to the previous handler."""
        super().on_train_end(logs)
        self._training = False
        self._give_back()
        if self._received:
            signal.raise_signal(self._received)

    def save_now(self, batch: int | None) -> None:
        """Saves the checkpoint, and waits until it is on disk; all ranks call it.

        Args:
            batch: the step in the epoch, from 0; None at the end of an epoch.
        """
        self.checkpoint.save_now(LastLogs(self._logs), batch)
        self.checkpoint.wait_until_finished()

    def release(self, number: int) -> None:
        """Restores the default action of a signal, so that others can handle it.

        Does nothing if the program has a handler of its own for the signal, or if a
        signal has already arrived.

        Args:
            number: number of the signal.
        """
        is_default = self._before.get(number) is signal.SIG_DFL
        if is_default and signal.getsignal(number) == self._note and not self._received:
            signal.signal(number, signal.SIG_DFL)

    def _end_before_first_step(self, batch: int) -> None:
        received = self._asked("StopOnSignal before the first step")
        if received and self._can_all_save(not unbuilt_layers(self.model)):
            self._end(received, "at the start of", batch - 1)

    def _asked(self, name: str) -> int:
        """Returns the signal that any rank received, the same on all ranks; or 0."""
        received = self._largest_of_all(self._received, name, self.timeout_s)
        if received:  # if 0, keep a signal that has arrived in the meantime
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
        self.save_now(batch)
        self._training = False
        self._give_back()
        raise SystemExit(128 + received)

    def _can_all_save(self, own: bool) -> bool:
        """Returns whether all ranks can save; a rank in `tfdist.join` cannot."""
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
        self._give_back()  # an earlier fit that raised has not restored the handlers
        self._listens = True
        self._received = 0
        self._is_of_fit = is_in_fit(self.model)
        self._shutdowns = runtime.shutdowns()
        self._doing = "the start of fit"
        for number in self.signals:
            self._give_back_of_another(number)
            # None is a handler that was not set by Python and cannot be restored.
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._still_runs():  # nothing would check for the signal
            self._give_back()
            signal.raise_signal(number)
            return
        # A launcher with a time limit may pass on a signal that the batch system has
        # already sent to all processes. It is the same signal.
        if not runtime.setting("TFDIST_SIGNAL_GRACE_S"):
            signal.signal(number, self._before[number])
        if number != self._received:
            self._received = number
            self._announce(number)

    def _announce(self, number: int) -> None:
        if runtime.is_initialized() and runtime.rank() != self._first:
            return
        grace_s = runtime.setting("TFDIST_SIGNAL_GRACE_S")
        _logger.warning(
            "%s during %s: a checkpoint is saved as soon as all ranks can save%s.",
            signal.Signals(number).name,
            self._doing,
            f"; the launcher waits {float(grace_s):g} s" if grace_s else "",
        )

    def _still_runs(self) -> bool:
        """Returns whether training still runs; called in the main, training thread.

        If a custom loop has raised, this is known only after a `shutdown`.
        """
        if self._is_of_fit:
            return is_in_fit(self.model)
        return runtime.shutdowns() == self._shutdowns

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else set by other code since
                signal.signal(number, handler)

    def _give_back_of_another(self, number: int) -> None:
        """Removes the handler of a StopOnSignal whose fit has raised."""
        other = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(other, StopOnSignal) and (
            other.model is self.model or not other._still_runs()
        ):
            other._give_back()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
