"""DistributedGradientTape: a gradient tape that reduces gradients over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NoReturn, Self

import keras
import tensorflow as tf

from tfdist.collectives import ReduceOp
from tfdist.collectives.local_variables import LocalVariables
from tfdist.core.process_sets import ProcessSet
from tfdist.gradients import reduction
from tfdist.gradients.double_buffer import buffer_of
from tfdist.gradients.options import ReduceOptions
from tfdist.gradients.provenance import note_tape
from tfdist.gradients.sample_weights import as_targets_hold, weighted, weighted_outputs


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` is reduced over all ranks.

    For custom training loops: every rank computes the loss of its own batch and gets
    the gradient of the mean loss over all ranks. With batches of equal size this equals
    the gradient that a single process would compute on the concatenated batch.

    Args:
        tape: a `tf.GradientTape` that has recorded, or will record, the loss;
            default: a new one.
        op: `ReduceOp.AVERAGE` (default), `ReduceOp.SUM`, or `ReduceOp.ADASUM`, which
            adds orthogonal gradients and averages equal ones (see `ReduceOp` and
            docs/adasum.md).
        name: name of the gradient list. Tapes that reduce equal lists of variables in
            one graph are distinguished by name, or by order if they have no names.
            Tapes that are used in different threads need different names.
        process_set: the ranks over which gradients are reduced; default: all ranks.
        compression: `"fp16"` or `"bf16"`. Float32 and float64 gradients are rounded to
            that type and summed in float32, and the result is rounded once more. For
            float32 gradients, this halves the bytes that are sent. Between hosts with
            several ranks each, and with ADASUM, it saves only a quarter of the bytes.
            Gradients keep 11 (fp16) or 8 (bf16) significant bits. The largest fp16
            number is 65504; a larger gradient becomes infinite. Default: no
            compression.
        sparse_as_dense: whether gradients of embeddings (`tf.IndexedSlices`) are
            reduced as dense tensors. With `False`, only the rows that a step has used
            are reduced. Default: by rows for embedding tables of 8 MiB or more, except
            in a loop over an elastic `State`. With ADASUM, `double_buffering` or
            `TFDIST_ATOMIC_STEPS=1`, embedding gradients are always reduced as dense
            tensors.
        local_variables: variables and layers that each rank trains on its own: a list,
            or a function that accepts a variable and returns a bool. All ranks have to
            select the same variables. Their gradients are not reduced, and their shapes
            may differ between ranks. With `ReduceOp.AVERAGE`, each rank divides these
            gradients by the number of ranks, which gives the gradient of the mean over
            the ranks' losses. Default: none.
        double_buffering: whether `gradient` returns the reduced gradients of the
            previous step (zeros in the first step), so that the reduction runs during
            the forward and the backward pass (see docs/slow-networks.md). Tapes that
            differentiate with respect to the same variables need different names.
            Default False.
        persistent: whether `gradient` of the new tape may be called repeatedly; default
            False.
        watch_accessed_variables: whether the new tape watches trainable variables
            automatically; default True.

    Raises:
        TypeError: `tape` is not a `tf.GradientTape`, or `name` is not a string.
        ValueError: `op` is not one of the three operations, `compression` is unknown,
            ADASUM is used with a number of ranks that is not a power of two, ADASUM is
            used with `sparse_as_dense=False`, `double_buffering` is used with ADASUM,
            `local_variables` or `sparse_as_dense=False`, or `persistent` or
            `watch_accessed_variables` is set for an existing tape.
        NotImplementedError: ADASUM or `double_buffering` is used in an elastic job.

    Example:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.init()
        >>> w = tf.Variable(3.0)
        >>> with tfdist.DistributedGradientTape() as tape:
        ...     loss = w * w
        >>> float(tape.gradient(loss, w))
        6.0
    """

    def __init__(
        self,
        tape: tf.GradientTape | None = None,
        *,
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str | None = None,
        process_set: ProcessSet | None = None,
        compression: str | None = None,
        sparse_as_dense: bool | None = None,
        local_variables: Iterable[Any] | Callable[[Any], bool] | None = None,
        double_buffering: bool = False,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
    ) -> None:
        if tape is None:
            tape = tf.GradientTape(
                persistent=persistent,
                watch_accessed_variables=watch_accessed_variables,
            )
        elif not isinstance(tape, tf.GradientTape):
            raise TypeError(
                f"Expected a tf.GradientTape or None, got {type(tape).__name__}: "
                f"{tape!r}. Write tfdist.DistributedGradientTape() for a new tape."
            )
        elif persistent or not watch_accessed_variables:
            raise ValueError(
                "Expected persistent and watch_accessed_variables for a new tape only, "
                "got an existing tape. Pass these arguments to the tf.GradientTape."
            )
        self._tape = tape
        self._options = ReduceOptions(
            op,
            name=name,
            process_set=process_set,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            local_variables=None
            if local_variables is None
            else LocalVariables(local_variables),
            double_buffering=double_buffering,
        )

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tape.__exit__(kind, error, traceback)

    def watch(self, tensor: Any) -> None:
        """Records operations on `tensor`, like `tf.GradientTape.watch`."""
        self._tape.watch(tensor)

    def watched_variables(self) -> tuple[Any, ...]:
        """Returns the variables watched by the tape, in construction order."""
        return self._tape.watched_variables()

    def stop_recording(self) -> Any:
        """Returns a context manager that pauses recording."""
        return self._tape.stop_recording()

    def reset(self) -> None:
        """Clears the recorded operations."""
        self._tape.reset()

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        *,
        weight: Any = None,
    ) -> Any:
        """Computes the gradient of `target`, reduced over all ranks.

        All ranks have to call this method, with the same variables in the same order.

        Args:
            target: the tensor or structure of tensors to differentiate.
            sources: a Keras or TensorFlow variable, or a structure of variables.
            output_gradients: one gradient for each target; default: ones.
            unconnected_gradients: gradient of a variable on which no rank's target
                depends: `NONE` (default) or `ZERO`. If only some ranks' targets depend
                on a variable, the remaining ranks contribute zeros.
            weight: this rank's number of samples or sum of sample weights, for batches
                of unequal sizes; a number or scalar tensor >= 0. Either all ranks pass
                a weight or none does. If `target` is the mean over this rank's samples,
                the result is the gradient of the mean over all ranks' samples: the sum
                of w_r g_r divided by the sum of w_r. Default: all ranks have equal
                weight.

        Returns:
            The reduced gradients in the structure of `sources`. The gradient of an
            embedding table that is reduced by rows is a `tf.IndexedSlices` without
            duplicate indices.

        Raises:
            TypeError: a source is not a variable.
            ValueError: a weight is given although `op` is not `ReduceOp.AVERAGE`, or it
                is not a scalar; or `double_buffering` is used under the policy
                mixed_float16, with `TFDIST_ATOMIC_STEPS=1`, or with gradients for
                different variables than in earlier steps.
            tfdist.MismatchError: the ranks' variables differ.
            tfdist.RankFailedError: a rank failed; the message names it.
        """
        variables = tf.nest.flatten(sources)
        for source in variables:
            if not hasattr(source, "assign"):
                raise TypeError(
                    "Expected variables as sources, got "
                    f"{type(source).__name__}: {source!r}. Gradients with respect to "
                    "tensors belong to one rank's data and are not reduced: use "
                    "tf.GradientTape for them."
                )

        def local(begin_with: Any) -> Any:
            return self._tape.gradient(
                target, variables, begin_with, unconnected_gradients
            )

        def of_share(share: tf.Tensor) -> Any:
            begun = as_targets_hold(share, target)
            found = local(weighted_outputs(target, output_gradients, begun))
            if begun is share:
                return found
            return [weighted(g, tf.math.divide_no_nan(share, begun)) for g in found]

        buffer = buffer_of(variables, self._options)
        if buffer is not None:
            _check_no_loss_scale()
        if weight is None:
            reduced = reduction.reduce_gradients(
                local(output_gradients), variables, self._options, buffer=buffer
            )
        else:
            reduced = reduction.weighted_gradients(
                of_share, variables, self._options, weight, buffer
            )
        own = set(self._options.local_places(variables))
        note_tape(
            [g for i, g in enumerate(reduced) if i not in own],
            self._options.process_set,
            self._options.op,
        )
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError; use `tf.GradientTape.jacobian`."""
        raise NotImplementedError(
            "DistributedGradientTape reduces gradients, not Jacobians. Record with a "
            "tf.GradientTape, call its jacobian(), and reduce the result with "
            "tfdist.allreduce()."
        )

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError; use `tf.GradientTape.batch_jacobian`."""
        self.jacobian()


def _check_no_loss_scale() -> None:
    if keras.config.dtype_policy().name == "mixed_float16":
        raise ValueError(
            "double_buffering=True cannot be used under the policy mixed_float16, "
            "which needs a loss scale: the gradients of a step would be unscaled with "
            "the scale of the next step. Use the policy mixed_bfloat16, or omit "
            "double_buffering."
        )
