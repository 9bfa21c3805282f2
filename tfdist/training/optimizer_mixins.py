"""Mixins that make the class of a Keras optimizer reduce gradients.

In Keras 3 all gradients pass through `apply` before unscaling, clipping and weight
decay, so these three use the gradients of the whole global batch. With
`gradient_accumulation_steps` each rank accumulates its own gradients. Their sum is
reduced once per update, in `_clip_gradients`, the first place where Keras has the sum.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.local_variables import check_clips_each_alone
from tfdist.collectives.per_rank_variables import note_accumulators
from tfdist.collectives.signature import path_of
from tfdist.collectives.tf_ops import xla_context
from tfdist.core.keras_subclass import subclass_under_own_name
from tfdist.core.weights_state import check_not_torn
from tfdist.gradients import accumulation, nan_policy, reduction
from tfdist.gradients.noise_scale import note_step
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.provenance import check_reduced_once
from tfdist.gradients.sample_weights import weighted
from tfdist.gradients.update_order import hold_updates
from tfdist.training import jit_compile

# Attributes of an optimizer while the `apply_gradients` of its own class is running.
_REDUCED = "_tfdist_reduced"  # True if `apply` gets reduced gradients
_WEIGHT = "_tfdist_weight"  # the weight that `apply` uses in its reduction
# Attribute during an update with nan_policy="skip_step": whether to make it.
_IS_FINITE = "_tfdist_is_finite"


class ReducesUpdates:
    """Mixin that reduces an optimizer's accumulated gradients once per update."""

    # Class attributes, so that a copy from from_config() reduces in the same way.
    tfdist_options: ReduceOptions
    tfdist_nan_policy: str | None

    # Defined by the optimizer's own class.
    name: str
    gradient_accumulation_steps: int | None
    _iterations: Any
    _trainable_variables: list[Any]
    _get_variable_index: Callable[[Any], int]

    @tf.autograph.experimental.do_not_convert
    def build(self, variables: Any) -> None:
        """Creates the optimizer's variables."""
        super().build(variables)  # type: ignore[misc]
        note_accumulators_of(self)

    def reduce_for_update(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """Reduces the gradients of one update; all reductions go through this method.

        Args:
            grads: this rank's gradients, one for each variable.
            variables: the variables to update.
            weight: this rank's number of samples, or None.
        """
        options = self.tfdist_options
        reduced = reduction.reduce_gradients(grads, variables, options, weight=weight)
        note_step(
            self, grads, reduced, options.local_places(variables), weight is not None
        )
        return reduced

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # Stored because `_clip_gradients` does not get the variables. This bypasses
        # Keras's __setattr__, which would track them as the optimizer's own.
        vars(self)["_tfdist_updated"] = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        if self.gradient_accumulation_steps:
            grads, total = accumulation.means(self, grads)
            variables = vars(self)["_tfdist_updated"]
            grads = self._reduce_sums(grads, variables, total)
            self._check_update(grads, variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _reduce_sums(self, grads: Any, variables: list[Any], total: Any) -> list[Any]:
        """Reduces accumulated gradients of the variables that have gradients.

        Local variables may have gradients on only some ranks. As the lists of all ranks
        have to be equal, the list then contains all variables of the optimizer.
        """
        if not self.tfdist_options.local_variables:
            return self.reduce_for_update(grads, variables, total)
        places = [self._get_variable_index(v) for v in variables]
        listed: list[Any] = [None for _ in self._trainable_variables]
        for place, grad in zip(places, grads, strict=True):
            listed[place] = grad
        reduced = self.reduce_for_update(listed, self._trainable_variables, total)
        return [reduced[place] for place in places]

    def _check_update(self, grads: list[Any], variables: list[Any]) -> None:
        """Applies `nan_policy` to a reduced sum of accumulated gradients.

        The gradients of all micro-batches are finite, but their sum or its compressed
        form may not be. Keras has no way to skip the rest of an update, so "skip_step"
        only stores the result of the check.
        """
        if self.tfdist_nan_policy is None:
            return
        options = self.tfdist_options
        is_finite = nan_policy.all_finite(grads)
        if options.local_variables:  # other gradients are equal on all ranks
            is_finite = nan_policy.true_on_all_ranks(
                is_finite, options.process_set, options.name
            )
        if self.tfdist_nan_policy == "raise":
            pairs = [(g, path_of(v)) for g, v in zip(grads, variables, strict=True)]
            hold_updates([nan_policy.assert_finite(is_finite, pairs, self.name)])
        else:
            vars(self)[_IS_FINITE] = is_finite

    def _unless_skipped(
        self, update: Callable[[list[Any]], Any], grads: list[Any]
    ) -> None:
        """Calls `update(grads)`; if it may be skipped, in a branch of a `tf.cond`."""
        is_finite = vars(self).get(_IS_FINITE)
        if is_finite is None:
            update(grads)
            return

        def take() -> tf.Tensor:
            update(identities(grads))
            return tf.constant(True)

        tf.cond(is_finite, take, lambda: tf.constant(False))

    def _apply_weight_decay(self, variables: Any) -> None:
        method = super()._apply_weight_decay  # type: ignore[misc]
        self._unless_skipped(lambda _: method(variables), [])

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        method = super()._backend_update_step  # type: ignore[misc]
        self._unless_skipped(
            lambda own: method(own, trainable_variables, learning_rate), grads
        )

    def _backend_increment_gradient_accumulators(
        self, grads: Any, acc_grads: Any
    ) -> None:
        accumulation.count(self)
        super()._backend_increment_gradient_accumulators(grads, acc_grads)  # type: ignore[misc]

    def _backend_reset_gradient_accumulators(self) -> None:
        is_finite = vars(self).pop(_IS_FINITE, None)
        if is_finite is not None:
            # Keras counts the micro-batch next. A skipped update is not counted.
            steps = tf.where(is_finite, 0, self.gradient_accumulation_steps)
            self._iterations.assign_sub(tf.cast(steps, self._iterations.dtype))
        accumulation.reset(self)
        super()._backend_reset_gradient_accumulators()  # type: ignore[misc]

    def load_own_variables(self, store: Any) -> None:
        """Loads the state; resets the sum of sample weights, which is not saved."""
        super().load_own_variables(store)  # type: ignore[misc]
        accumulation.loaded(self)


class Reducing(ReducesUpdates):
    """Mixin for the user's optimizer that reduces gradients before applying them."""

    # Defined by the optimizer's own class.
    built: bool

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Any,
        trainable_variables: Any = None,
        *,
        weight: Any = None,
        **own: Any,
    ) -> Any:
        """Reduces `grads` over all ranks, then updates the variables.

        Args:
            grads: one gradient for each variable.
            trainable_variables: the variables; default: the variables with which the
                optimizer was built.
            weight: this rank's number of samples, for batches of unequal sizes; see
                `DistributedGradientTape.gradient`. Default: all ranks have equal
                weight. With `gradient_accumulation_steps`, `weight` is the number of
                samples in this micro-batch, and has to be given for all micro-batches
                or for none. The update then uses the mean over the samples of all
                micro-batches on all ranks.
            **own: additional arguments for `apply` of the optimizer's class.
        """
        grads = list(grads)
        update = functools.partial(super().apply, **own)  # type: ignore[misc]
        if vars(self).get(_REDUCED):
            return update(grads, trainable_variables)
        weight = vars(self).get(_WEIGHT, weight)
        options = {"weight": weight, **own}
        if jit_compile.record_if_tracing(self, grads, trainable_variables, options):
            return None
        if not grads:
            return update(grads, trainable_variables)
        variables = self._variables_of(grads, trainable_variables)
        grads = self._reduced(grads, variables, weight)
        return self._update_if_finite(update, grads, variables)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self, grads_and_vars: Any, *, weight: Any = None, **own: Any
    ) -> Any:
        """Runs `apply` for pairs of gradient and variable; returns the step count.

        If the optimizer's class overrides `apply_gradients`, its method gets the
        reduced gradients. With `gradient_accumulation_steps`, the sum is reduced later,
        and its method gets the gradients of this rank's batch.
        """
        pairs = list(grads_and_vars)
        grads, variables = map(list, zip(*pairs, strict=True))
        method = super().apply_gradients  # type: ignore[misc]
        keras_apply_gradients = keras.optimizers.Optimizer.apply_gradients
        if getattr(method, "__func__", None) is keras_apply_gradients:
            self.apply(grads, variables, weight=weight, **own)
        elif _accumulation_steps(self):
            with _noted(self, _WEIGHT, weight):
                method(pairs, **own)
        elif not jit_compile.record_if_tracing(
            self, grads, variables, {"weight": weight, **own}, entry="apply_gradients"
        ):
            grads = self._reduced(grads, variables, weight)
            with _noted(self, _REDUCED, True):
                self._update_if_finite(
                    lambda g, v: method(list(zip(g, v, strict=True)), **own),
                    grads,
                    variables,
                )
        return self._iterations

    def _reduced(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        """Returns the gradients to pass to the method of the optimizer's class."""
        if self.tfdist_nan_policy == "raise":  # XLA drops assertions
            xla_context.check_not_xla("nan_policy='raise'")
        check_reduced_once(grads, self.tfdist_options, self.name)
        if self.tfdist_options.local_variables:
            self._build_outside_of_branches(variables)  # creates inner optimizers
            check_clips_each_alone(self)
        if _accumulation_steps(self):
            grads = self._to_accumulate(grads, variables, weight)
        else:
            if weight is not None:
                self._check_nothing_accumulates_means(variables)
            grads = self.reduce_for_update(grads, variables, weight)
        return grads

    def check_finite(self, grads: Any) -> Any:
        """Overrides `LossScaleOptimizer`: all ranks take or skip a step together."""
        found = super().check_finite(grads)  # type: ignore[misc]
        return self._on_all_ranks(found)

    def _update_if_finite(
        self, update: Callable[..., Any], grads: list[Any], variables: list[Any]
    ) -> Any:
        present = [g for g in grads if g is not None]
        if self.tfdist_nan_policy == "skip_step":
            self._build_outside_of_branches(variables)
            is_finite = self._on_all_ranks(nan_policy.all_finite(present))

            def take() -> tf.Tensor:
                # Make all gradients tensors of this branch: Keras does not mix tensors
                # of two graphs, and a custom method may have replaced some of them.
                update(identities(grads), variables)
                return tf.constant(True)

            return tf.cond(is_finite, take, lambda: tf.constant(False))
        waits_for: list[Any] = []
        if self.tfdist_nan_policy == "raise":
            waits_for = [self._check_all_finite(grads, variables)]
        with tf.control_dependencies(waits_for):
            return update(grads, variables)

    def _check_all_finite(self, grads: list[Any], variables: list[Any]) -> Any:
        pairs = [
            (g, path_of(v))
            for g, v in zip(grads, variables, strict=True)
            if g is not None
        ]
        is_finite = self._on_all_ranks(nan_policy.all_finite([g for g, _ in pairs]))
        return nan_policy.assert_finite(is_finite, pairs, self.name)

    def _on_all_ranks(self, found: Any) -> Any:
        """Agrees on `found` across ranks, unless all gradients are reduced already."""
        if not (_accumulation_steps(self) or self.tfdist_options.local_variables):
            return found
        options = self.tfdist_options
        return nan_policy.true_on_all_ranks(found, options.process_set, options.name)

    def _to_accumulate(
        self, grads: list[Any], variables: list[Any], weight: Any
    ) -> list[Any]:
        self._reduce_in_the_inner_one()
        if weight is not None:
            reduction.check_weights(variables, self.tfdist_options)
            self._build_outside_of_branches(variables)
        own = accumulation.begin(getattr(self, "inner_optimizer", self), weight)
        grads = reduction.fill_missing(
            grads, variables, self.tfdist_options, is_weighted=own is not None
        )
        return grads if own is None else [weighted(g, own) for g in grads]

    def _check_nothing_accumulates_means(self, variables: list[Any]) -> None:
        multi = getattr(self, "inner_optimizer", self)
        if not hasattr(multi, "_inner_optimizers"):
            return
        self._build_outside_of_branches(variables)  # creates inner optimizers
        for one in multi._inner_optimizers:
            if one.gradient_accumulation_steps:
                raise ValueError(
                    "weight was given to a MultiOptimizer whose optimizer "
                    f"{one.name!r} has gradient_accumulation_steps, so it would add "
                    "up means of steps with different weights. Omit weight or "
                    "gradient_accumulation_steps."
                )

    def _reduce_in_the_inner_one(self) -> None:
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None and not isinstance(inner, ReducesUpdates):
            own_class: Any = type(inner)
            inner.__class__ = reducing_class(
                own_class, ReducesUpdates, self.tfdist_options, "skip_step"
            )

    def _build_outside_of_branches(self, variables: list[Any]) -> None:
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)  # type: ignore[attr-defined]

    def _variables_of(self, grads: list[Any], variables: Any) -> list[Any]:
        if variables is not None:
            return list(variables)
        if not self.built:
            raise ValueError(
                "apply() was called with gradients but without variables on an "
                "optimizer that is not built. Pass the variables, or call "
                "optimizer.build(model.trainable_variables) first."
            )
        # In Keras 3.11, those of a LossScaleOptimizer are only in its inner optimizer.
        return list(getattr(self, "inner_optimizer", self)._trainable_variables)

    def save_own_variables(self, store: Any) -> None:
        """Saves the state; raises if weights may be torn, i.e. only partly updated."""
        check_not_torn()
        super().save_own_variables(store)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Returns the plain optimizer's configuration; raises if weights are torn."""
        check_not_torn()  # the HDF5 format saves only this and `variables`
        return super().get_config()  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Keras copies by saving and loading, which returns the plain class.
        rebuild: Any
        rebuild, arguments = tuple(self.__reduce__())[:2]
        copied = rebuild(*arguments)
        _reduce_likewise(copied, self)
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None:
            _reduce_likewise(copied.inner_optimizer, inner)
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer(inner) sets inner.loss_scale_factor to None. If it wraps
        # a reducing optimizer, a rank with a non-finite gradient skips the reduction
        # for which the others wait. (The constructor sets `built` after the factor.)
        if name == "loss_scale_factor" and value is None and "built" in vars(self):
            raise ValueError(
                "loss_scale_factor of a tfdist optimizer was set to None, as a "
                "MultiOptimizer or a LossScaleOptimizer around it does. (model.compile "
                "adds a LossScaleOptimizer under the policy mixed_float16.) The "
                "reduction has to be outermost. Use "
                "tfdist.DistributedOptimizer(keras.optimizers.MultiOptimizer(...)) or "
                "tfdist.DistributedOptimizer("
                "keras.optimizers.LossScaleOptimizer(optimizer)), or set the policy "
                "with keras.config.set_dtype_policy('mixed_float16') before wrapping. "
                "(To remove your own factor, set it to 1.0.)"
            )
        super().__setattr__(name, value)


