"""Compiles a training step with XLA (`jit_compile=True`), as a whole or in part.

XLA cannot run the operations of tfdist, and cannot compile only a part of a function.
With `libtfdist_xla.so` (`tfdist.gradients.xla`), XLA can run one of them, the reduction
of gradients, which is enough to compile most steps as a whole. Other steps are split
where the optimizer gets its gradients:

    compiled by XLA      forward, loss, metrics, backward; states of layers
    not compiled         reduction over the ranks, update of the weights

The step of Keras or the user is traced unchanged. During the trace, `apply` of a
reducing optimizer only records its gradients; they become outputs of the compiled
function, and `apply` runs after it. The results are the same unless the rest of the
step uses the variables that `apply` updates, which is detected in the traced graph.
Such a step (a GAN's, for example) is not compiled, and a warning is logged.

A step may therefore be traced several times, and traces may be discarded. Variables
that a discarded trace created, e.g. for metrics, are kept and initialized.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.tf_ops import xla_context
from tfdist.core import runtime
from tfdist.gradients import xla
from tfdist.training.train_steps import followed_by, parts_of, replaced_step

_logger = logging.getLogger("tfdist")
_MARK = "_tfdist_split"  # attribute of a train function that splits its steps
_OWN = "_tfdist_makes"  # attribute of the make_train_function of this module


class _CannotSplitError(Exception):
    """Raised if a step cannot be split; the message is the reason."""

    ag_pass_through = True  # otherwise AutoGraph would replace the class


@dataclasses.dataclass
class _Call:
    """A call of `apply` that is deferred until the compiled function returns."""

    optimizer: Any
    grads: list[Any]
    variables: list[Any] | None
    options: dict[str, Any]
    entry: str
    operations_before: int

    def of_the_trace(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns the gradients and options that the compiled function returns."""
        computed = {k: v for k, v in self.options.items() if tf.is_tensor(v)}
        return self.grads, computed

    def run(self, grads: list[Any], computed: dict[str, Any]) -> None:
        """Calls the optimizer with the outputs of the compiled function."""
        options = {**self.options, **computed}
        if self.entry == "apply_gradients" and self.variables is not None:
            pairs = zip(grads, self.variables, strict=True)
            self.optimizer.apply_gradients(pairs, **options)
        else:
            self.optimizer.apply(grads, self.variables, **options)


class _Recorder:
    """Records the calls of `apply` in one trace."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._graph: Any = None

    def begin(self) -> None:
        """Discards recorded calls, because TensorFlow may trace a function twice."""
        self.calls = []
        self._graph = tf.compat.v1.get_default_graph()

    def add(
        self,
        optimizer: Any,
        grads: list[Any],
        variables: Any,
        options: dict[str, Any],
        entry: str,
    ) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise _CannotSplitError(
                "it calls the optimizer inside a tf.cond, tf.while_loop or a nested "
                "tf.function"
            )
        listed = None if variables is None else list(variables)
        position = len(self._graph.get_operations())
        call = _Call(optimizer, grads, listed, options, entry, position)
        self.calls.append(call)

    def check_unused(self) -> None:
        """Raises if the step uses variables of a recorded `apply` after the call.

        These are the variables that `apply` updates, and the learning rate, which the
        step may read but not change. A use is an operation that was traced after the
        call and has the handle of a variable as an input. This includes calls of nested
        functions and loops.
        """
        handles = {id(own): inside.name for own, inside in self._graph.captures}
        operations = self._graph.get_operations()
        for call in self.calls:
            state, rate = _variables_of(call)
            names = {handles.get(id(v.handle)): v for v in [*state, *rate]}
            constant = {handles.get(id(v.handle)) for v in rate}
            for operation in operations[call.operations_before :]:
                for value in operation.inputs:
                    reads = operation.type == "ReadVariableOp"
                    if value.name in names and not (reads and value.name in constant):
                        path = getattr(names[value.name], "path", value.name)
                        raise _CannotSplitError(
                            f"it uses {path} after its call of the optimizer (call "
                            "the optimizer at the end of the step if possible)"
                        )


class _InitialValues:
    """Variables that are created in a trace, and their initial values.

    A `tf.function` initializes its variables when the trace is complete. If the trace
    is discarded and the step is traced again, existing variables are not recreated, so
    they would stay uninitialized.
    """

    def __init__(self) -> None:
        self._created: list[tuple[tf.Variable, Any]] = []

    def noting(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a step that also records the variables that it creates."""

        @functools.wraps(step)
        def noted(data: Any) -> Any:
            with tf.variable_creator_scope(self._create):
                return step(data)

        return noted

    def _create(self, create: Callable[..., tf.Variable], **options: Any) -> Any:
        variable = create(**options)
        self._created.append((variable, options.get("initial_value")))
        return variable

    def assign(self) -> None:
        """Initializes variables of a discarded trace that have no value yet."""
        with tf.init_scope():
            for variable, value in self._created:
                if variable.is_initialized():
                    continue
                value = value() if callable(value) else value
                if tf.is_symbolic_tensor(value):  # from the trace; may be a constant
                    value = tf.get_static_value(value)
                if value is not None:
                    variable.assign(value)
        self._created.clear()


