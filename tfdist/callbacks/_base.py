"""Base class of the callbacks, which checks that gradients are reduced."""

from __future__ import annotations

import logging
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks._callback_list import (
    agree_on_callbacks,
    callback_list_of_the_call,
    is_in_fit,
)
from tfdist.callbacks._epoch_check import check_same_epoch
from tfdist.callbacks._error_translation import restore_train_function, translate_errors
from tfdist.callbacks._loss_reductions import warn_of_reductions
from tfdist.callbacks._loss_weighting import restore_compute_loss
from tfdist.callbacks._rank_comparison import RankComparison, process_set_of
from tfdist.callbacks._save_guard import guard_saving
from tfdist.callbacks._state_sync import common_rates_of, other_optimizers
from tfdist.collectives import ReduceOp, allreduce
from tfdist.collectives.consistency.in_step import may_have_other_ranks
from tfdist.core import engines, native, runtime
from tfdist.core.process_sets import ProcessSet, members_of
from tfdist.core.registry import WeakRegistry
from tfdist.gradients.double_buffer import clear_buffers
from tfdist.gradients.noise_scale import stop_measuring
from tfdist.layers.synchronized import batch_normalizations, is_synchronized
from tfdist.training import jit_compile
from tfdist.training.model_optimizers import check_all_reduce, optimizers_of
from tfdist.training.optimizer import (
    is_distributed,
    may_be_traced_unwrapped,
    unwrapped_message,
)

_logger = logging.getLogger("tfdist")
# Model → names of the operations of its first step, once they are recorded.
_first_step_names: WeakRegistry[list[str]] = WeakRegistry()