def reducing_class(
    cls: Any, mixin: Any, options: ReduceOptions, nan_policy: str | None
) -> Any:
    """Returns the reducing subclass of an optimizer class, with the same name."""
    if options.local_variables is None and options.manual_buckets is None:
        return _cached_class(cls, mixin, options, nan_policy)
    # The options refer to the user's layers, which a cache would keep alive.
    return _reducing_class(cls, mixin, options, nan_policy)


def _reducing_class(
    cls: Any, mixin: Any, options: ReduceOptions, nan_policy: str | None
) -> Any:
    attributes = {"tfdist_options": options, "tfdist_nan_policy": nan_policy}
    return subclass_under_own_name(cls, mixin, keras.optimizers, attributes)


_cached_class = functools.cache(_reducing_class)


def _reduce_likewise(copied: Any, original: Any) -> None:
    """Gives a copy the class of the original, and the options set on the original."""
    copied.__class__ = type(original)
    if "tfdist_options" in vars(original):
        vars(copied)["tfdist_options"] = vars(original)["tfdist_options"]


def note_accumulators_of(optimizer: Any) -> None:
    """Records the accumulators of a reducing optimizer, if it is built.

    This is done before the first step, which some ranks may take later than others.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    note_accumulators(getattr(inner, "_accumulated_gradients", ()))


def _accumulation_steps(optimizer: Any) -> int | None:
    """Returns `gradient_accumulation_steps` of the optimizer that does the updates."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps: int | None = inner.gradient_accumulation_steps
    return steps


def identities(grads: list[Any]) -> list[Any]:
    """Returns the gradients as tensors of the current branch of a `tf.cond`."""
    return [
        None
        if grad is None
        else tf.nest.map_structure(tf.identity, grad, expand_composites=True)
        for grad in grads
    ]


@contextlib.contextmanager
def _noted(optimizer: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of the optimizer temporarily."""
    vars(optimizer)[name] = value  # bypasses Keras's __setattr__
    try:
        yield
    finally:
        del vars(optimizer)[name]
