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
    """Mixin before the class of a tape: its `gradient` is that of all ranks."""

    _hvd_options: GradientOptions
    _hvd_local: list[Any]

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradient of a variable, or of a layer's, to this rank.

        It is divided by the number of ranks, as all gradients of an average are, unless
        the tape was made with `scale_local_gradients=False`. Every rank registers the
        same ones.
        """
        LocalVariables([source])  # TypeError unless it is one
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
        """The gradient of `target`, reduced over all ranks; every rank calls it.

        Args:
            target: the tensor or structure of tensors to differentiate.
            sources: Keras or TensorFlow variables, or tensors; or a structure of them.
            output_gradients: one gradient for each target; default ones.
            use_generic_names: whether the variables may have other names on other
                ranks: then their places in the list count.
            unconnected_gradients: what a source gets that no rank's target depends on.

        Returns:
            The gradients in the structure of `sources`. Of a table, unless the tape was
            made with `sparse_as_dense`, `tf.IndexedSlices` with every index once.

        Raises:
            tf.errors.FailedPreconditionError: the ranks' variables differ, on every
                rank.
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
        """As `gradient`, in two lists of pairs of source and gradient.

        Args:
            target: as there.
            sources: a list of variables.
            output_gradients: as there.
            use_generic_names: as there.

        Returns:
            The pairs of the local sources (`register_local_source`), and of the others.
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
        """Not reduced, so refused."""
        raise NotImplementedError(
            "A DistributedGradientTape reduces gradients, not Jacobians. Call "
            "jacobian() of the tape that was wrapped, and hvd.allreduce of what you "
            "need."
        )

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not reduced, so refused."""
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
    """A tape whose `gradient` is reduced over all ranks.

    Args:
        gradtape: a tape that has recorded the loss, or will. What comes out shares its
            record, which only a persistent tape gives the gradients of twice.
        device_dense: has no meaning here; a warning says so.
        device_sparse: likewise.
        compression: `Compression.none` (default), `Compression.fp16`, also "bf16"; or a
            class of your own, with which all gradients are reduced as dense tensors.
        sparse_as_dense: whether `tf.IndexedSlices` are reduced as dense tensors.
        op: `Average` (default) or `Sum`.
        gradient_predivide_factor: divides gradients before the reduction and multiplies
            them after it; for `Average` only.
        num_groups: deprecated: `groups`.
        groups: how many operations the gradients go in, or lists of variables that go
            together. Default: cut by bytes, as they become ready.
        process_set: the ranks over which gradients are reduced. On other ranks they
            stay those of the rank (those of local sources are divided all the same).
        scale_local_gradients: whether gradients of local sources are divided by the
            number of ranks; with `Sum` there is nothing to divide.

    Returns:
        A tape of the class of `gradtape`, with `register_local_source` and
        `get_local_and_global_gradients`.

    Raises:
        TypeError: `gradtape` is no `tf.GradientTape`.
        ValueError: it is wrapped already, or an option is out of range.
        NotImplementedError: Adasum.

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
            "The tape is wrapped already: its gradients would be reduced "
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
    tape._recording = False  # who wraps it while it records, ends the recording itself
    tape._hvd_options, tape._hvd_local = options, []
    return tape


@has_parameters_of(DistributedGradientTape, local_layers=None)
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    *, local_layers: Any, **options: Any
) -> Any:
    """As `DistributedGradientTape`, without the variables of some layers.

    Args:
        local_layers: a layer or a list of layers, the same ones on all ranks, whose
            gradients stay those of the rank; also variables that they make later.
        **options: as there, in this order: `local_layers` is the last but one.

    Returns:
        The tape.

    Raises:
        ValueError: something in `local_layers` is no layer; and as there.
        TypeError: as there.
        NotImplementedError: as there.
    """
    layers = layers_of(local_layers)
    tape = DistributedGradientTape(**options)
    for layer in layers:
        tape.register_local_source(layer)
    return tape


@functools.cache
def _reducing_class(cls: Any) -> Any:
    return type(cls.__name__, (_Reducing, cls), {"__doc__": cls.__doc__})