class RankCallback(keras.callbacks.Callback):
    """Base class of callbacks for a model that is trained on several ranks.

    Before the first step, it raises an error if the model's gradients would not be
    reduced, or if the callback lists would make the ranks diverge. After the first
    update, it checks that a reduction took place, which is the only possible check for
    a custom `train_step`. After that update, at the end of each epoch and at the end of
    training, the ranks compare their weights (`RankComparison`). Before the first step
    of each epoch, they compare the epoch number and the learning rates. If a list
    contains several of these callbacks, the first one does these checks.

    The ranks that train the model together compare these values, even if a callback
    communicates with more ranks (`_ranks`).

    With `jit_compile=True` XLA compiles the forward and backward pass, not the
    reduction and the update.
    """

    def __init__(self) -> None:
        super().__init__()
        self._checked = False
        self._finished_before = 0
        self._steps_seen = 0
        self._listed: list[keras.callbacks.Callback] = []
        self._leads = False
        self._epoch = 0
        self._compares = False
        self._traces = False  # whether this callback records steps for the timeline
        self._step_began_us: int | None = None

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks, as plain values."""
        return {}

    @property
    def meets_at_steps(self) -> bool:
        """Returns whether this callback waits for the other ranks after steps."""
        return False

    def on_ranks_changed(self, *, becomes_first: bool) -> None:
        """Called in an elastic `fit` after the ranks have changed.

        In a newcomer, the state of another rank is set before this call, so that it
        does not replace what a new rank 0 sets up here, such as an open file.

        Args:
            becomes_first: whether this process was not rank 0, and is now.
        """

    def on_first_rank_lost(self) -> None:
        """Called before `on_ranks_changed` on a new rank 0 if the previous was lost."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model, and the callback lists of all ranks."""
        runtime.check_initialized()
        check_model(self.model)
        guard_saving(self.model)
        jit_compile.install(self.model)
        self._checked = False
        self._steps_seen = 0
        running = callback_list_of_the_call()
        self._listed = _without_comparison(running)
        ours = (c for c in self._listed if isinstance(c, RankCallback))
        communicates = runtime.rank() in members_of(self._ranks)
        self._leads = communicates and next(ours, None) is self
        self._compares = self._leads and self._trains_here
        self._traces = self._leads and bool(runtime.setting("TFDIST_TIMELINE"))
        if self._leads:
            clear_buffers(self.model.trainable_variables)
            if _is_traced_otherwise(self.model):
                self.model.train_function = None
                self.model.make_train_function()
            epochs = (self.params or {}).get("epochs")  # None in a custom loop
            agree_on_callbacks(self._listed, epochs, self._ranks, self.model)
            _warn_of_own_statistics(self.model, self._listed, self._first)
            warn_of_reductions(self.model, self._first)
            ranks = process_set_of(self.model)
            if running is not None and self._compares and may_have_other_ranks(ranks):
                RankComparison.append_to(running)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Stores the epoch number."""
        self._epoch = epoch
        self._compares = self._leads and self._trains_here

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the end of the other ranks' fit; undoes changes to the model."""
        if self._leads and self._trains_here:  # detects a rank that ends alone
            self._largest_of_all(self._epoch + 1, "end of fit", None)
        restore_train_function(self.model)
        jit_compile.remove(self.model)

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Before the first step of an epoch, compares epoch and rates of the ranks."""
        if self._compares:
            self._compares = False
            ranks = process_set_of(self.model)
            check_same_epoch(self._epoch, common_rates_of(self.model, ranks), ranks)
        if self._steps_seen == 0:
            self._note_operations()
            translate_errors(self.model)
        if self._traces:
            self._step_began_us = time.monotonic_ns() // 1000

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Checks after the first update that gradients were reduced."""
        if self._traces:
            now_us = time.monotonic_ns() // 1000
            native.timeline_span("step", self._step_began_us or now_us, now_us)
        if self._checked:
            return
        self._steps_seen += 1
        if self._steps_seen < _steps_with_an_update(self.model):
            return
        self._checked = True
        if runtime.size() > 1 and not self._has_reduced():
            raise RuntimeError(
                "The first step reduced no gradients: every rank trains independently. "
                "A custom train_step has to call self.optimizer.apply(gradients, "
                "variables) with a tfdist.DistributedOptimizer, or use the "
                "gradients of a tfdist.DistributedGradientTape. (A function that was "
                "traced before its optimizer was wrapped does not reduce. Compile the "
                "model, or create the tf.function, after wrapping the optimizer.)"
            )

    @property
    def _ranks(self) -> ProcessSet | None:
        """The ranks with which this callback communicates; None for all."""
        return process_set_of(self.model)

    @property
    def _trains_here(self) -> bool:
        """Whether this rank is one of those that train the model together."""
        return runtime.rank() in members_of(process_set_of(self.model))

    @property
    def _first(self) -> int:
        """The lowest of the ranks with which this callback communicates."""
        return members_of(self._ranks)[0]

    def _largest_of_all(self, number: int, name: str, timeout_s: float | None) -> int:
        """Returns the maximum over the ranks that train the model and have data."""
        if runtime.size() == 1:
            return number
        return int(
            allreduce(
                tf.constant(number, tf.int32),
                op=ReduceOp.MAX,
                name=name,
                timeout_s=timeout_s,
                process_set=process_set_of(self.model),
            )
        )

    def _note_operations(self) -> None:
        """Excludes earlier operations from the check that gradients are reduced."""
        self._finished_before = finished_operations()
        if _counts_moments(self.model):
            native.take_records()
            _first_step_names.set(self.model, [])

    def _has_reduced(self) -> bool:
        """Returns whether anything but batch normalization moments was reduced."""
        if finished_operations() == self._finished_before:
            return False
        # No records were requested if synchronized layers were created in this step.
        if not (_counts_moments(self.model) and self.model in _first_step_names):
            return True
        # Records can be taken only once, so the callbacks of a model share the names.
        names = _first_step_names.get(self.model)
        names.extend(map(_name_of, native.take_records()))
        return any(not name.startswith("batch_norm.") for name in names)


