"""Fingerprints of variables: 64-bit hashes that are compared between the ranks.

They detect accidental differences, so they need not be cryptographic. NumPy arrays are
hashed with BLAKE2b. Large variables, and all variables in a graph, are hashed with
TensorFlow's FarmHash64, which is limited only by memory bandwidth.

References:
    Saarinen & Aumasson, The BLAKE2 Cryptographic Hash and Message Authentication Code
    (MAC), RFC 7693, 2015.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# From this size on, TensorFlow's hash is faster despite its three calls.
_LARGE_BYTES = 256 << 10


def fingerprint(variable: Any) -> int:
    """Returns a signed 64-bit hash of the bytes of a variable's value; eager only.

    Args:
        variable: a Keras or TensorFlow variable, a tensor or an array, of any dtype and
            shape.

    Returns:
        An integer, equal on ranks whose values have the same bytes.

    Example:
        >>> import numpy as np
        >>> from tfdist.collectives.consistency.fingerprint import fingerprint
        >>> fingerprint(np.ones(3)) == fingerprint(np.ones(3))
        True
    """
    tensor = tf.convert_to_tensor(variable)
    if tensor.dtype.size * int(tf.size(tensor)) >= _LARGE_BYTES:
        return int(_fingerprint_of(tensor))
    return digest(tensor.numpy().tobytes())


def fingerprints(variables: Sequence[Any]) -> list[int]:
    """Returns the `fingerprint` of each variable, in order."""
    return [fingerprint(variable) for variable in variables]


def digest(data: bytes) -> int:
    """Returns a signed 64-bit hash of `data`."""
    found = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def digest_of_fingerprints(numbers: Sequence[int]) -> int:
    """Returns one signed 64-bit hash of a list of fingerprints."""
    return digest(np.asarray(numbers, np.int64).tobytes())


def fingerprints_in_graph(variables: Sequence[Any], limit_bytes: int) -> tf.Tensor:
    """Returns an int64 tensor with a hash of each variable at the time the graph runs.

    Args:
        variables: n Keras or TensorFlow variables, at least one.
        limit_bytes: largest number of bytes of a variable that are hashed; the rest of
            a larger variable is ignored.

    Returns:
        A tensor of shape [n].
    """
    hashes = []
    for variable in variables:
        tensor = tf.convert_to_tensor(variable)
        limit = max(1, limit_bytes // tensor.dtype.size)
        hashes.append(_fingerprint_of(tf.reshape(tensor, [-1])[:limit]))
    return tf.stack(hashes)


def combine_in_graph(hashes: tf.Tensor) -> tf.Tensor:
    """Returns one int64 hash of a vector of hashes."""
    return _fingerprint_of(hashes)


def _fingerprint_of(tensor: tf.Tensor) -> tf.Tensor:
    row = tf.reshape(tensor, [1, -1])
    return tf.bitcast(tf.fingerprint(row), tf.int64)[0]
