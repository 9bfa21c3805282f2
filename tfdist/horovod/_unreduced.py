"""Refuses optimizer steps whose gradients were not reduced.

A script written for Horovod trains one model on all ranks. If it wraps the optimizer or
tape too late, or not at all, each rank would train its own model. The gradients of each
optimizer step are traced to their origin (`_gradient_origin`):

- The gradients come from a reduction: the step is taken.
- The gradients were computed on this rank and not reduced: the step is refused. The
  first step of an optimizer is taken with a warning, because its only purpose may be
  to create the optimizer's variables, which are broadcast afterwards.
- The origin is unknown: the gradients are arguments of a traced function, were stored
  in variables, or, in an eager loop, were modified or come from a `tf.function`. The
  ranks then compare their weights in some of the steps (`consistency.in_step`), and
  the step is refused if the weights have drifted apart. The same is done if reduced and
  unreduced gradients are combined so that no gradient comes from reductions alone.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.consistency.in_step import compare_in_step, may_have_other_ranks
from tfdist.collectives.signature import path_of
from tfdist.collectives.tf_ops import xla_context
from tfdist.collectives.tf_ops.op_library import native_ops
from tfdist.core import runtime
from tfdist.core.rendezvous.environment import detect
from tfdist.gradients.provenance import values_of, warn_once
from tfdist.horovod._gradient_origin import Found, find, may_differ, note_local
from tfdist.horovod._keras.optimizer import OwnSteps
from tfdist.training.optimizer_mixins import ReducesUpdates, Reducing

_MARK = "_tfdist_guarded"
# True inside a step that has been checked, or that reduces its gradients itself.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfdist_guarded_step", default=False
)


def guard() -> None:
    """Checks every step of Keras and TensorFlow 1 optimizers from now on."""
    _check_steps(
        *(keras.optimizers.Optimizer, "apply"),
        lambda given: (given["grads"], given.get("trainable_variables")),
    )
    _check_steps(
        *(tf.compat.v1.train.Optimizer, "apply_gradients"),
        lambda given: tuple(zip(*given["grads_and_vars"], strict=True)),
    )
    _replace(Reducing, "apply", _unchecked)
    _replace(OwnSteps, "apply", _unchecked)
    _replace(tf.GradientTape, "gradient", _noted)
    _replace(tf.compat.v1.train.Optimizer, "compute_gradients", _noted)


def _replace(owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    changed = tf.autograph.experimental.do_not_convert(
        functools.wraps(original)(replacement(original))
    )
    setattr(changed, _MARK, True)
    setattr(owner, name, changed)


def _unchecked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of `original`; optimizer steps inside it are not checked."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        token = _inside.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _inside.reset(token)

    return apply


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper that records the results of `original` as local gradients."""

    def gradient(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        note_local(tf.nest.flatten(found))
        return found

    return gradient


def _check_steps(
    owner: Any, name: str, grads_and_variables: Callable[[dict[str, Any]], Any]
) -> None:
    first = [*inspect.signature(getattr(owner, name)).parameters][1]

    def checking(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        unchecked = _unchecked(original)

        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _inside.get() or isinstance(self, ReducesUpdates):
                return original(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs)
            # A zip() can be read only once.
            given.arguments[first] = list(given.arguments[first])
            if not given.arguments[first]:
                return original(*given.args, **given.kwargs)
            grads, variables = grads_and_variables(given.arguments)
            with tf.control_dependencies(check_reduced(self, grads, variables)):
                return unchecked(*given.args, **given.kwargs)

        return checked

    _replace(owner, name, checking)


def check_reduced(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None = None
) -> list[Any]:
    """Raises if an unwrapped optimizer takes a step with local gradients.

    Args:
        optimizer: the optimizer that takes the step.
        grads: its gradients; may contain None and `tf.IndexedSlices`.
        variables: one variable for each gradient; None: the trainable variables with
            which the optimizer was built.

    Returns:
        Tensors and operations to compute before the step. One of them may raise
        `tf.errors.FailedPreconditionError` when the traced step runs.

    Raises:
        RuntimeError: there is more than one rank, and either `hvd.init()` was not
            called, or the gradients were not reduced. (In eager mode, and in a
            `tf.function` outside XLA, the first step of a Keras optimizer only causes
            a warning.)
        tfdist.MismatchError: in eager mode, the ranks' weights have drifted apart.
        NotImplementedError: XLA compiles the step, and the gradients' origin is
            unknown.
    """
    if variables is None:
        variables = getattr(optimizer, "_trainable_variables", ())
    pairs = [
        (g, v)
        # If one list is longer, the optimizer raises the error.
        for g, v in zip(grads, variables, strict=False)
        if g is not None and not may_differ(v)
    ]
    if not pairs:
        return []
    if not runtime.is_initialized():
        if detect(os.environ).size > 1:
            raise RuntimeError(_text(optimizer, detect(os.environ).size, early=True))
        return []
    if not may_have_other_ranks():
        return []
    given = [g for g, _ in pairs]
    text = _text(optimizer, runtime.size())
    found = find(given)
    if found is Found.REDUCED or (found is Found.MIXED and xla_context.inside_xla()):
        return []
    if found is Found.LOCAL:
        return _refuse(optimizer, given, text)
    xla_context.check_not_xla(
        "whether the gradients of a step were reduced cannot be determined inside"
    )
    shared = [v for _, v in pairs]
    compared = compare_in_step(
        shared, given, _list_id(optimizer, shared), None, advice=text
    )
    return [t for t in compared if tf.is_symbolic_tensor(values_of(t))]


def _refuse(optimizer: Any, grads: Sequence[Any], text: str) -> list[Any]:
    """Raises, now or when the step runs, unless this is the optimizer's first step."""
    if xla_context.inside_xla() or not _may_be_first_step(optimizer):
        raise RuntimeError(text)
    warn_once(text)
    if tf.executing_eagerly():
        return []
    tensors = [t for t in map(values_of, grads) if tf.is_symbolic_tensor(t)]
    with tf.control_dependencies([*tensors, *_effects()]):
        message = tf.where(_is_first_step(optimizer), "", text)
        return [native_ops().tfdist_fail(message=message)]


def _list_id(optimizer: Any, variables: Sequence[Any]) -> str:
    """Returns an ID for steps with these variables; it is equal on all ranks."""
    paths = [getattr(optimizer, "name", ""), *map(path_of, variables)]
    return hashlib.sha256("\n".join(map(str, paths)).encode()).hexdigest()


def _effects() -> list[Any]:
    """Returns the stateful operations traced before the step, including collectives.

    The error must be raised after them. Otherwise it would cancel a collective that the
    other ranks have started; they would report a failure of this rank instead of their
    own unreduced gradients.
    """
    graph = tf.compat.v1.get_default_graph()
    return [o for o in graph.get_operations() if o.op_def.is_stateful]


def _is_first_step(optimizer: Any) -> Any:
    """Returns a tensor: whether the optimizer has not taken a step yet."""
    # `iterations` would be wrong: with gradient accumulation it counts updates.
    steps = getattr(optimizer, "_iterations", None)
    return tf.constant(False) if steps is None else tf.equal(steps.value, 0)


def _may_be_first_step(optimizer: Any) -> bool:
    """Returns whether a traced step may be the first step when it runs."""
    with tf.init_scope():
        is_first = _is_first_step(optimizer)
        return bool(is_first) if tf.executing_eagerly() else False


def _text(optimizer: Any, size: int, *, early: bool = False) -> str:
    name = type(optimizer).__name__
    if early:
        return (
            f"{name} takes a step before hvd.init(): each of the {size} ranks would "
            "train independently. Call hvd.init() first."
        )
    return (
        f"{name} takes a step with gradients that were not reduced over the {size} "
        "ranks: each rank would train independently. Write hvd.DistributedOptimizer("
        f"keras.optimizers.{name}(...)) before model.compile(...), or compute the "
        "gradients with hvd.DistributedGradientTape(tape).gradient(...), or reduce "
        "each gradient with "
        "hvd.allreduce(gradient). For variables that should differ between the ranks: "
        "hvd.PartialDistributedOptimizer(optimizer, local_layers=layers, "
        "scale_local_gradients=False). Only the first step of an optimizer may use "
        "unreduced gradients, to create the optimizer's variables, which are broadcast "
        "afterwards; optimizer.build(variables) creates them without a step."
    )