_ACTIVE: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar(
    "tfdist_recorder", default=None
)


def record_if_tracing(
    optimizer: Any,
    grads: list[Any],
    variables: Any,
    options: dict[str, Any],
    *,
    entry: str = "apply",
) -> bool:
    """Records a call of `optimizer.apply` to run it after the compiled part of a step.

    Args:
        optimizer: a reducing optimizer whose `apply` is called.
        grads: its gradients.
        variables: its variables; None: those with which it was built.
        options: other arguments by name: numbers, or tensors of the trace.
        entry: the method that is called, "apply" or "apply_gradients".

    Returns:
        Whether the call was recorded, in which case the caller must not apply the
        gradients. False unless the part of a step that XLA compiles is being traced.
    """
    recorder = _ACTIVE.get()
    if recorder is None:
        return False
    given = {k: v for k, v in options.items() if v is not None}
    recorder.add(optimizer, grads, variables, given, entry)
    return True


def split(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a training step that XLA compiles, as a whole or up to the gradients.

    Args:
        step: `model.train_step` or a similar function that accepts a batch, calls
            `apply` of reducing optimizers, and returns logs.

    Returns:
        A step to be traced by a `tf.function` without `jit_compile`. In eager mode it
        just calls `step`.
    """
    step, after = parts_of(step)
    if after is not None:  # `after` may use other operations of tfdist
        return followed_by(split(step), after)
    told = False

    @functools.wraps(step)
    def split_step(data: Any) -> Any:
        nonlocal told
        if tf.executing_eagerly():
            return step(data)
        first_values = _InitialValues()
        noted_step = first_values.noting(step)
        why_split = xla.unusable()
        if why_split is None:
            try:
                logs = tf.function(noted_step, jit_compile=True, autograph=False)(data)
            except xla_context.InsideXlaError as reason:
                why_split = reason.why
                first_values.assign()
            else:
                if not told:
                    told = True
                    _tell_inside()
                return logs
        recorder = _Recorder()

        def gradients_and_logs(data: Any) -> Any:
            recorder.begin()
            token = _ACTIVE.set(recorder)
            try:
                logs = noted_step(data)
            finally:
                _ACTIVE.reset(token)
            # Variables in logs: TensorFlow would read them only after the check.
            logs = tf.nest.map_structure(_value_of_variable, logs)
            recorder.check_unused()
            return [call.of_the_trace() for call in recorder.calls], logs

        compiled = tf.function(gradients_and_logs, jit_compile=True, autograph=False)
        try:
            results, logs = compiled(data)
        except (_CannotSplitError, xla_context.InsideXlaError) as reason:
            first_values.assign()
            if not told:
                told = True
                _warn_not_compiled(step, reason)
            return step(data)
        for call, (grads, computed) in zip(recorder.calls, results, strict=True):
            call.run(grads, computed)
        if not told:
            told = True
            _tell_split(why_split)
        return logs

    return split_step


def install(model: Any) -> None:
    """Makes `model.fit` split its steps, if the model has `jit_compile=True`.

    Only the train function changes: `model.jit_compile` keeps its value, and `evaluate`
    and `predict` are compiled as before.

    Args:
        model: a compiled Keras model at the start of `fit`.
    """
    if not _uses_xla(model):
        return
    if not hasattr(model.make_train_function, _OWN):
        make = _maker(model, model.make_train_function)
        # Bypass setattr: Keras would track it as a part of the model.
        object.__setattr__(model, "make_train_function", make)
    if not hasattr(model.train_function, _MARK):  # else split by an earlier `fit`
        model.train_function = None  # a custom make_train_function may ignore `force`
        model.make_train_function()


def remove(model: Any) -> None:
    """Undoes `install`; the compiled step is kept for the next call of `fit`."""
    if hasattr(vars(model).get("make_train_function"), _OWN):
        object.__delattr__(model, "make_train_function")


def _uses_xla(model: Any) -> bool:
    return bool(model.jit_compile and not model.run_eagerly)


def _maker(model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a make_train_function that passes a split step to Keras, without XLA.

    It is installed until `fit` ends, because callbacks may recreate the train function.
    """

    @functools.wraps(original)
    def make_train_function(force: bool = False) -> Any:
        if force:
            model.train_function = None
        if not _uses_xla(model):
            return original()
        if model.train_function is not None:
            return model.train_function
        model.jit_compile = False
        try:
            with replaced_step(model, split(model.train_step)):
                original()
        finally:
            model.jit_compile = True
        setattr(model.train_function, _MARK, True)
        return model.train_function

    setattr(make_train_function, _OWN, True)
    return make_train_function


def _value_of_variable(value: Any) -> Any:
    is_variable = isinstance(value, tf.Variable | keras.Variable)
    return tf.convert_to_tensor(value) if is_variable else value


def _variables_of(call: _Call) -> tuple[list[Any], list[Any]]:
    """Returns the variables that an optimizer updates, and its learning rate."""
    inner = getattr(call.optimizer, "inner_optimizer", call.optimizer)
    rate = getattr(inner, "_learning_rate", None)
    weights = call.variables
    if weights is None:
        weights = [v for v in inner._trainable_variables if v is not None]
    state = {id(v): v for v in [*call.optimizer.variables, *inner.variables, *weights]}
    read = [state.pop(id(rate))] if id(rate) in state else []
    return list(state.values()), read


def _tell_inside() -> None:
    if runtime.rank() == 0:
        _logger.info(
            "jit_compile=True: XLA compiles each training step as a whole, with the "
            "reduction of the gradients (libtfdist_xla.so) and the optimizer's update."
        )


def _tell_split(why: str | None) -> None:
    if runtime.rank() == 0:
        _logger.info(
            "jit_compile=True: XLA compiles the forward and backward pass of each "
            "training step (with loss, metrics and states of layers). The reduction of "
            "the gradients and the optimizer's update run outside XLA%s.",
            "" if why in (None, xla.NOT_BUILT) else f", because {why}",
        )


def _warn_not_compiled(step: Any, reason: Exception) -> None:
    if runtime.rank() == 0:
        name = getattr(step, "__qualname__", "the training step")
        why = (
            "it uses operations of tfdist (for example a DistributedGradientTape, or "
            "UnevenData unless weighted=False)"
            if isinstance(reason, xla_context.InsideXlaError)
            else str(reason)
        )
        _logger.warning(
            "jit_compile=True has no effect on training: %s is not compiled by XLA, "
            "because %s. It runs without XLA, with the same results.",
            name,
            why,
        )
