"""UnevenData: training with a different number of batches on each rank."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist import collectives
from tfdist.callbacks._base import RankCallback, accumulates
from tfdist.callbacks._learning_rates import factors_of
from tfdist.callbacks._loss_reductions import SUMS, reductions_of
from tfdist.callbacks._loss_weighting import restore_compute_loss, weigh_losses
from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdist.collectives import ReduceOp
from tfdist.collectives.objects import broadcast_object
from tfdist.collectives.variables import broadcast_variables
from tfdist.core import native, runtime
from tfdist.core.process_sets import members_of
from tfdist.layers.statistics import combine_at
from tfdist.layers.synchronized import batch_normalizations, is_synchronized
from tfdist.training.model_building import before_first_call, build_metrics
from tfdist.training.model_optimizers import build_alike, optimizers_of


class UnevenData(RankCallback):
    """Lets every rank use all of its data, even if the numbers of batches differ.

    A rank whose data end early in an epoch takes part in the reductions of the other
    ranks (`tfdist.join`) until the data of all ranks have ended. Then it gets the
    weights and the optimizer's state of a rank that has taken every step. Each sample
    is therefore used once, and all ranks continue from the same state. A rank may also
    have no batch at all in an epoch.

    Each step uses the gradient of the mean over the samples of all ranks, as in one
    process, even if batch sizes differ between ranks. A loss with a mask (`Masking`,
    `mask_zero`, `ignore_class`) is the mean over the unmasked elements of all ranks.
    `MetricAverage` weights all samples equally. Moving statistics of batch
    normalization differ between ranks, unless the layer is synchronized;
    `CombineMovingStatistics` combines them. A rank without any batch in an epoch gets
    the combined moving statistics of the other ranks.

    It has to be the first tfdist callback in the list. Data from `tfdist.data.shard`
    have the same number of batches on all ranks and do not need this callback.

    Args:
        weighted: whether batches are weighted by their numbers of samples; default
            True. The cost is one reduction of 16 bytes per step and one more for each
            loss with a mask. With `jit_compile=True`, training then does not use XLA.
            If False, all batches of a step have equal weight. Use False for batches of
            equal sizes, or for a custom `train_step` that does not call
            `self.compute_loss`. In a custom `compute_loss`, masks are respected for the
            losses of `compile`; other losses are assumed to be means over samples.
        timeout_s: longest time in seconds between two reductions of the ranks that
            still have data; default `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: an argument is invalid. At the start of `fit`: a different tfdist
            callback precedes this one, or, if `weighted`, the optimizer sums gradients
            instead of averaging, or a loss is a sum over samples or is divided by the
            sum of their weights (any `reduction` but "sum_over_batch_size" and "mean").
        NotImplementedError: at the start of `fit`: an optimizer accumulates gradients
            (a rank whose data end within an accumulation would lose some), has local
            variables, or uses `ReduceOp.ADASUM` or `double_buffering`;
            `steps_per_execution` is above 1 with a callback in which the ranks wait for
            each other after each execution; or a `Checkpoint` has a number of steps as
            `save_freq`.
        RuntimeError: after the first step, if `weighted` and the `train_step` did not
            call `self.compute_loss`.
        tfdist.MismatchError: on all ranks: the root of a broadcast is a rank whose data
            have ended.

    Example:
        >>> import keras, tfdist
        >>> callbacks = [tfdist.callbacks.UnevenData(),
        ...              tfdist.callbacks.BroadcastInitialState(),
        ...              tfdist.callbacks.MetricAverage()]
    """

    def __init__(
        self, *, weighted: bool = True, timeout_s: float | None = None
    ) -> None:
        super().__init__()
        if weighted not in (True, False):
            raise ValueError(f"Expected weighted=True or False, got {weighted!r}.")
        native.timeout_of(timeout_s)  # raises if timeout_s is invalid
        self.weighted = weighted
        self.timeout_s = timeout_s
        self._steps = 0
        self._in_epoch = False
        self._latest = 0
        self._fills_logs = False
        self._builds = False
        self._weights_seen: list[bool] = []

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns how batches are weighted."""
        return {"weighted": self.weighted}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model, and starts to weight its losses."""
        super().on_train_begin(logs)
        _check_model(self.model, self.weighted)
        _check_others(self.model, self._listed)
        if self.weighted:
            self._weights_seen = weigh_losses(self.model, self._ranks)
            self.model.make_train_function(force=True)
        self._builds = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Undoes the changes to the model."""
        super().on_train_end(logs)
        if self.weighted:
            restore_compute_loss(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resets the step count of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._steps = 0
        self._in_epoch = True
        self._fills_logs = False

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Schedules building the metrics, so that a rank without batches has them."""
        super().on_train_batch_begin(batch, logs)
        if self._builds:
            self._builds = False
            before_first_call(self.model, functools.partial(build_metrics, self.model))

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts the step; checks that its loss was weighted."""
        super().on_train_batch_end(batch, logs)
        self._steps += 1
        if self.weighted and not self._weights_seen:
            raise RuntimeError(
                "UnevenData weights the batches of the ranks in model.compute_loss, "
                "which this train_step does not call. Use UnevenData(weighted=False). "
                "If batches differ in size, pass the number of samples to "
                "tape.gradient(..., weight=...) or optimizer.apply(..., weight=...)."
            )

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the training part of the epoch before its validation."""
        if self._in_epoch:
            self._end_of_data()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the epoch; a rank without a batch gets the logs of another rank."""
        if self._in_epoch:
            self._end_of_data()
        if not self._fills_logs:
            return
        numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, float)}
        told = broadcast_object(
            numbers,
            self._latest,
            name="UnevenData at the end of an epoch",
            process_set=self._ranks,
        )
        if self._steps == 0 and logs is not None:
            for key, value in told.items():
                logs.setdefault(key, value)

    def _end_of_data(self) -> None:
        """Waits for the ranks with more batches, and gets their final state."""
        self._in_epoch = False
        if runtime.size() == 1:
            return
        self._latest, complete = collectives.join_all(
            timeout_s=self.timeout_s, process_set=self._ranks
        )
        if self._steps == 0:  # the call that found no data has still counted a batch
            self.model.reset_metrics()
        optimizers = optimizers_of(self.model)
        updates = sum(int(one.iterations) for one in optimizers)
        is_unbuilt = not all(one.built for one in optimizers)
        # If the length of the data is unknown, TensorFlow finds their end in a step,
        # parts of which may have been executed on some ranks only.
        is_unsure = self.params.get("steps") is None
        is_empty = self._steps == 0
        own = [updates, -updates, is_empty, not is_empty, is_unsure, is_unbuilt]
        most, least, is_empty, has_data, is_unsure, is_unbuilt = collectives.allreduce(
            tf.constant(own, tf.int64),
            op=ReduceOp.MAX,
            name="UnevenData, steps of an epoch",
            process_set=self._ranks,
        ).numpy()
        self._fills_logs = bool(is_empty)
        all_complete = complete == len(members_of(self._ranks))
        if all_complete and most == -least and not is_unsure:
            return
        if is_unbuilt:
            build_alike(self.model, self._latest, self._ranks)
        broadcast_variables(
            _shared_variables(self.model), self._latest, process_set=self._ranks
        )
        self._take_warmups()
        if is_empty and has_data:
            self._take_statistics()

    def _take_warmups(self) -> None:
        """Gives all ranks the warm-up progress of the rank with the most steps."""
        warmups = [one for one in self._listed if isinstance(one, LearningRateWarmup)]
        if not warmups:
            return
        latest = broadcast_object(
            [one.progress() for one in warmups],
            self._latest,
            name="UnevenData, warm-ups",
            process_set=self._ranks,
        )
        for one, progress in zip(warmups, latest, strict=True):
            one.continue_from(progress)

    def _take_statistics(self) -> None:
        """Gives ranks without data the combined moving statistics of the others.

        These ranks then do not change the result of `CombineMovingStatistics`.
        Statistics that are not combined (those of `renorm=True`) come from one rank.
        """
        variables = _own_statistics(self.model)
        if not variables:
            return
        own = [tf.convert_to_tensor(variable) for variable in variables]
        received = collectives.grouped_broadcast(
            own,
            self._latest,
            name="UnevenData, moving statistics",
            process_set=self._ranks,
        )
        is_empty = self._steps == 0
        if is_empty:
            _assign(variables, received)
        where = "after an epoch in which a rank had no batch"
        combine_at(where, self.model, float(not is_empty), self._ranks)
        if not is_empty:
            _assign(variables, own)


def _check_model(model: keras.Model, weighted: bool) -> None:
    for optimizer in optimizers_of(model):
        _check_optimizer(optimizer, weighted)
    reductions = reductions_of(model)
    sums = [one for one in SUMS if one in reductions]
    if weighted and sums:
        raise ValueError(
            "UnevenData weights the means of the ranks' batches, but the model has a "
            f"loss with reduction={sums[0]!r}. Use UnevenData(weighted=False) and "
            "DistributedOptimizer(optimizer, op=tfdist.ReduceOp.SUM), or omit "
            "reduction."
        )
    if weighted and "mean_with_sample_weight" in reductions:
        raise ValueError(
            "UnevenData weights the ranks' batches by their numbers of samples, but "
            "the model has a loss with reduction='mean_with_sample_weight', which "
            "divides by the sum of sample weights. Omit reduction to divide the loss "
            "by the number of samples."
        )


def _check_optimizer(optimizer: Any, weighted: bool) -> None:
    if accumulates(optimizer):
        raise NotImplementedError(
            "UnevenData cannot be used with gradient_accumulation_steps: a rank whose "
            "data end between two updates would lose its accumulated gradients. Use "
            "tfdist.data.shard(...), which returns equal numbers of batches, without "
            "UnevenData."
        )
    options = getattr(optimizer, "tfdist_options", None)
    if options is not None and options.local_variables is not None:
        raise NotImplementedError(
            "UnevenData cannot be used with local_variables: a rank whose data have "
            "ended gets the state of a different rank, which has different local "
            "variables. Use tfdist.data.shard(...) without UnevenData."
        )
    if options is not None and options.op == ReduceOp.ADASUM:
        raise NotImplementedError(
            "UnevenData cannot be used with op=tfdist.ReduceOp.ADASUM: a rank whose "
            "data have ended gets the state of a different rank, which has different "
            "slots. Use tfdist.data.shard(...) without UnevenData."
        )
    if options is not None and options.double_buffering:
        raise NotImplementedError(
            "UnevenData cannot be used with double_buffering=True: a rank whose data "
            "have ended would not contribute the gradients of its last step. Use "
            "tfdist.data.shard(...) without UnevenData."
        )
    if weighted and options is not None and options.op != ReduceOp.AVERAGE:
        raise ValueError(
            "UnevenData weights the ranks' batches for an average, but the optimizer "
            f"reduces with op={options.op.name}. Use DistributedOptimizer(optimizer) "
            "or UnevenData(weighted=False)."
        )


def _check_others(
    model: keras.Model, callbacks: list[keras.callbacks.Callback]
) -> None:
    """Raises for callbacks in which the ranks would wait for each other forever."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint) and callback.save_freq != "epoch":
            raise NotImplementedError(
                f"Checkpoint(save_freq={callback.save_freq}) counts the steps of each "
                "rank, which differ with UnevenData. Use save_freq='epoch'."
            )
        meets = isinstance(callback, RankCallback) and callback.meets_at_steps
        if meets and model.steps_per_execution > 1:
            name = type(callback).__name__
            raise NotImplementedError(
                f"UnevenData with steps_per_execution={model.steps_per_execution} "
                f"cannot be used with {name}, in which the ranks wait for each other "
                "after every execution. A rank whose data end within an execution "
                "would wait for ranks that wait for its next step. Compile the model "
                f"with steps_per_execution=1, or remove {name}."
            )


def _assign(variables: list[Any], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _own_statistics(model: keras.Model) -> list[Any]:
    """Returns the moving statistics, which each rank computes from its own batches."""
    return [
        variable
        for layer in batch_normalizations(model)
        if not is_synchronized(layer)
        for variable in layer.non_trainable_variables
    ]


def _shared_variables(model: keras.Model) -> list[Any]:
    """Returns the variables that are equal on all ranks, without moving statistics."""
    own = set(map(id, _own_statistics(model)))
    optimizers = optimizers_of(model)
    slots = [v for one in optimizers for v in one.variables] + factors_of(optimizers)
    return [v for v in model.weights + slots if id(v) not in own]
