"""DistributedGradientTape and PartialDistributedGradientTape."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tfdist.collectives.local_variables import LocalVariables
from tfdist.gradients.provenance import note_tape
from tfdist.horovod._warnings import warn_unused_device
from tfdist.horovod.common.process_sets import global_process_set, own
from tfdist.horovod.common.reduce_ops import Average
from tfdist.horovod.tensorflow._arguments import reduce_op
from tfdist.horovod.tensorflow._groups import groups_of
from tfdist.horovod.tensorflow._partial import has_parameters_of, layers_of
from tfdist.horovod.tensorflow.compression import Compression
from tfdist.horovod.tensorflow.gradients import GradientOptions


class _Reducing:
    """Mixin for a tape class whose `gradient` is reduced over all ranks."""

    _hvd_options: GradientOptions
    _hvd_local: list[Any]

    def register_local_source(self, source: Any) -> None:
        """Makes a variable, or all variables of a layer, local to each rank.

        The gradient of a local source is not reduced. With `Average`, it is divided by
        the number of ranks, unless the tape was created with
        `scale_local_gradients=False`. Every rank must register the same sources.
        """
        LocalVariables([source])  # raises TypeError for other types
        self._hvd_local.append(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        *,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the gradient of `target`, reduced over all ranks; all ranks call it.

        Args:
            target: the tensor or structure of tensors to differentiate.
            sources: Keras or TensorFlow variables, tensors, or a structure of these.
            output_gradients: a gradient for each target; default: ones.
            use_generic_names: whether the variables may have different names on the
                ranks; variables are then matched by their index in the list.
            unconnected_gradients: result for a source that does not affect the target
                on any rank.

        Returns:
            The gradients in the structure of `sources`. The gradient of an embedding
            table is a `tf.IndexedSlices` with every index once, unless the tape was
            created with `sparse_as_dense`.

        Raises:
            tf.errors.FailedPreconditionError: the ranks' variables differ; raised on
                every rank.
        """
        flat = tf.nest.flatten(sources)
        local = super().gradient(  # type: ignore[misc]
            target, flat, output_gradients, unconnected_gradients
        )
        reduced = self._hvd_options.reduce(
            local, flat, self._hvd_local, generic_names=use_generic_names
        )
        members = own(self._hvd_options.process_set)
        if members is None or members.included():
            places = LocalVariables(self._hvd_local).places(flat)
            note_tape(
                [g for i, g in enumerate(reduced) if i not in places],
                members,
                reduce_op(self._hvd_options.op),
            )
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Calls `gradient` and splits the result into local and reduced gradients.

        Args:
            target: as in `gradient`.
            sources: a list of variables.
            output_gradients: as in `gradient`.
            use_generic_names: as in `gradient`.

        Returns:
            Two lists of (source, gradient) pairs: the first for the local sources
            (`register_local_source`), the second for all other sources.
        """
        listed = list(sources)
        found = self.gradient(target, listed, output_gradients, use_generic_names)
        own = LocalVariables(self._hvd_local).places(listed)
        pairs = list(zip(listed, found, strict=True))
        return (
            [pairs[i] for i in own],
            [pair for i, pair in enumerate(pairs) if i not in own],
        )

    def jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error: Jacobians are not reduced."""
        raise NotImplementedError(
            "A DistributedGradientTape reduces gradients, not Jacobians. Call "
            "jacobian() on the original tape, and hvd.allreduce on the values that you "
            "need."
        )

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error: Jacobians are not reduced."""
        self.jacobian()


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a tape whose `gradient` is reduced over all ranks.

    Args:
        gradtape: a tape, before or after it has recorded the loss. The returned tape
            shares the recording; to compute gradients twice, it must be persistent.
        device_dense: ignored, with a warning.
        device_sparse: ignored, with a warning.
        compression: `Compression.none` (default), `Compression.fp16` or "bf16"; or a
            custom class, with which all gradients are reduced as dense tensors.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors.
        op: `Average` (default), `Sum` or `Adasum`.
        gradient_predivide_factor: factor by which gradients are divided before the
            reduction and multiplied afterwards; only with `Average`.
        num_groups: deprecated; use `groups`.
        groups: number of operations that reduce the gradients, or a list with a list of
            variables for each operation. Default: gradients are grouped by size, in the
            order in which they become ready.
        process_set: the ranks over which gradients are reduced. All other ranks use
            their own gradients (gradients of local sources are still divided).
        scale_local_gradients: whether gradients of local sources are divided by the
            number of ranks; has no effect with `Sum` or `Adasum`.

    Returns:
        A tape of the same class as `gradtape`, with the additional methods
        `register_local_source` and `get_local_and_global_gradients`.

    Raises:
        TypeError: `gradtape` is not a `tf.GradientTape`.
        ValueError: the tape is already wrapped, or an option is out of range.

    Example:
        >>> import tfdist.horovod.tensorflow as hvd
        >>> hvd.init()
        >>> w = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = w * w
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> float(tape.gradient(loss, [w])[0])
        6.0
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"Expected a tf.GradientTape, got {gradtape!r}.")
    if isinstance(gradtape, _Reducing):
        raise ValueError(
            "The tape is already wrapped: its gradients would be reduced "
            "twice. Wrap it once."
        )
    warn_unused_device("device_dense", device_dense)
    warn_unused_device("device_sparse", device_sparse)
    options = GradientOptions(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    tape: Any = copy.copy(gradtape)
    own_class: Any = type(gradtape)
    tape.__class__ = _reducing_class(own_class)
    tape._recording = False  # if wrapped while recording, the caller stops it
    tape._hvd_options, tape._hvd_local = options, []
    return tape


@has_parameters_of(DistributedGradientTape, local_layers=None)
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    *, local_layers: Any, **options: Any
) -> Any:
    """Creates a `DistributedGradientTape` that does not reduce some layers' gradients.

    Args:
        local_layers: a layer or a list of layers, the same on all ranks, whose
            gradients are not reduced. Variables that the layers create later are
            included.
        **options: the arguments of `DistributedGradientTape`, in the same order;
            `local_layers` is the second-to-last argument.

    Returns:
        The tape.

    Raises:
        ValueError: an entry of `local_layers` is not a layer. Also as in
            `DistributedGradientTape`.
        TypeError: as in `DistributedGradientTape`.
    """
    layers = layers_of(local_layers)
    tape = DistributedGradientTape(**options)
    for layer in layers:
        tape.register_local_source(layer)
    return tape


@functools.cache
def _reducing_class(cls: Any) -> Any:
    return type(cls.__name__, (_Reducing, cls), {"__doc__": cls.__doc__})
