"""Passes the arguments of eager calls without creating a kernel for each value.

TensorFlow keeps a kernel for every value of an attribute and never frees it. Values
that may differ in every eager call are therefore passed in a tensor, `call`. The format
of this tensor is defined in `tfdist_ops/tf/call_text.h`.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as _record
from tensorflow.python.eager.forwardprop_util import pack_tangents as _pack_tangents

from tfdist.core import engines


def to_eager_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an eager call; modifies `arguments`.

    Attributes whose values may differ in every call are moved to the tensor `call`.
    """
    if engines.chosen() is not None:
        return arguments
    if _record.could_possibly_record() and _has_tangent(arguments):
        # TensorFlow traces the derivative (ForwardAccumulator). While tracing, the
        # value of a tensor is not known.
        arguments["call"] = []
        return arguments
    take = arguments.pop
    text = (
        f"{take('process_set', 0)} {take('timeout_s')} {take('prescale', 1.0)} "
        f"{take('postscale', 1.0)} {take('group', '') or '-'} "
        f"{tf.compat.as_str(take('tensor_name'))}"
    )
    # Without timeout_s, the generated function would use the integer 0 and a slower
    # path.
    arguments.update(tensor_name="", timeout_s=0.0, call=[_string_tensor(text)])
    return arguments


def _has_tangent(arguments: dict[str, Any]) -> bool:
    tensors = [*arguments.get("tensors", ()), *arguments.get("after", ())]
    if "tensor" in arguments:
        tensors.append(arguments["tensor"])
    return any(_pack_tangents(tensors).indices)


def attributes_of(call: tf.Tensor) -> dict[str, Any]:
    """Returns the attributes that an eager call has passed in the tensor `call`."""
    number, timeout_s, prescale, postscale, group, name = (
        call.numpy().decode().split(" ", maxsplit=5)
    )
    return {
        "tensor_name": name,
        "process_set": int(number),
        "timeout_s": float(timeout_s),
        "prescale": prescale,
        "postscale": postscale,
        "group": "" if group == "-" else group,
    }


@functools.lru_cache(maxsize=1024)
def _string_tensor(text: str) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.constant(text)
