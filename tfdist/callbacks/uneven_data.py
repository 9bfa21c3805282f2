"""UnevenData: ranks with different numbers of batches."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist import collectives
from tfdist.callbacks._base import RankCallback, base_optimizer
from tfdist.callbacks._learning_rates import factors_of
from tfdist.callbacks._loss_reductions import SUMS, reductions_of
from tfdist.callbacks._loss_weighting import restore_compute_loss, weigh_losses
from tfdist.callbacks.checkpoint import Checkpoint
from tfdist.collectives import ReduceOp
from tfdist.collectives.objects import broadcast_object
from tfdist.collectives.variables import broadcast_variables
from tfdist.core import native, runtime
from tfdist.core.process_sets import members_of
from tfdist.layers.synchronized import batch_normalizations, is_synchronized
from tfdist.training.model_building import before_first_call, is_built
from tfdist.training.model_optimizers import build_alike, optimizers_of


class UnevenData(RankCallback):
    """Lets every rank go through all of its data, however many batches it has.

    A rank whose data end earlier in an epoch takes part in the others' reductions
    (`tfdist.join`), until all have come to the end. Then it takes over the weights and
    the optimizer's state of a rank that has taken every step. So each sample is used
    once, and all ranks go on from the same state; a rank without any batch in an epoch
    is fine, too.

    The gradient of each step is that of the mean over all samples of all ranks' batches
    of this step, as it would be in one process: also where the batches of the ranks
    differ in size, as last batches do. A loss with a mask (`Masking`, `mask_zero`,
    `ignore_class`) is the mean over what the masks of all ranks leave. The metrics of
    `MetricAverage` weight every sample alike. Moving statistics of batch normalisation
    stay each rank's own (`CombineMovingStatistics`), unless the layer is synchronised;
    a rank without any batch in an epoch takes over those of one that has taken every
    step.

    It has to be the first tfdist callback in the list. Data from `tfdist.data.shard`
    have the same number of batches on all ranks and do not need it.

    Args:
        weighted: whether batches count by their numbers of samples, default True. It
            costs one message of 16 bytes a step, another one for each loss with a
            mask, and with `jit_compile=True` the use of XLA in training. False: every
            batch of a step counts alike; for batches of equal sizes, and for a
            `train_step` of your own that does not call `self.compute_loss`. In a
            `compute_loss` of your own the losses of `compile` count so; what it
            calculates itself is taken for a mean over samples.
        timeout_s: seconds for which ranks that still have data may reduce nothing;
            default `TFDIST_TIMEOUT_S`.

    Raises:
        ValueError: an argument is none of these. At the start of `fit`: another tfdist
            callback comes before it; or `weighted`, and the optimizer adds the
            gradients up instead of averaging, or a loss adds up its samples or divides
            by the sum of their weights (any `reduction` but "sum_over_batch_size" and
            "mean").
        NotImplementedError: at the start of `fit`: the optimizer accumulates gradients
            (a rank whose data end in between would lose some) or has local variables;
            `steps_per_execution` is above 1 with a callback in which the ranks meet
            after each execution; or a `Checkpoint` counts steps.
        RuntimeError: after the first step, if `weighted` and the `train_step` did not
            call `self.compute_loss`.
        tfdist.MismatchError: on all ranks, if a rank broadcasts from one whose data
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
        native.timeout_of(timeout_s)  # refuses what is none
        self.weighted = weighted
        self.timeout_s = timeout_s
        self._steps = 0
        self._in_epoch = False
        self._latest = 0
        self._fills_logs = False
        self._builds = False
        self._weights_seen: list[bool] = []

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """How batches count."""
        return {"weighted": self.weighted}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model; from here on its losses are weighted."""
        super().on_train_begin(logs)
        _check_model(self.model, self.weighted)
        _check_others(self.model, self._listed)
        if self.weighted:
            self._weights_seen = weigh_losses(self.model, self._ranks)
            self.model.make_train_function(force=True)
        self._builds = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the model back as it was."""
        super().on_train_end(logs)
        if self.weighted:
            restore_compute_loss(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._steps = 0
        self._in_epoch = True
        self._fills_logs = False

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Comes on a rank without any batch as well, which has metrics all the same."""
        super().on_train_batch_begin(batch, logs)
        if self._builds:
            self._builds = False
            before_first_call(self.model, functools.partial(_build_metrics, self.model))

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts the step; after the first one looks whether it was weighted."""
        super().on_train_batch_end(batch, logs)
        self._steps += 1
        if self.weighted and not self._weights_seen:
            raise RuntimeError(
                "UnevenData weights the batches of the ranks in model.compute_loss, "
                "which this train_step does not call. Write UnevenData(weighted=False)"
                ", and give tape.gradient(..., weight=...) or optimizer.apply(..., "
                "weight=...) the number of samples where batches differ in size."
            )

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """The validation of an epoch comes before its end."""
        if self._in_epoch:
            self._end_of_data()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """All ranks come together; one without a batch takes over the names of logs."""
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
        """Waits for the ranks that have more, and takes over what they have learnt."""
        self._in_epoch = False
        if runtime.size() == 1:
            return
        self._latest, complete = collectives.join_all(
            timeout_s=self.timeout_s, process_set=self._ranks
        )
        if self._steps == 0:  # the first call counts a batch, also where there is none
            self.model.reset_metrics()
        optimizers = optimizers_of(self.model)
        updates = sum(int(one.iterations) for one in optimizers)
        is_unbuilt = not all(one.built for one in optimizers)
        # Where their length is not known TensorFlow finds the end of the data within a
        # step, parts of which may have been done, on some ranks and not on others.
        is_unsure = self.params.get("steps") is None
        own = [updates, -updates, self._steps == 0, is_unsure, is_unbuilt]
        most, least, is_empty, is_unsure, is_unbuilt = collectives.allreduce(
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
        if is_empty:
            self._take_statistics()

    def _take_statistics(self) -> None:
        """A rank that has seen no data has none to add to what is combined later."""
        variables = _own_statistics(self.model)
        if not variables:
            return
        received = collectives.grouped_broadcast(
            [tf.convert_to_tensor(variable) for variable in variables],
            self._latest,
            name="UnevenData, moving statistics",
            process_set=self._ranks,
        )
        if self._steps == 0:
            for variable, value in zip(variables, received, strict=True):
                variable.assign(value)


def _check_model(model: keras.Model, weighted: bool) -> None:
    if getattr(base_optimizer(model), "gradient_accumulation_steps", None):
        raise NotImplementedError(
            "UnevenData cannot be used with gradient_accumulation_steps: a rank whose "
            "data end between two updates would lose what it has added up. Deal out "
            "the data with tfdist.data.shard(...), in equal numbers of batches, and "
            "leave UnevenData out."
        )
    options = getattr(model.optimizer, "tfdist_options", None)
    if options is not None and options.local_variables is not None:
        raise NotImplementedError(
            "UnevenData cannot be used with local_variables: a rank whose data have "
            "ended takes over the state of another one, which has none of them. Deal "
            "out the data with tfdist.data.shard(...), and leave UnevenData out."
        )
    if weighted and options is not None and options.op != ReduceOp.AVERAGE:
        raise ValueError(
            "UnevenData weights the ranks' batches for an average, but the optimizer "
            "reduces with op=SUM. Write DistributedOptimizer(optimizer), or "
            "UnevenData(weighted=False)."
        )
    reductions = reductions_of(model)
    sums = [one for one in SUMS if one in reductions]
    if weighted and sums:
        raise ValueError(
            "UnevenData weights the means of the ranks' batches, but the model has a "
            f"loss with reduction={sums[0]!r}. Write UnevenData(weighted=False) and "
            "DistributedOptimizer(optimizer, op=tfdist.ReduceOp.SUM); or leave out "
            "reduction."
        )
    if weighted and "mean_with_sample_weight" in reductions:
        raise ValueError(
            "UnevenData weights the ranks' batches by their numbers of samples, but "
            "the model has a loss with reduction='mean_with_sample_weight', whose "
            "batches count by the sums of their sample weights. Leave out reduction: "
            "the loss is then divided by the number of samples."
        )


def _check_others(
    model: keras.Model, callbacks: list[keras.callbacks.Callback]
) -> None:
    """Refuses callbacks in which the ranks would wait for each other for ever."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint) and callback.save_freq != "epoch":
            raise NotImplementedError(
                f"Checkpoint(save_freq={callback.save_freq}) counts the steps of each "
                "rank, which differ with UnevenData. Write save_freq='epoch'."
            )
        meets = isinstance(callback, RankCallback) and callback.meets_at_steps
        if meets and model.steps_per_execution > 1:
            name = type(callback).__name__
            raise NotImplementedError(
                f"UnevenData with steps_per_execution={model.steps_per_execution} "
                f"cannot be used with {name}, in which the ranks wait for each other "
                "after every execution: one whose data end within it would wait for "
                "ranks that wait for its next step. Compile the model with "
                f"steps_per_execution=1, or leave out {name}."
            )


def _build_metrics(model: keras.Model, batch: Any) -> None:
    """Makes the metrics, which a rank without a batch would miss.

    It gets no further than to its first call, and the ranks add theirs up.
    """
    if is_built(model) and model._compile_metrics is not None:
        model._symbolic_build(data_batch=batch)


def _own_statistics(model: keras.Model) -> list[Any]:
    """The moving statistics that each rank has of its own batches."""
    return [
        variable
        for layer in batch_normalizations(model)
        if not is_synchronized(layer)
        for variable in layer.non_trainable_variables
    ]


def _shared_variables(model: keras.Model) -> list[Any]:
    """Returns the variables equal on all ranks, without a rank's own statistics."""
    own = set(map(id, _own_statistics(model)))
    optimizers = optimizers_of(model)
    slots = [v for one in optimizers for v in one.variables] + factors_of(optimizers)
    return [v for v in model.weights + slots if id(v) not in own]