def _without_comparison(
    running: keras.callbacks.CallbackList | None,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of the user and of Keras; [] if no list is running."""
    listed = [] if running is None else running.callbacks
    return [one for one in listed if not isinstance(one, RankComparison)]


def _is_traced_otherwise(model: keras.Model) -> bool:
    """Returns whether the step traced by an earlier fit is outdated."""
    failed = restore_compute_loss(model)  # True if that fit ended with an error
    was_plain = [may_be_traced_unwrapped(one) for one in optimizers_of(model)]
    was_measured = [stop_measuring(one) for one in optimizers_of(model)]
    return failed or any(was_plain) or any(was_measured)


def _counts_moments(model: keras.Model) -> bool:
    """Returns whether `finished_operations` counts batch normalization moments.

    An engine other than the core does not count them, and its operations are not in the
    core's records.
    """
    if engines.chosen() is not None:
        return False
    return any(map(is_synchronized, batch_normalizations(model)))


def _name_of(record: dict[str, Any]) -> str:
    """Returns the name of an operation without the enclosing functions."""
    return str(record["name"]).rpartition("/")[2]


def finished_operations() -> int:
    """Returns the number of operations that the engine has finished in this world."""
    engine = engines.chosen()
    return engine.finished_count() if engine else int(native.counters()["finished"])


def _steps_with_an_update(model: keras.Model) -> int:
    """Returns the number of steps that contain at least one update of the weights."""
    return getattr(base_optimizer(model), "gradient_accumulation_steps", None) or 1


def check_model(model: keras.Model) -> None:
    """Raises if `model` cannot be trained on several ranks as it is compiled.

    Raises:
        ValueError: an optimizer does not reduce gradients, or reduces them inside a
            LossScaleOptimizer, or a batch normalization layer has Keras's
            `synchronized=True`, which has no effect in tfdist.
    """
    optimizer = model.optimizer
    if is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise ValueError(
            "The model's optimizer is a LossScaleOptimizer around a tfdist optimizer. "
            "The reduction has to be outside: write tfdist.DistributedOptimizer("
            "keras.optimizers.LossScaleOptimizer(optimizer))."
        )
    # A custom train_step or loop may reduce with a tape, which is checked after the
    # first step.
    uses_keras_step = type(model).train_step is keras.Model.train_step
    uses_keras_step = uses_keras_step and is_in_fit(model)
    if not is_distributed(optimizer) and uses_keras_step:
        raise ValueError(unwrapped_message(optimizer))
    check_all_reduce(model)
    _check_batch_normalization(model)


def _check_batch_normalization(model: keras.Model) -> None:
    if not may_have_other_ranks():
        return
    layers = batch_normalizations(model)
    plain = [layer for layer in layers if not is_synchronized(layer)]
    if 0 < len(plain) < len(layers):
        _logger.warning(
            "%d of %d batch normalization layers use the statistics of all ranks. The "
            "other layers, such as %r, use the statistics of this rank's batch. (Keras "
            "copies a model with plain layers; call "
            "tfdist.layers.synchronize_batch_normalization(model) on the copy.)",
            len(layers) - len(plain),
            len(layers),
            plain[0].name,
        )
    for layer in plain:
        if layer.synchronized:
            raise ValueError(
                f"The layer {layer.name!r} has synchronized=True, which in Keras works "
                "only with tf.distribute. Every rank would normalize its own batch "
                "independently. Call tfdist.layers.synchronize_batch_normalization("
                "model), or omit synchronized."
            )


def _warn_of_own_statistics(
    model: keras.Model, callbacks: list[keras.callbacks.Callback], first: int
) -> None:
    """Warns that batch normalization statistics will differ between ranks.

    Args:
        model: the model to be trained.
        callbacks: the callbacks of the training.
        first: the rank that logs the warning.
    """
    if not may_have_other_ranks() or runtime.rank() != first:
        return
    plain = [
        layer
        for layer in batch_normalizations(model)
        if layer.trainable and not is_synchronized(layer)
    ]
    combining = ("CombineMovingStatistics", "Checkpoint")
    if plain and not any(type(one).__name__ in combining for one in callbacks):
        _logger.warning(
            "Each rank keeps moving statistics of its own batches in %d batch "
            "normalization layers, such as %r. The ranks' models therefore differ in "
            "evaluation, and the model that rank %d saves does not represent all data. "
            "Add tfdist.callbacks.CombineMovingStatistics() to the callbacks, or call "
            "tfdist.layers.synchronize_batch_normalization(model) before fit.",
            len(plain),
            plain[0].name,
            first,
        )


def base_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """Returns the optimizer with the learning rate; unwraps a loss scale optimizer."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def accumulates(optimizer: Any) -> bool:
    """Returns whether an optimizer accumulates the gradients of several steps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(getattr(inner, "gradient_accumulation_steps", None))


def optimizer_of_one_rate(
    model: keras.Model, callback: str
) -> keras.optimizers.Optimizer:
    """Returns the optimizer whose learning rate a callback changes.

    Args:
        model: the model in `fit`.
        callback: name of the callback's class, for errors.

    Raises:
        ValueError: the model has no optimizer, or has several optimizers, so that the
            other rates would silently stay unchanged.
    """
    optimizer = base_optimizer(model)
    others = other_optimizers(model)
    if optimizer is None:
        problem = "the model is compiled with optimizer=None"
    elif others:
        problem = "the model has other optimizers, whose rates would not change"
    elif hasattr(optimizer, "_inner_optimizers"):
        others = list(optimizer._inner_optimizers)
        problem = "a MultiOptimizer has no learning rate, only its inner optimizers do"
    else:
        return optimizer
    names = ", ".join(f"{type(one).__name__} {one.name!r}" for one in others)
    raise ValueError(
        f"{callback} changes the learning rate of the optimizer passed to "
        f"model.compile, but {problem}{f' ({names})' if names else ''}. Remove "
        f"{callback}, and set each optimizer's rate when you create it: multiply "
        "the rate of one process by tfdist.size(), and for a warm-up pass "
        "tfdist.optimizers.Warmup(rate, warmup_steps) as learning_rate."
    )
