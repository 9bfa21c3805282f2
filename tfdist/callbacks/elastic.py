"""Elastic: `model.fit` that continues when a rank is lost."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks._base import RankCallback, accumulates
from tfdist.callbacks._callback_list import callback_list_of_the_call, variables_of_fit
from tfdist.callbacks._callback_states import MAX_CALLBACK_BYTES
from tfdist.callbacks._elastic_fit import ElasticFit
from tfdist.callbacks._loss_reductions import SUMS, reductions_of
from tfdist.callbacks._loss_weighting import restore_compute_loss, weigh_losses
from tfdist.callbacks.uneven_data import UnevenData
from tfdist.collectives import ReduceOp
from tfdist.core import runtime
from tfdist.core.process_sets import members_of
from tfdist.core.rendezvous import renewal
from tfdist.data._epoch_order import check_int
from tfdist.data._global_batches import source_of
from tfdist.training.model_building import build_metrics, unbuilt_layers
from tfdist.training.model_optimizers import optimizers_of

_DIVISIBLE = (  # for messages
    "global_batch divisible by every possible number of ranks (in an elastic job, 1 to "
    "--max-np)"
)


@dataclass
class _Program:
    """State that is kept over all calls of `fit` in this process."""

    was_used: bool = False  # whether a call of `fit` in an elastic job used Elastic


_program = _Program()


class Elastic(RankCallback):
    """Continues `fit` when a rank is lost, in a job started with `--min-np`.

    The remaining ranks undo the step in progress, reconnect, and repeat the step,
    without leaving `fit` and without retracing. tfdistrun starts a new process in place
    of the lost one. The new process receives weights, optimizers, metrics, the position
    in the data, and the state of the callbacks from another rank, and joins at a later
    step. In a job started without `--min-np`, the loss of a rank ends `fit`; the
    callback is then useful only for `start` and for a `BatchSchedule`.

    The data have to come from `tfdist.data.global_batches`. With `global_batch`, each
    step uses the same samples for any number of ranks; if the ranks cannot divide a
    batch equally, the gradients are weighted by the number of samples. With
    `per_rank_batch`, more ranks use more samples in a step and fewer steps in an epoch;
    the learning rate may have to be adapted (docs/elastic.md). A `BatchSchedule`, with
    larger batches in later epochs, needs this callback in every job, elastic or not.
    Validation data from `global_batches` have the order of epoch 0 in every validation.

    A rank that receives SIGTERM leaves after a step, and the others continue. If
    tfdistrun receives SIGTERM, or if too few ranks would remain, all ranks exit after
    the same step with code 143, and a `StopOnSignal` in the list saves its checkpoint
    at that step. In an elastic job, `StopOnSignal` itself handles only signals other
    than SIGTERM.

    At the start of `fit`, all ranks get the state of rank 0, as by a
    `BroadcastInitialState`, which is not needed, but allowed, for example with
    `seed_generators="equal"`. Of a callback's state, attributes that are numbers,
    arrays, lists or dicts are sent to other ranks, up to 256 MiB; strings and other
    objects are not. A callback in `RankZeroOnly` continues on a new rank 0 with the
    state that it had after the last hook at the beginning or end of an epoch. A hook
    that uses collective operations may run twice if a rank is lost during the hook.

    Args:
        start: number of steps that an earlier job has completed, e.g. the result of
            `tfdist.restore`; default 0. `fit` begins with the next step. If this step
            is in the middle of an epoch, the metrics of the epoch cover only the
            remaining steps. All ranks use the value of rank 0. Works in every job,
            elastic or not.

    Raises:
        TypeError: `start` is not an integer.
        ValueError: `start` is negative. At the start of `fit`: the data do not come
            from `tfdist.data.global_batches`, or have `drop_remainder=False`; they have
            a `per_rank_batch`, and `start` is not 0; the validation data have a
            `per_rank_batch` or a `BatchSchedule`; the model or an optimizer is not
            built; `global_batch` of the validation data is smaller than the number of
            ranks; `fit` has `steps_per_epoch` or `class_weight`, or `initial_epoch`
            with `start`; `start` is within an execution (`steps_per_execution`); or the
            ranks may be unable to divide a batch equally, and the optimizer uses
            `ReduceOp.ADASUM` or averages gradients of a loss that is not a mean over
            samples (`reduction`).
        tfdist.MismatchError: at the start of `fit`: the data or their sizes differ
            between the ranks.
        NotImplementedError: at the start of `fit`: the list contains an `UnevenData`,
            or an optimizer has a `process_set` of only some ranks; or, in an elastic
            job, an optimizer accumulates gradients or has local variables, or an
            `EarlyStopping` has `restore_best_weights` for a model with more than 253
            MiB of weights.
        RuntimeError: in an elastic job: the program has already called `fit` with an
            `Elastic`. After the first step: batches have to be weighted, but the
            `train_step` does not call `self.compute_loss`.
        tfdist.RankFailedError: a rank was lost and the job cannot continue. The weights
            are those of the last completed step.
        SystemExit: with code 143 on a rank that leaves, and on all ranks of a job that
            is preempted (docs/preemption.md).

    Example:
        >>> import keras, numpy as np, tfdist
        >>> tfdist.init()
        >>> x, y = np.random.rand(64, 4), np.random.rand(64, 1)
        >>> train = tfdist.data.global_batches((x, y), global_batch=16)
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(
        ...     tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        >>> history = model.fit(train, epochs=2, verbose=0, callbacks=[
        ...     tfdist.callbacks.Elastic(), tfdist.callbacks.MetricAverage()])
    """

    def __init__(self, *, start: int = 0) -> None:
        super().__init__()
        self.start = check_int("start", start, 0)
        self._weights_seen: list[bool] | None = None
        self._step_size: tf.Variable | None = None
        self._source: Any = None
        self._validation: Any = None  # source of the validation data, if it has one

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns a description of the data, and whether the job is elastic."""
        settings: dict[str, Any] = {"elastic_job": renewal.is_elastic(os.environ)}
        source = source_of((variables_of_fit(self.model) or {}).get("x"))
        return settings | ({"data": source.describe()} if source is not None else {})

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Corrects the number of steps, if it depends on the ranks or on the epoch.

        Keras reads this number from the dataset, which states the largest possible one.
        `ElasticFit` sets it in each epoch. Before the first one, it is the number of
        epoch 0, so that a warm-up has the same length when training is resumed.
        """
        super().set_params(params)
        found = variables_of_fit(self.model) or {}
        if isinstance(found.get("callbacks"), keras.callbacks.CallbackList):
            return  # ElasticFit sets the number
        source = source_of(found.get("x"))
        if params and source is not None and source.steps_vary:
            params["steps"] = source.steps_left(0, 0, runtime.size())

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model and the data, and lets `ElasticFit` run the steps."""
        super().on_train_begin(logs)
        self._source, self._validation = _sources_of_fit(self.model, self.start)
        _check_model(self.model)
        _check_ranks(self.model)
        _check_callbacks(self._listed)
        is_elastic = renewal.is_elastic(os.environ)
        if is_elastic:
            _check_elastic(self.model)
            _check_best_weights(self.model, self._listed)
        self._step_size = tf.Variable([0, 0], dtype=tf.int64, trainable=False)
        self._weights_seen = None
        if self._needs_weights(is_elastic):
            _check_reductions(self.model)
            self._weights_seen = weigh_losses(self.model, None, self._factor_of)
            self.model.make_train_function(force=True)
        build_metrics(self.model, self._source.dataset.element_spec)
        running = callback_list_of_the_call()
        _program.was_used = _program.was_used or is_elastic
        ElasticFit(running, self._source, self._step_size, self.start, self._release)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the epoch of the data."""
        super().on_epoch_begin(epoch, logs)
        self._source.seek(epoch)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Checks after a step that its loss was weighted."""
        super().on_train_batch_end(batch, logs)
        if self._weights_seen == []:
            raise RuntimeError(
                "Elastic weights the parts of a batch in model.compute_loss, which "
                "this train_step does not call. Call self.compute_loss, or use a "
                f"{_DIVISIBLE}."
            )

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Sets the order of the validation data, the same on all ranks at any time."""
        super().on_test_begin(logs)
        if self._validation is not None:
            self._validation.seek(0)

    def _release(self) -> None:
        """Undoes the changes to the model and the data."""
        restore_compute_loss(self.model)
        self._source.release()
        if self._validation is not None:
            self._validation.release()
            self._validation = None

    def _needs_weights(self, is_elastic: bool) -> bool:
        if self._source.is_per_rank or not _averages(self.model):
            return False
        sizes: Sequence[int] = [runtime.size()]
        if is_elastic:
            sizes = range(1, renewal.largest_size(os.environ) + 1)
        return any(
            one % size for size in sizes for one in self._source.step_sizes(size)
        )

    def _factor_of(self, samples: tf.Tensor) -> tf.Tensor:
        """Returns n_r K / n: this rank has n_r of the n samples that K ranks share."""
        all_samples, size = tf.unstack(tf.cast(self._step_size, tf.float64))
        return tf.cast(samples, tf.float64) * size / all_samples


def _sources_of_fit(model: keras.Model, start: int) -> tuple[Any, Any]:
    """Returns the sources of the training and, if there is one, validation data."""
    found = variables_of_fit(model) or {}
    source = source_of(found.get("x"))
    if source is None:
        raise ValueError(
            "Elastic needs data from tfdist.data.global_batches. Pass "
            "global_batches((x, y), global_batch=...) to fit, got "
            f"{type(found.get('x')).__name__}."
        )
    if not source.drop_remainder:
        raise ValueError(
            "Elastic trains on steps of equal size. Remove drop_remainder=False from "
            "tfdist.data.global_batches; it is for validation data only."
        )
    for name in ("steps_per_epoch", "class_weight"):
        if found.get(name) is not None:
            advice = {
                "steps_per_epoch": "An epoch is one pass over the data.",
                "class_weight": "Pass sample weights as the data's third component.",
            }[name]
            raise ValueError(f"Elastic cannot be used with {name} in fit. {advice}")
    validation = source_of(found.get("validation_data"))
    if validation is not None and (validation.is_per_rank or validation.steps_vary):
        kind = "per_rank_batch" if validation.is_per_rank else "BatchSchedule"
        raise ValueError(
            f"Expected validation data with a global_batch, got a {kind}. Use "
            "tfdist.data.global_batches(..., global_batch=..., shuffle=False, "
            "drop_remainder=False)."
        )
    size = runtime.size()
    if renewal.is_elastic(os.environ):
        # Before a process joins, its size may be larger than that of the job can be.
        size = min(size, renewal.largest_size(os.environ))
    if validation is not None and validation.step_size(0, size) < size:
        raise ValueError(
            f"Expected validation data with a global_batch of at least {size}, the "
            f"number of ranks, got {validation.step_size(0, size)}."
        )
    if start and source.is_per_rank:
        raise ValueError(
            f"Elastic cannot be used with start={start} and a per_rank_batch, because "
            "the samples that these steps used depend on the ranks of the earlier job. "
            "Use a global_batch, or begin at the start of an epoch, with initial_epoch "
            "in fit."
        )
    if start and found.get("initial_epoch"):
        raise ValueError(
            f"Expected fit without initial_epoch, because Elastic has start={start}, "
            f"got initial_epoch={found['initial_epoch']!r}."
        )
    return source, validation


def _check_model(model: keras.Model) -> None:
    unbuilt = unbuilt_layers(model)
    if unbuilt:
        raise ValueError(
            "Elastic needs a model that is built before fit; "
            f"{unbuilt[0].name!r} is not. Add a keras.Input, or call model.build("
            "input_shape)."
        )
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    for one in optimizers_of(model):
        if not one.built:
            raise ValueError(
                f"Elastic needs optimizers that are built before fit; {one.name!r} is "
                "not. Call optimizer.build(variables)."
            )


def _check_ranks(model: keras.Model) -> None:
    for one in optimizers_of(model):
        options = getattr(one, "tfdist_options", None)
        ranks = [] if options is None else list(members_of(options.process_set))
        if 0 < len(ranks) < runtime.size():
            raise NotImplementedError(
                "Elastic cannot be used with process_set: tfdist.data.global_batches "
                f"divides each batch among all {runtime.size()} ranks, but the "
                f"optimizer {one.name!r} reduces over the ranks {ranks}. Use "
                "tfdist.data.shard, without Elastic."
            )


def _check_callbacks(callbacks: list[keras.callbacks.Callback]) -> None:
    if any(isinstance(one, UnevenData) for one in callbacks):
        raise NotImplementedError(
            "Elastic cannot be used with UnevenData. tfdist.data.global_batches gives "
            "all ranks the same number of steps; remove UnevenData."
        )


def _check_elastic(model: keras.Model) -> None:
    if _program.was_used:
        raise RuntimeError(
            "Elastic was used in an earlier fit of this program. In a job started with "
            "--min-np, run all epochs in one fit: a process that joins later could not "
            "know in which fit the other ranks are."
        )
    if any(map(accumulates, optimizers_of(model))):
        raise NotImplementedError(
            "Elastic cannot be used with gradient_accumulation_steps: the gradients "
            "that a lost rank has accumulated would be missing. Use a larger "
            "global_batch, or start the job without --min-np."
        )
    for one in optimizers_of(model):
        options = getattr(one, "tfdist_options", None)
        if options is not None and options.local_variables is not None:
            raise NotImplementedError(
                "Elastic cannot be used with local_variables: those of a lost rank "
                "would be missing. Start the job without --min-np."
            )


def _check_best_weights(
    model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]
) -> None:
    """Raises if the best weights of an `EarlyStopping` are too large to be sent."""
    size = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.weights)
    limit = 0.99 * MAX_CALLBACK_BYTES  # the encoding needs some bytes as well
    if size < limit:
        return
    inner = [getattr(one, "callback", one) for one in callbacks]  # of a RankZeroOnly
    if any(getattr(one, "restore_best_weights", False) for one in inner):
        raise NotImplementedError(
            "Elastic cannot be used with EarlyStopping(restore_best_weights=True) and "
            f"{math.ceil(size / 2**20)} MiB of weights. At most {int(limit) >> 20} MiB "
            "of best weights can be sent to a process that replaces a lost rank. Omit "
            "restore_best_weights, and save the best model with "
            "tfdist.callbacks.Checkpoint(..., save_best_only=True)."
        )


def _averages(model: keras.Model) -> bool:
    """Returns whether gradients are averaged, so that their parts need weights.

    If no optimizer reduces, a tape does, by default to an average. With a loss that is
    a sum over samples, no weights are needed, whatever the tape computes.
    """
    ops = _ops_of(model)
    if not ops:
        return not any(one in reductions_of(model) for one in SUMS)
    return not ops.isdisjoint({ReduceOp.AVERAGE, ReduceOp.ADASUM})


def _ops_of(model: keras.Model) -> set[ReduceOp]:
    options = [getattr(one, "tfdist_options", None) for one in optimizers_of(model)]
    return {one.op for one in options if one is not None}


def _check_reductions(model: keras.Model) -> None:
    if ReduceOp.ADASUM in _ops_of(model):
        raise ValueError(
            "op=tfdist.ReduceOp.ADASUM cannot be used with a batch that the ranks may "
            "be unable to divide equally, because it cannot weight their parts. Use a "
            f"{_DIVISIBLE}."
        )
    found = reductions_of(model)
    wrong = [one for one in (*SUMS, "mean_with_sample_weight") if one in found]
    if wrong:
        raise ValueError(
            "Elastic weights the parts of a batch by their numbers of samples, but the "
            f"model has a loss with reduction={wrong[0]!r}. Omit reduction, or use a "
            f"{_DIVISIBLE}."
        )
