"""Refuses steps of optimizers whose gradients do not come out of a reduction.

Of a script written for Horovod nothing is known but that its ranks shall train one
model. What would let each train its own, a forgotten wrapper or one that comes too
late, shows where an optimizer takes its step.

While a step is traced its gradients are followed back through the graph (`_found`).
Where that ends without an answer (they are arguments of the function, or were kept in
variables), and eagerly, where there is no graph, the engine's count decides: as many
elements of gradients must have been reduced as the step is given, and no other step may
have used them. What was reduced before the last step of these variables is too old,
unless the two had been reduced together: then less than one's was reduced in between.

The first step of an optimizer may be there to make its variables, which are broadcast
after it. It is taken, with a warning.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.tf_ops import emit
from tfdist.collectives.tf_ops.op_library import ops
from tfdist.core import native, runtime
from tfdist.core.rendezvous.environment import detect
from tfdist.gradients.provenance import (
    consume_tape_gradients,
    elements_at_run,
    elements_of,
    values_of,
    warn_once,
    whole_elements_of,
)
from tfdist.horovod._found import Found, find, note_local
from tfdist.horovod._keras.optimizer import OwnSteps
from tfdist.training.optimizer_mixins import ReducesUpdates, Reducing

_MARK = "_tfdist_guarded"
# Whether the optimizer at hand is part of one that has been looked at, or reduces.
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfdist_guarded_step", default=False
)


def guard() -> None:
    """From now on checks every step of Keras's optimizers, and of TensorFlow 1's."""
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
    """Returns a wrapper of `original` inside which optimizer steps are not checked."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        token = _inside.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _inside.reset(token)

    return apply


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper that notes the results of `original` as local gradients."""

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
            # A zip() can be looked at once.
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
    """Raises if a step of an optimizer that is not wrapped uses this rank's gradients.

    Args:
        optimizer: that takes the step.
        grads: its gradients; None and `tf.IndexedSlices` among them.
        variables: of the gradients; None: all of the optimizer's.

    Returns:
        What has to run before the step: nothing, or an operation that raises
        `tf.errors.FailedPreconditionError` where the graph does not tell.

    Raises:
        RuntimeError: none of them comes out of a reduction, in a job of several ranks.
    """
    given = [g for g in grads if g is not None]
    if not given:
        return []
    if not runtime.is_initialized():
        if detect(os.environ).size > 1:
            raise RuntimeError(_text(optimizer, detect(os.environ).size, early=True))
        return []
    if runtime.size() == 1:
        return []
    text = _text(optimizer, runtime.size())
    values = [values_of(g) for g in given]
    if not any(map(tf.is_symbolic_tensor, values)):
        if tf.executing_eagerly():
            if not _enough(optimizer, grads, variables):
                if not _is_first_step(optimizer):
                    raise RuntimeError(text)
                warn_once(text)
            return []
        found = Found.UNKNOWN  # captured: of a step that is traced
    else:
        found = find(given)
    in_xla = emit.inside_xla()
    if found is Found.LOCAL and (in_xla or not _may_be_first_step(optimizer)):
        raise RuntimeError(text)
    if found in (Found.REDUCED, Found.MIXED) and in_xla:
        return []
    emit.check_not_xla(
        "whether the gradients of a step were reduced cannot be found out inside"
    )
    required = found is not Found.REDUCED
    none = tf.zeros([0], tf.int64)
    after = [*filter(tf.is_symbolic_tensor, values), *(_effects() if required else [])]
    with tf.control_dependencies(after):
        use = ops().tfdist_check_reduced(
            none if found is Found.LOCAL else elements_at_run(given),
            _is_first_step(optimizer),
            required=required,
            message=text,
        )
    return [use]


def _effects() -> list[Any]:
    """Returns the stateful operations traced before the step, including collectives.

    They would be cancelled if they ran when the step is refused: then another rank
    ends with an error about this one, and does not learn of its own mistake.
    """
    graph = tf.compat.v1.get_default_graph()
    return [o for o in graph.get_operations() if o.op_def.is_stateful]


def _is_first_step(optimizer: Any) -> Any:
    """Whether it has taken none: a boolean, while a step is traced a tensor."""
    # Not `iterations`, which counts updates where several steps make one.
    steps = getattr(optimizer, "_iterations", None)
    return tf.constant(False) if steps is None else tf.equal(steps.value, 0)


def _may_be_first_step(optimizer: Any) -> bool:
    """Whether a step that is traced may be the first when it runs."""
    with tf.init_scope():
        is_first = _is_first_step(optimizer)
        return bool(is_first) if tf.executing_eagerly() else False


def _text(optimizer: Any, size: int, *, early: bool = False) -> str:
    name = type(optimizer).__name__
    if early:
        return (
            f"{name} takes a step before hvd.init(): each of the {size} ranks would "
            "train on its own. Call hvd.init() first."
        )
    return (
        f"{name} takes a step with gradients that were not reduced over the {size} "
        "ranks: each would train on its own. Write hvd.DistributedOptimizer("
        f"keras.optimizers.{name}(...)) before model.compile(...), or take the "
        "gradients from hvd.DistributedGradientTape(tape).gradient(...), wrapped "
        "before they are computed, or reduce each of them by hvd.allreduce(gradient). "
        "Each step needs gradients of its own, as many as it has variables. An "
        "optimizer of variables that shall differ between the ranks: "
        "tfdist.DistributedOptimizer(optimizer, local_variables=lambda variable: True, "
        "scale_local_gradients=False). Only the first step of an optimizer may be "
        "without, to make the optimizer's variables, which are broadcast after it; "
        "optimizer.build(variables) makes them without a step."
    )


# ---- eagerly ----

# Sums of the engine's count: at the last step but one, and at the last one, of those
# before which new gradients were reduced.
_Sums = tuple[int, int]
# Of each optimizer: id of a variable (which it holds) → that.
_counts: weakref.WeakKeyDictionary[Any, dict[int, _Sums]] = weakref.WeakKeyDictionary()


def _enough(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None
) -> bool:
    if variables is None:
        variables = getattr(optimizer, "_trainable_variables", ())
    listed = list(variables)
    pairs = zip(grads, listed, strict=False)  # the optimizer says what is wrong
    stepped = [id(v) for g, v in pairs if g is not None]
    counts = _counts.setdefault(optimizer, {})
    now = native.count_reduced(0)
    of_tape = consume_tape_gradients(grads)
    for elements in (whole_elements_of(grads), elements_of(grads)):
        # As in TfdistCheckReduced, for each variable.
        sums = {v: counts.get(v, (0, 0)) for v in stepped}
        for v, (_, last) in sums.items():
            if now - last >= elements or of_tape is False:
                sums[v] = last, now
        since = 0 if of_tape else max((early for early, _ in sums.values()), default=0)
        if native.use_reduced(elements, since):
            counts.update(sums)
            return True
    return bool(of_tape)
