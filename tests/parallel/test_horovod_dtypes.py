"""Every dtype through every collective of horovod.tensorflow, bit by bit.

Eagerly and in a tf.function, on 2 and on 3 ranks. The numbers are small integers, which
every dtype has exactly, so NumPy says what comes out to the bit.
"""

import ml_dtypes  # noqa: F401 - gives NumPy the type "bfloat16"
import numpy as np
import pytest
import tensorflow as tf
from helpers.horovod_calls import in_mode, on_ranks, recorded

import tfdist.horovod.tensorflow as hvd

# Horovod has all but bfloat16, and scatters neither int8 nor uint8.
REDUCED = (
    *("uint8", "int8", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
MOVED = ("uint16", "int16", "bool")
EVERY = (*REDUCED, *MOVED)
OPERATIONS = ("Average", "Sum", "Min", "Max", "Product")


def inputs(dtype, rank):
    """Five rows of two, of which the average of two ranks is no integer."""
    factors = np.array([[0, 1], [2, 3], [1, 2], [3, 1], [2, 0]])
    if not dtype.startswith(("u", "b")):
        factors[::2] *= -1
    return (factors * (rank + 1)).astype(dtype)


def all_collectives(x, last):
    """Name → result of each collective; `last` is the root."""
    rank = hvd.rank()
    own = x[: rank + 1]
    out = {
        "allgather": hvd.allgather(own),
        "grouped_allgather": hvd.grouped_allgather([own, x]),
        "broadcast": hvd.broadcast(x, last),
        "alltoall": hvd.alltoall(x, splits=[5 - last, *[1] * last]),
    }
    if x.dtype.name not in REDUCED:
        return out
    for name in OPERATIONS:
        op = getattr(hvd, name)
        out[f"allreduce {name}"] = hvd.allreduce(x, op=op)
        out[f"grouped_allreduce {name}"] = hvd.grouped_allreduce([x, x[0]], op=op)
        out[f"reducescatter {name}"] = hvd.reducescatter(x, op=op)
    out["grouped_reducescatter"] = hvd.grouped_reducescatter([x, x[:1]], op=hvd.Sum)
    return out


@recorded
def every_dtype(mode):
    found = {}
    for dtype in EVERY:
        x, last = tf.constant(inputs(dtype, hvd.rank())), hvd.size() - 1
        out = in_mode(mode, all_collectives)(x, last)
        variable = tf.Variable(x)
        out["broadcast_"] = [*in_mode(mode, hvd.broadcast_)([variable], last), variable]
        found[dtype] = {
            name: [value.numpy() for value in tf.nest.flatten(values)]
            for name, values in out.items()
        }
    return found


def reduced(values, name):
    """What NumPy makes of the ranks' arrays; integers are cut towards zero."""
    dtype = values[0].dtype
    wide = np.stack(values).astype(np.float64)
    combine = {"Min": np.min, "Max": np.max, "Product": np.prod}.get(name, np.sum)
    result = combine(wide, axis=0)
    if name == "Average":
        result = result / len(values)
        if dtype.kind in "iu":
            result = np.trunc(result)
    return result.astype(dtype)


def part(rows, rank, size):
    """The rows of a rank: the first ones have one more where they do not divide."""
    short, longer = divmod(len(rows), size)
    begin = rank * short + min(rank, longer)
    return rows[begin : begin + short + (rank < longer)]


def expected(dtype, rank, size):
    xs = [inputs(dtype, one) for one in range(size)]
    last = size - 1
    gathered = np.concatenate([x[: r + 1] for r, x in enumerate(xs)])
    splits = [5 - last, *[1] * last]
    begin = sum(splits[:rank])
    received = np.concatenate([x[begin : begin + splits[rank]] for x in xs])
    out = {
        "allgather": [gathered],
        "grouped_allgather": [gathered, np.concatenate(xs)],
        "broadcast": [xs[last]],
        "alltoall": [received, np.full(size, splits[rank], "int32")],
        "broadcast_": [xs[last]] * 2,
    }
    if dtype in REDUCED:
        for name in OPERATIONS:
            whole = reduced(xs, name)
            out[f"allreduce {name}"] = [whole]
            out[f"grouped_allreduce {name}"] = [whole, whole[0]]
            out[f"reducescatter {name}"] = [part(whole, rank, size)]
        whole = reduced(xs, "Sum")
        out["grouped_reducescatter"] = [
            part(rows, rank, size) for rows in (whole, whole[:1])
        ]
    return out


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (2, "graph"),
        (3, "eager"),
        pytest.param(2, "eager", marks=pytest.mark.slow),
        pytest.param(2, "autograph", marks=pytest.mark.slow),
        pytest.param(3, "autograph", marks=pytest.mark.slow),
    ],
)
def test_every_dtype_has_the_bits_of_numpy(size, mode):
    for rank, found in enumerate(on_ranks(every_dtype, size, mode)):
        assert list(found) == list(EVERY)
        for dtype, results in found.items():
            wanted = expected(dtype, rank, size)
            assert results.keys() == wanted.keys()
            for name, values in wanted.items():
                for one, other in zip(results[name], values, strict=True):
                    assert one.dtype == other.dtype, (dtype, name)
                    assert one.shape == other.shape, (dtype, name)
                    assert one.tobytes() == other.tobytes(), (dtype, name)
