"""The bytes of broadcast_object and allgather_object."""

import math

import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.collectives.object_codec import MAX_DEPTH, MAX_ITEMS, decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.binary(max_size=10)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=10,
)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


@given(values)
def test_plain_data_comes_back_with_its_types(value):
    assert same(decode(encode(value)), value)


def test_not_a_number_comes_back():
    assert math.isnan(decode(encode(float("nan"))))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(2.5),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.arange(3, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype),
    ],
)
def test_arrays_come_back_with_dtype_and_shape(array):
    [back] = decode(encode([array]))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    back[...] = 0  # a copy that may be written


@pytest.mark.parametrize("last", [(), [], {}, np.arange(3), np.float32(2)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_the_deepest_that_can_be_sent_can_be_received(kind, last):
    value = last
    for _ in range(MAX_DEPTH):
        value = kind([value])
    back = decode(encode(value))
    for _ in range(MAX_DEPTH):
        assert type(back) is kind
        [back] = back
    assert type(back) is type(last)
    with pytest.raises(ValueError, match="at most 16 levels"):
        encode(kind([value]))


SMALL = ["bfloat16", "float8_e5m2", "float8_e4m3fn", "int4", "uint4"]


@pytest.mark.parametrize("name", SMALL)
def test_small_types_come_back_bit_for_bit(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    # Every number of the type, NaN and infinities among them.
    if name in ("int4", "uint4"):
        array = (np.arange(16) - (8 if name == "int4" else 0)).astype(dtype)
    else:
        bits = f"u{dtype.itemsize}"
        array = np.arange(1 << 8 * dtype.itemsize, dtype=bits).view(dtype)
    back, scalar = decode(encode([array, array[3]]))
    assert back.dtype == dtype
    assert back.tobytes() == array.tobytes()
    assert type(scalar) is dtype.type
    assert scalar.tobytes() == array[3].tobytes()


KINDS = [k for k in vars(ml_dtypes).values() if np.generic in getattr(k, "__mro__", ())]


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_sent_can_be_received(kind):
    array = np.array([1]).astype(kind)
    if kind.__name__ in SMALL:
        assert decode(encode(array)).dtype == array.dtype
    else:  # not of all versions of TensorFlow
        with pytest.raises(TypeError, match="array of numbers at object, got dtype"):
            encode(array)


def test_an_array_in_a_file_is_one_like_any_other(tmp_path):
    there = np.memmap(tmp_path / "numbers", np.int32, "w+", shape=(3,))
    there[:] = [4, 5, 6]
    back = decode(encode(there))
    assert type(back) is np.ndarray
    assert back.tolist() == [4, 5, 6]


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True)])
def test_numpy_scalars_come_back(scalar):
    back = decode(encode(scalar))
    assert type(back) is type(scalar)
    assert back == scalar


class Money(float):
    pass


class Share(np.float32):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, object()]}, r"object\['a'\]\[1\].*builtins.object"),
        ((lambda: 0,), r"object\[0\].*function"),
        (Money(3), "Money"),
        (Share(3), "Share"),
        (np.ma.array([1, 2, 3], mask=[0, 1, 0]), r"MaskedArray: .*\(a mask"),
        ([np.asmatrix([[1, 2]])], r"object\[0\].*numpy.matrix: send np.asarray"),
        (np.rec.array([1, 2]), "recarray"),
        ({1, 2}, "set"),
        ({(1, 2): 3}, "keys"),
        (np.array(["a"]), "array of numbers"),
        (np.array([None]), "array of numbers"),
        (tf.constant(1), r"tfdist.broadcast\(\)"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_place(value, words):
    with pytest.raises(TypeError, match=words):
        encode(value)


def nested(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


def test_depth_is_bounded():
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match="16 levels"):
        encode(nested(MAX_DEPTH + 1))


def test_items_are_bounded():
    encode([0] * (MAX_ITEMS - 1))
    with pytest.raises(ValueError, match="100000 items"):
        encode([0] * MAX_ITEMS)
    many, most = [0] * (2 * MAX_ITEMS), 64 * MAX_ITEMS
    assert decode(encode(many, max_bytes=most), max_bytes=most) == many
    with pytest.raises(ValueError, match="array"):
        decode(encode(many, max_bytes=most))


def test_bytes_are_bounded_in_both_directions():
    data = encode(b"x" * 90, max_bytes=100)
    with pytest.raises(ValueError, match="at most 100 bytes"):
        encode(b"x" * 100, max_bytes=100)
    with pytest.raises(ValueError, match="at most 50 bytes"):
        decode(data, max_bytes=50)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800"])
def test_numbers_and_texts_that_do_not_fit_are_refused(value):
    with pytest.raises(ValueError, match="object"):
        encode(value)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_foreign_bytes_are_a_value_or_a_value_error(data):
    try:
        decode(data)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "body",
    [
        ["|O", [1], b"12345678"],
        ["<f4", [2], b"1234"],
        ["<f4", [-1], b""],
        ["<f4", ["1"], b"1234"],
        ["<f4,<f4", [1], b"12345678"],
        [3, [1], b""],
        ["<f4", 7, b""],
    ],
)
def test_forged_arrays_are_refused(body):
    data = msgpack.packb(msgpack.ExtType(2, msgpack.packb(body)))
    with pytest.raises(ValueError):
        decode(data)


def test_nested_tuples_are_bounded_when_decoding():
    data = msgpack.packb([])
    for _ in range(MAX_DEPTH + 2):
        data = msgpack.packb(msgpack.ExtType(1, data))
    with pytest.raises(ValueError):
        decode(data)
