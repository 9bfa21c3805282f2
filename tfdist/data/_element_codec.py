"""Pure functions that encode dataset elements as bytes.

In this module, an element of a dataset is a flat list of tensors, in the order of
`tf.nest.flatten`. Several elements whose tensors have equal shapes are sent together as
a block. A block consists of a small description (number of elements, shapes, sizes in
bytes) and one section of bytes for each tensor. The section of a numeric tensor
contains the values as they are in memory. The section of a string tensor contains the
lengths of the strings, then their bytes.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MAX_ELEMENTS = 1024  # per block
MAX_BYTES = 1 << 32  # per block
ALIGNMENT = 64  # bytes, of each section, so that TensorFlow does not copy the array
_LENGTH = np.dtype("<i8")  # type in which the length of a string is sent
_LONG_STRING = 4096  # strings with a larger average size (bytes) are sent uncopied
_TYPES = frozenset(
    "float16 bfloat16 float32 float64 complex64 complex128 bool string "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)


# ---- structure ----


def describe(spec: Any, place: str = "element") -> list[Any]:
    """Converts an element_spec to plain data, from which `restore` creates it again.

    Args:
        spec: the element_spec, or a part of it.
        place: name of the part, for messages.

    Raises:
        TypeError: the spec contains something other than tensors in dicts and tuples.
            The message names the part.

    Example:
        >>> describe({"x": tf.TensorSpec([None, 2], tf.int32)})
        ['dict', ['x'], [['tensor', 'int32', [None, 2]]]]
    """
    if type(spec) is tf.TensorSpec and can_send(spec.dtype):
        shape = None if spec.shape.rank is None else spec.shape.as_list()
        return ["tensor", spec.dtype.name, shape]
    if type(spec) is tuple:
        inner = [describe(one, f"{place}[{i}]") for i, one in enumerate(spec)]
        return ["tuple", inner]
    if type(spec) in _DICTS.values():
        kind = next(name for name, cls in _DICTS.items() if cls is type(spec))
        for key in spec:
            if type(key) not in (str, int):
                raise TypeError(
                    f"Expected keys of type str or int in {place}, got {key!r}."
                )
        inner = [describe(one, f"{place}[{key!r}]") for key, one in spec.items()]
        return [kind, list(spec), inner]
    found = f"a tensor of {spec.dtype.name}" if type(spec) is tf.TensorSpec else spec
    raise TypeError(
        "Expected elements to be tensors of numbers, bool or strings in dicts and "
        f"tuples, got {found} at {place}. Convert it with .map(...): a RaggedTensor "
        "with .to_tensor(), a SparseTensor with tf.sparse.to_dense, a named tuple with "
        "tuple()."
    )


_DICTS: dict[str, type] = {"dict": dict, "ordered": collections.OrderedDict}


def restore(plain: Any) -> Any:
    """Returns the element_spec that `describe` has converted to plain data."""
    kind = plain[0]
    if kind == "tensor":
        return tf.TensorSpec(plain[2], tf.as_dtype(plain[1]))
    if kind == "tuple":
        return tuple(restore(one) for one in plain[1])
    return _DICTS[kind](
        (key, restore(one)) for key, one in zip(plain[1], plain[2], strict=True)
    )


def can_send(dtype: tf.DType) -> bool:
    """Returns whether tensors of this type can be sent."""
    return dtype.name in _TYPES


# ---- blocks ----


def shapes_of(element: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the shape of each array, number or string in an element."""
    return [() if type(part) is bytes else np.shape(part) for part in element]


def bytes_of(part: Any) -> int:
    """Returns the approximate number of bytes in an array, number or string."""
    if type(part) is bytes:
        return len(part)
    if part.dtype == object:
        return sum(map(len, part.flat))
    return int(part.nbytes)


def encode(
    elements: Sequence[Sequence[Any]],
) -> tuple[dict[str, Any], list[memoryview]]:
    """Encodes elements with equal shapes as a block.

    Args:
        elements: at least one element; each is a list of NumPy arrays, NumPy scalars
            or bytes.

    Returns:
        The description, which can be sent as JSON, and a list of byte buffers.
    """
    parts: list[memoryview] = []
    sizes = []
    for column in zip(*elements, strict=True):
        section = _section(column)
        size = sum(map(len, section))
        padding = -size % ALIGNMENT
        parts += [*section, *([memoryview(bytes(padding))] if padding else [])]
        sizes.append(size)
    description = {
        "elements": len(elements),
        "shapes": [list(shape) for shape in shapes_of(elements[0])],
        "bytes": sizes,
    }
    return description, [part for part in parts if len(part)]


