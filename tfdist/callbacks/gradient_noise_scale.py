"""GradientNoiseScale: measures how large the global batch can usefully be."""

from __future__ import annotations

import logging
import os
from typing import Any

import tensorflow as tf

from tfdist.callbacks._base import RankCallback
from tfdist.callbacks.uneven_data import UnevenData
from tfdist.collectives import ReduceOp, allreduce
from tfdist.core import runtime
from tfdist.core.process_sets import members_of
from tfdist.core.rendezvous import renewal
from tfdist.data import BatchSchedule
from tfdist.gradients.noise_scale import (
    GradientSquares,
    advice,
    measure,
    noise_scale,
    stop_measuring,
)

_logger = logging.getLogger("tfdist")


class GradientNoiseScale(RankCallback):
    """Estimates the gradient noise scale in each epoch, and recommends a batch size.

    The noise scale is the global batch size, in samples, at which the noise of the
    averaged gradient is as large as the gradient itself. Far below the noise scale,
    doubling the global batch saves about half of the steps. Far above it, a larger
    batch saves hardly any steps. The noise scale grows during training, often by a
    factor of ten or more, so a batch size that is too large in the first epoch may be
    right later (`tfdist.data.BatchSchedule`).

    The estimate uses the squared norms of each rank's own gradients and of the averaged
    gradients, as means over the steps of an epoch. Each step therefore computes two
    additional norms. At the end of an epoch, `noise_scale` is added to the logs. Its
    value is equal on all ranks, and infinite if the gradients are too noisy for an
    estimate. If no gradients of an epoch were finite, nothing is added.

    Put it before callbacks that use the logs, such as `keras.callbacks.CSVLogger`.

    Args:
        global_batch: number of samples in one step on all ranks together, or the
            `BatchSchedule` of the data. With gradient accumulation, the number in one
            micro-batch. All ranks must have equal shares of these samples.
        verbose: 1 (default): the first rank prints a line after each epoch; 0: no line.

    Raises:
        ValueError: `global_batch` is below 1 or `verbose` is not 0 or 1. At the start
            of `fit`: there is only one rank, or the optimizer is not a
            `DistributedOptimizer` that averages the gradients of the current step, with
            the default `op` and without `double_buffering`.
        NotImplementedError: at the start of `fit`: the job is elastic, or `UnevenData`
            is used. In the first step: a `weight` is passed with the gradients.
        tfdist.MismatchError: at the start of `fit`: the ranks' settings differ.

    Example:
        >>> import tfdist
        >>> callbacks = [tfdist.callbacks.GradientNoiseScale(global_batch=256)]

    References:
        McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of
        Large-Batch Training, 2018, section 2 and appendix A.1 (arXiv:1812.06162).
    """

    def __init__(self, global_batch: int | BatchSchedule, *, verbose: int = 1) -> None:
        super().__init__()
        if not isinstance(global_batch, BatchSchedule):
            if isinstance(global_batch, bool) or not global_batch >= 1:
                raise ValueError(
                    "Expected a global_batch of at least 1 sample, got "
                    f"{global_batch!r}."
                )
            global_batch = BatchSchedule({0: global_batch})
        if verbose not in (0, 1):
            raise ValueError(f"Expected verbose=0 or 1, got {verbose!r}.")
        self.global_batch = global_batch
        self.verbose = verbose
        self._squares: GradientSquares | None = None

    def settings_of_all_ranks(self) -> dict[str, Any]:
        """Returns the global batch."""
        return {"global_batch": repr(self.global_batch)}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the steps of this `fit` measure their gradients."""
        super().on_train_begin(logs)
        self._check_supported()
        self._squares = GradientSquares()
        measure(self.model.optimizer, self._squares)
        self.model.train_function = None  # an earlier fit may have traced it
        self.model.make_train_function()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `noise_scale` to the logs, and prints a recommendation."""
        if self._squares is None:
            return
        own, total, steps = allreduce(
            tf.constant(self._squares.take(), tf.float64),
            name="noise_scale",
            process_set=self._ranks,
        ).numpy()
        ranks = members_of(self._ranks)
        if not steps:
            if runtime.rank() == self._first:
                _logger.warning(
                    "GradientNoiseScale has measured no step of epoch %d: the gradients"
                    " were not finite, or the train_step of the model does not call "
                    "its optimizer.",
                    epoch + 1,
                )
            return
        batch = self.global_batch.batch_of(epoch) * self._accumulation_steps()
        scale = noise_scale(
            own / steps, total / steps, own_batch=batch / len(ranks), batch=batch
        )
        if logs is not None:
            logs["noise_scale"] = scale
        if self.verbose and runtime.rank() == self._first:
            print(f"epoch {epoch + 1}: {advice(scale, batch)}", flush=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the measurement."""
        super().on_train_end(logs)
        self._squares = None
        stop_measuring(self.model.optimizer)
        self.model.train_function = None

    def _accumulation_steps(self) -> int:
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return inner.gradient_accumulation_steps or 1

    def _check_supported(self) -> None:
        if renewal.is_elastic(os.environ):
            raise NotImplementedError(
                "GradientNoiseScale cannot be used in an elastic job, whose number of "
                "ranks changes. Start the job without --min-np."
            )
        if any(isinstance(one, UnevenData) for one in self._listed):
            raise NotImplementedError(
                "GradientNoiseScale needs batches of equal size on all ranks, so it "
                "cannot be used with UnevenData. Use tfdist.data.shard(...) without "
                "UnevenData, or remove GradientNoiseScale."
            )
        if len(members_of(self._ranks)) < 2:
            raise ValueError(
                "GradientNoiseScale compares gradients of one rank with those of all, "
                "so it needs at least 2 ranks, got 1. Start the program with tfdistrun "
                "-np 2, or remove the callback."
            )
        options = getattr(self.model.optimizer, "tfdist_options", None)
        if options is None:
            raise ValueError(
                "GradientNoiseScale measures the gradients of a "
                "tfdist.DistributedOptimizer, but the model was compiled with "
                f"{type(self.model.optimizer).__name__}. Wrap the optimizer, or remove "
                "the callback."
            )
        if options.op is not ReduceOp.AVERAGE or options.double_buffering:
            raise ValueError(
                "GradientNoiseScale needs gradients that are averaged in their own "
                "step: use DistributedOptimizer without op and double_buffering, or "
                "remove the callback."
            )
