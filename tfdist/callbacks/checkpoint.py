"""Checkpoint: saves the model atomically on rank 0, optionally in the background."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import string
import sys
import time
from pathlib import Path
from typing import Any

import keras

from tfdist.callbacks._atomic_file import remove_with_checksum, write_with_checksum
from tfdist.callbacks._background_writer import BackgroundWriter, Job
from tfdist.callbacks._base import RankCallback
from tfdist.callbacks._callback_list import leaves_out_validation
from tfdist.callbacks._metric_mode import mode_of
from tfdist.callbacks._model_snapshot import ModelSnapshots
from tfdist.callbacks._per_rank_state import average_accumulated, is_between_updates
from tfdist.callbacks._rank_comparison import compare_model
from tfdist.callbacks._weights_file import save_weights
from tfdist.collectives.all_ranks import later_single_rank_code, run_on_rank
from tfdist.core import runtime
from tfdist.core.weights_state import check_not_torn, using_snapshot
from tfdist.layers.saved_generators import add_states
from tfdist.layers.statistics import combine_at
from tfdist.training.model_optimizers import updates_of

_logger = logging.getLogger("tfdist")
_PLACE = "the save of tfdist.callbacks.Checkpoint"
# A save: name of the file, and what was there before: the time of the file
# (`_time_ns`) and the best value.
_Save = tuple[str, int | None, float | None]


class Checkpoint(RankCallback):
    """Saves the model or its weights on rank 0, or the lowest rank of its process set.

    A file appears under its name only when it is complete and on disk: it is written
    under a temporary name in the same folder (".partial-..."), flushed, and renamed. If
    that fails, the previous file is kept, and all ranks raise an error. Partial files
    of a killed process are removed by the first save at least an hour later. The other
    ranks wait for rank 0, at most `timeout_s`. After an aborted step nothing is saved,
    since some weights may already have been changed.

    The SHA-256 checksum of a file NAME is in NAME.sha256 in the same folder.
    `tfdist.restore` verifies it and, given a folder or a pattern, skips damaged files.
    Keras can load the files without tfdist.

    With `background`, training waits only until rank 0 has copied the variables to host
    memory; a thread writes the file from this copy. If a save is due before the
    previous file is complete, its copy waits. If another save is due meanwhile, the
    newer copy replaces the waiting one, with a warning. Rank 0 keeps the memory of one
    copy until the end of `fit`. If saves overlap, it needs a second copy, and briefly a
    third. If a write fails (for example on a full disk), rank 0 logs a warning,
    training continues, and the next save tries again. At the end of `fit`, and when
    `StopOnSignal` ends the job, all ranks wait for the file, and a failed write is
    repeated once.

    Before a save, the moving statistics of batch normalization are combined over the
    ranks, as by `tfdist.layers.combine_moving_statistics`. Add
    `CombineMovingStatistics` to the list if `monitor` is a validation metric, so that
    validation uses the statistics of the saved model. Accumulated gradients
    (`gradient_accumulation_steps`) are averaged over the ranks before a save. All ranks
    continue with the mean, and so does training that is resumed from the file; the next
    update is the same as without the save. Whole models are saved with the state of
    their random number generators (dropout), which Keras does not save.

    Args:
        filepath: name of the file, ending in ".keras", or in ".weights.h5" with
            `save_weights_only`; may contain `{epoch}`, `{batch}`, `{step}` (number of
            updates so far, as `tfdist.restore` returns it) and names in the logs, e.g.
            "model-{step:07d}-{val_loss:.3f}.keras". `StopOnSignal` writes "none" for
            names that have no value yet. Remote file systems ("gs://...") are not
            supported.
        monitor: name in the logs that decides which model is best; default "val_loss".
            Put `MetricAverage` before this callback; otherwise the value is that of
            rank 0 alone.
        save_best_only: save only if `monitor` improved; default False. If `monitor` is
            a validation metric, epochs without validation (`validation_freq`) are not
            saved.
        save_weights_only: save weights only, as `model.save_weights` does; default
            False: the whole model with its optimizer.
        mode: "min", "max" or "auto" (default): whether smaller or larger values are
            better. "auto" takes the direction that the model's metric of that name
            declares, as in Keras, and "min" for losses. For other names that contain
            acc, auc, precision, recall or f1, it takes "max".
        save_freq: "epoch" (default), or the number of steps between two saves; with
            gradient accumulation, a save is delayed until the current accumulation is
            complete.
        initial_value_threshold: with `save_best_only`, the value of `monitor` that the
            first save has to improve on, e.g. the best value before training was
            resumed; default None: any value.
        keep: number of complete files to keep, at least 1; older files that this
            callback has saved are removed after a new one is complete; default None:
            all.
        verbose: 1: rank 0 prints the epoch and the path of each save; default 0.
        background: whether a thread writes files while training continues; default
            False. Must be the same on all ranks. State that is not in Keras variables
            is not copied; it is read while the file is written.
        timeout_s: seconds that the other ranks wait for rank 0; default
            `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: an argument is out of range; after the first step, on all ranks, if
            `mode` is "auto" and the direction is unknown; or at the first save if
            `monitor` is not in the logs.
        RuntimeError: an aborted step has changed only some of the weights; the message
            names the last good step.
        OSError: on rank 0, without `background`: the file could not be written.
        tfdist.MismatchError: at a save, on all ranks: the ranks' weights differ.
        tfdist.RankFailedError: on the other ranks, if rank 0 raised an error.

    Example:
        >>> import tfdist
        >>> callbacks = [tfdist.callbacks.Checkpoint("best.keras", monitor="loss",
        ...                                          save_best_only=True)]
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        *,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        keep: int | None = None,
        verbose: int = 0,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self.filepath = os.fspath(filepath)
        endings = (".weights.h5",) if save_weights_only else (".keras",)
        if not self.filepath.endswith(endings):
            hint = ""
            if self.filepath.endswith(".weights.h5"):
                hint = " Change the ending, or pass save_weights_only=True."
            raise ValueError(
                f"Expected a filepath that ends in {endings[0]!r}, got "
                f"{self.filepath!r}.{hint}"
            )
        if "://" in self.filepath:
            raise ValueError(
                "Expected a filepath in a local or mounted folder, got "
                f"{self.filepath!r}. Checkpoint renames each file when it is "
                "complete, which remote file systems cannot do. Save to a local folder "
                "and copy the files from there, or use "
                "RankZeroOnly(keras.callbacks.ModelCheckpoint(...))."
            )
        _check_names(self.filepath)
        if save_freq != "epoch" and (
            not isinstance(save_freq, int)
            or isinstance(save_freq, bool)
            or save_freq < 1
        ):
            raise ValueError(
                "Expected save_freq='epoch' or a number of steps of at least 1, got "
                f"{save_freq!r}."
            )
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"Expected keep to be at least 1 or None, got {keep!r}.")
        if initial_value_threshold is not None and not save_best_only:
            raise ValueError(
                "Expected initial_value_threshold with save_best_only=True only, got "
                f"{initial_value_threshold!r}."
            )
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"Expected mode 'auto', 'min' or 'max', got {mode!r}.")
        self.monitor = monitor
        self.mode = mode
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.verbose = verbose
        self.timeout_s = timeout_s
        self.keep = keep
        self.background = background
        self._best = initial_value_threshold
        self._latest: _Save | None = None  # on all ranks
        self._names: list[str] = []  # of files that `keep` may remove, on all ranks
        self._steps = 0
        self._snapshots = ModelSnapshots()
        self._writer = BackgroundWriter()

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns when the ranks save, and whether they wait for the file."""
        return {"save_freq": self.save_freq, "background": self.background}

    def on_first_rank_lost(self) -> None:
        """Checks whether the lost rank 0 has written its last file."""
        if not (self.background and self._latest):
            return
        name, before_ns, best_before = self._latest
        if before_ns is not None and _time_ns(Path(name)) == before_ns:
            self._best = best_before
            _logger.warning(
                "The checkpoint %s was not saved, because rank 0 was lost before the "
                "file was complete. Earlier checkpoints are unchanged.",
                name,
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch number, and resets the step count."""
        super().on_epoch_begin(epoch, logs)
        self._last_batch: int | None = None

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Notes with which step an epoch begins; an earlier job may have taken some."""
        super().on_train_batch_begin(batch, logs)
        if self._last_batch is None:
            self._last_batch = batch - 1

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Saves every `save_freq` steps, if `save_freq` is a number."""
        super().on_train_batch_end(batch, logs)
        self._choose_mode()  # metrics exist after the first batch
        if not isinstance(self.save_freq, int):
            return
        # With steps_per_execution a call covers several steps.
        self._steps += batch - (-1 if self._last_batch is None else self._last_batch)
        self._last_batch = batch
        if self._steps >= self.save_freq and not between_updates(self.model):
            self._steps = 0
            self.save_now(logs or {}, batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if `save_freq` is "epoch"."""
        if self.save_freq == "epoch":
            self.save_now(logs or {}, None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits until the last file is complete."""
        super().on_train_end(logs)
        self.wait_until_finished()
        self._snapshots.free()

    def on_saved(self, path: Path) -> None:
        """Removes files beyond `keep`; called on rank 0 when a file is complete.

        With `background`, this method runs on the thread that writes, so it must not
        call collective operations.

        Args:
            path: path of the file.
        """
        if self.keep is None:
            return
        earlier = [one for one in map(Path, self._names) if one != path]
        complete = [one for one in earlier if one.exists()] + [path]
        for one in complete[: -self.keep]:
            remove_with_checksum(one)

    def wait_until_finished(self) -> None:
        """Waits for the files that `background` is still writing; all ranks call it.

        A failed write of the newest file is repeated once. If the file is not complete
        after half of `timeout_s`, the ranks continue with a warning, and the program
        exits only when the file is complete.
        """
        if not self.background:
            return
        run_on_rank(
            self._first,
            self._wait_for_writer,
            f"rank {self._first} could not wait for the checkpoint",
            place=_PLACE,
            name="end of the saves of Checkpoint",
            timeout_s=self.timeout_s,
            process_set=self._ranks,
        )

    def save_now(self, logs: dict[str, Any], batch: int | None) -> None:
        """Saves on rank 0; all ranks call it, and return or raise together.

        With `background`, this method returns before the file is written.

        Args:
            logs: the current metrics, for the file name and `monitor`.
            batch: index of the step in the epoch, from 0; None at the end of an epoch.
        """
        check_not_torn()
        self._choose_mode()
        combine_at("to save a checkpoint", self.model, process_set=self._ranks)
        average_accumulated(self.model)
        compare_model(self.model, "when a checkpoint is to be saved")
        saved = run_on_rank(
            self._first,
            lambda: self._save_if_better(logs, batch),
            f"rank {self._first} could not save the checkpoint",
            place=_PLACE,
            name="save of Checkpoint",
            timeout_s=self.timeout_s,
            process_set=self._ranks,
        )
        if saved is not None:  # known to all ranks, each of which may become rank 0
            self._latest, self._names, self._best = saved

    def _save_if_better(
        self, logs: dict[str, Any], batch: int | None
    ) -> tuple[_Save, list[str], float | None] | None:
        """Saves if due; returns the new attributes of all ranks, or None."""
        value = math.nan
        if self.save_best_only:
            if self.monitor not in logs:
                if batch is None and self._is_not_validated():
                    return None
                raise ValueError(
                    f"Expected monitor to be one of {sorted(logs)}, got "
                    f"{self.monitor!r}."
                )
            value = float(logs[self.monitor])
            if not self._is_better(value):
                self._writer.retry()
                return None
        path = self._path(logs, batch)
        latest = str(path), _time_ns(path), self._best
        if self.background:
            self._save_in_background(path)
        else:
            self._save(path, self.model, self._epoch)
        best = value if self.save_best_only else self._best
        return latest, self._names_with(path), best

    def _names_with(self, path: Path) -> list[str]:
        """Returns the names of a new file and of earlier ones that `keep` may remove.

        Files are completed in the order of the list. A file that does not exist,
        although a later one does, was removed or will never be written.
        """
        if self.keep is None:
            return []
        names = [one for one in self._names if one != str(path)]
        exist = [Path(one).exists() for one in names]
        pending = 1 + max((i for i, one in enumerate(exist) if one), default=-1)
        complete = [one for one, exists in zip(names, exist, strict=True) if exists]
        return [*complete, *names[pending:], str(path)]

    def _save_in_background(self, path: Path) -> None:
        model, epoch = self.model, self._epoch
        snapshot = self._snapshots.take(model)
        alone = later_single_rank_code(_PLACE, self._ranks, others_wait=False)

        def write() -> None:
            with alone(), using_snapshot(), snapshot.as_values():
                self._save(path, model, epoch)
            self._snapshots.release(snapshot)

        self._writer.submit(Job(path, write))

    def _save(self, path: Path, model: keras.Model, epoch: int) -> None:
        write_with_checksum(path, lambda partial: self._write(partial, model))
        self.on_saved(path)
        if self.verbose:
            sys.stdout.write(f"\nEpoch {epoch + 1}: saved {path}\n")

    def _wait_for_writer(self) -> None:
        timeout_s = self.timeout_s
        if timeout_s is None:
            timeout_s = float(runtime.setting("TFDIST_TIMEOUT_S"))
        deadline_s = time.monotonic() + timeout_s / 2  # the other ranks wait longer
        ended = self._writer.wait(timeout_s / 2)
        if ended and self._writer.has_failed:
            self._writer.retry()
            ended = self._writer.wait(deadline_s - time.monotonic())
        if not ended:
            _logger.warning(
                "A checkpoint (%s) is still being written after %g s. The ranks "
                "continue, and the program ends when the file is complete.",
                self.filepath,
                timeout_s / 2,
            )

    def _is_not_validated(self) -> bool:
        """Returns whether `monitor` belongs to a validation that this epoch skips."""
        return self.monitor.startswith("val_") and leaves_out_validation(
            self.model, self._epoch
        )

    def _is_better(self, value: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        best = -sign * math.inf if self._best is None else float(self._best)
        return sign * value > sign * best

    def _choose_mode(self) -> None:
        """Sets the mode on every rank, so that an unknown direction raises on all."""
        if self.save_best_only and self.mode == "auto":
            self.mode = mode_of(self.monitor, self.model)

    def _path(self, logs: dict[str, Any], batch: int | None) -> Path:
        names = copy.copy(logs)
        names.setdefault("epoch", self._epoch + 1)
        if (updates := updates_of(self.model)) is not None:
            names["step"] = updates
        if batch is not None:
            names["batch"] = batch + 1
        try:
            return Path(self.filepath.format_map(names))
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Expected names of {sorted(names)} in the braces of filepath, got "
                f"{error} in {self.filepath!r}."
            ) from None

    def _write(self, path: Path, model: keras.Model) -> None:
        if self.save_weights_only:
            save_weights(model, path)
        else:
            model.save(str(path), overwrite=True)
            add_states(path, model)


class LastLogs(dict[str, Any]):
    """Logs at the end of a job; a missing value is formatted as "none"."""

    def __missing__(self, name: str) -> _Nothing:
        return _Nothing()


class _Nothing:
    def __format__(self, how: str) -> str:
        return "none"


def between_updates(model: keras.Model) -> bool:
    """Returns whether there are accumulated gradients, which differ between ranks."""
    return is_between_updates(model.optimizer)


def _time_ns(path: Path) -> int | None:
    """Returns the time of a file; 0 if there is no file, None if that is unknown."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def _check_names(filepath: str) -> None:
    """Raises ValueError if `filepath` is not a format string with named fields."""
    problem = None
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(filepath)]
    except ValueError as error:
        problem = f"{error}"
    else:
        if any(f is not None and not re.match(r"[^\W\d]", f) for f in fields):
            problem = "a field without a name"
    if problem is not None:
        raise ValueError(
            "Expected a filepath with names in braces, e.g. 'model-{epoch:03d}.keras', "
            f"got {filepath!r}: {problem}. Write a literal brace twice."
        )