def _section(column: Sequence[Any]) -> list[memoryview]:
    first = column[0]
    if type(first) is bytes or first.dtype == object:
        strings = [
            text
            for part in column
            for text in ([part] if type(part) is bytes else part.flat)
        ]
        lengths = np.fromiter(map(len, strings), _LENGTH, len(strings))
        if len(strings) * _LONG_STRING < lengths.sum():
            return [_memory(lengths), *[memoryview(text) for text in strings]]
        return [_memory(lengths), memoryview(b"".join(strings))]
    array = np.asarray(first) if len(column) == 1 else np.stack(column)
    return [_memory(np.ascontiguousarray(array))]


def _memory(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array; dtypes that memoryview rejects are supported."""
    return memoryview(array.reshape(-1).view(np.uint8))


def charge(description: dict[str, Any]) -> int:
    """Returns the bytes of the window (`_scatter_stream.send_all`) that a block uses.

    This is the size of the block without padding, plus 64 bytes for each element.
    """
    return sum(description["bytes"]) + 64 * int(description["elements"])


def room_for(description: dict[str, Any], columns: int) -> np.ndarray:
    """Allocates an aligned buffer for the bytes of a block.

    Args:
        description: the description that the sender has sent.
        columns: number of tensors per element.

    Raises:
        ValueError: the description is not that of a block with `columns` tensors.
    """
    sizes = description.get("bytes")
    if not isinstance(sizes, list) or not all(map(_is_natural, sizes)):
        raise ValueError("Expected a block, got a different kind of message.")
    if len(sizes) != columns or sum(sizes) > MAX_BYTES:
        raise ValueError(f"Expected {columns} sections of bytes, got {sizes!r:.200}.")
    total = sum(size + -size % ALIGNMENT for size in sizes)
    raw = np.empty(total + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + total]


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def decode(
    description: dict[str, Any], room: np.ndarray, dtypes: Sequence[tf.DType]
) -> list[np.ndarray]:
    """Decodes a block of dataset elements to one array per tensor.

    Axis 0 of the arrays is the index of the element.

    Args:
        description: description of the block, from `encode`.
        room: buffer from `room_for`, filled with the bytes of the block. Numeric arrays
            are returned as views of this buffer.
        dtypes: dtypes of the tensors.

    Raises:
        ValueError: description, bytes and dtypes are inconsistent.
    """
    count, shapes = description.get("elements"), description.get("shapes")
    sizes = description["bytes"]
    if not _is_natural(count) or not 0 < count <= MAX_ELEMENTS:  # type: ignore[operator]
        raise ValueError(f"Expected 1..{MAX_ELEMENTS} elements, got {count!r:.40}.")
    if not isinstance(shapes, list) or len(shapes) != len(dtypes):
        raise ValueError(f"Expected {len(dtypes)} shapes, got {shapes!r:.200}.")
    arrays = []
    position = 0
    for shape, size, dtype in zip(shapes, sizes, dtypes, strict=True):
        if not isinstance(shape, list) or not all(map(_is_natural, shape)):
            raise ValueError(f"Expected a shape, got {shape!r:.200}.")
        full_shape = (count, *shape)
        section = room[position : position + size]
        unpack = _strings if dtype == tf.string else _numbers
        arrays.append(unpack(section, full_shape, dtype))
        position += size + -size % ALIGNMENT
    return arrays


def _numbers(section: np.ndarray, shape: Any, dtype: tf.DType) -> np.ndarray:
    numpy_dtype = np.dtype(dtype.as_numpy_dtype)
    if math.prod(shape) * numpy_dtype.itemsize != len(section):
        raise ValueError(
            f"Expected {shape} numbers of {dtype.name}, got {len(section)} bytes."
        )
    return section.view(numpy_dtype).reshape(shape)


def _strings(section: np.ndarray, shape: Any, dtype: tf.DType) -> np.ndarray:
    del dtype
    count = math.prod(shape)
    start = count * _LENGTH.itemsize
    if start > len(section):
        raise ValueError(f"Expected {shape} strings, got {len(section)} bytes.")
    lengths = section[:start].view(_LENGTH)
    if np.any(lengths < 0) or lengths.sum() != len(section) - start:
        raise ValueError(f"Expected strings, got {len(section)} bytes of other data.")
    strings = np.empty(count, object)
    ends = (start + np.cumsum(lengths)).tolist()
    memory = memoryview(section)
    for index, end in enumerate(ends):
        strings[index] = bytes(memory[start:end])
        start = end
    return strings.reshape(shape)
