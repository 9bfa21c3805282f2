"""Gradients of tables, reduced by rows: those of the dense reference."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import native, runtime
from tfdist.gradients import reduction
from tfdist.gradients.options import ReduceOptions

ROWS, WIDTH, STEPS = 40, 3, 5


def ids_of(rank, step):
    """Duplicates inside a rank, between ranks, other counts on other ranks."""
    rng = np.random.default_rng([rank, step])
    count = (rank * 7 + step) % 5 * 4  # none on some ranks in some steps
    return rng.integers(0, 12, size=count)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.001, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.5),
}
ALL = list(OPTIMIZERS)


def trained(optimizer, dtype, eager):
    """Table, bias and slots after some steps with rows of each rank's own."""
    table = keras.Variable(np.ones((ROWS, WIDTH)), dtype=dtype, name="table")
    bias = keras.Variable(np.ones(WIDTH), dtype=dtype, name="bias")

    def step(ids):
        with tf.GradientTape() as tape:
            taken = tf.gather(table.value, ids) * bias.value
            loss = tf.reduce_sum(taken**2 * tf.cast(ids + 1, dtype)[:, None])
        grads = tape.gradient(loss, [table.value, bias.value])
        assert isinstance(grads[0], tf.IndexedSlices)
        optimizer.apply(grads, [table, bias])

    signature = [tf.TensorSpec([None], tf.int64)]
    run = step if eager else tf.function(step, input_signature=signature)
    for number in range(STEPS):
        run(tf.constant(ids_of(tfdist.rank(), number), tf.int64))
    return [np.asarray(v) for v in [table, bias, *optimizer.variables]]


def train(names, sparse_as_dense, dtype, eager):
    native.take_records()
    found = {}
    for name in names:
        wrapped = tfdist.DistributedOptimizer(
            OPTIMIZERS[name](), sparse_as_dense=sparse_as_dense
        )
        found[name] = trained(wrapped, dtype, eager)
    names = {r["name"].rpartition(".")[2] for r in native.take_records()}
    return found, "indices" in names


@pytest.mark.parametrize(
    ("size", "eager", "names"),
    [
        (2, False, ["global"]),
        pytest.param(3, True, ["sgd", "adagrad"], marks=pytest.mark.slow),
        *(
            pytest.param(size, eager, ALL, marks=pytest.mark.slow)
            for size in (2, 3)
            for eager in (False, True)
        ),
    ],
)
def test_optimizers_give_what_they_give_on_dense_gradients(size, eager, names):
    sparse = run_ranks(train, size, names, False, "float64", eager)
    dense = run_ranks(train, size, names, True, "float64", eager)
    for (found, by_rows), (expected, rows_too) in zip(sparse, dense, strict=True):
        assert by_rows
        assert not rows_too
        for name, state in found.items():
            for a, b, first in zip(
                expected[name], state, sparse[0][0][name], strict=True
            ):
                assert b.tobytes() == first.tobytes(), name
                np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-14, err_msg=name)


def reduced(kinds, compression=None, dtype="float32", op=tfdist.ReduceOp.AVERAGE):
    """Of a table of 4 rows, each rank with its kind of gradient."""
    kind = kinds[tfdist.rank()]
    table = tf.Variable(tf.zeros((4, 1), dtype), name="table")
    grad = {
        "rows": tf.IndexedSlices(
            tf.constant([[1.0], [2.0], [4.0]], dtype), tf.constant([3, 1, 3])
        ),
        "none": None,
        "empty": tf.IndexedSlices(tf.zeros((0, 1), dtype), tf.zeros((0,), tf.int32)),
        "dense": tf.constant([[8.0], [0.0], [0.0], [16.0]], dtype),
        "below": tf.IndexedSlices(
            tf.constant([[1.0], [2.0], [4.0]], dtype), tf.constant([-1, 1, -1])
        ),
    }[kind]
    options = ReduceOptions(op, compression=compression, sparse_as_dense=False)
    [found] = reduction.reduce_gradients([grad], [table], options)
    if found is None:
        return None
    if isinstance(found, tf.IndexedSlices):
        assert found.values.dtype == dtype
        return [found.indices.numpy().tolist(), found.values.numpy()[:, 0].tolist()]
    return found.numpy()[:, 0].tolist()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["rows", "rows"], [[3, 1], [5.0, 2.0]]),
        (["rows", "none"], [[3, 1], [2.5, 1.0]]),
        (["empty", "rows"], [[3, 1], [2.5, 1.0]]),
        (["empty", "empty"], [[], []]),
        (["none", "none"], None),
        (["rows", "dense"], [4.0, 1.0, 0.0, 10.5]),
        (["dense", "none"], [4.0, 0.0, 0.0, 8.0]),
        # -1, which GPUs look up without a word, is an index and nothing else.
        (["below", "below"], [[-1, 1], [5.0, 2.0]]),
        (["below", "rows"], [[-1, 1, 3], [2.5, 2.0, 2.5]]),
    ],
)
def test_a_rank_may_lack_the_gradient_or_have_a_dense_one(kinds, expected):
    assert run_ranks(reduced, 2, kinds) == [expected, expected]


TYPES = [
    ("float16", None),
    ("bfloat16", None),
    ("float32", "fp16"),
    ("float64", "bf16"),
]


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [
        pytest.param(*case, marks=[] if case in TYPES else [pytest.mark.slow])
        for case in itertools.product(
            ("float16", "float32", "float64", "bfloat16"), (None, "fp16", "bf16")
        )
    ],
)
def test_rows_of_all_types_keep_their_type(dtype, compression):
    kinds = ["rows", "rows"]
    expected = [[3, 1], [10.0, 4.0]]
    found = run_ranks(reduced, 2, kinds, compression, dtype, tfdist.ReduceOp.SUM)
    assert found == [expected, expected]


def chosen(rows, sparse_as_dense, gate):
    table = tf.Variable(tf.zeros((rows, 1024)), name="table")
    slices = tf.IndexedSlices(tf.ones((1, 1024)), tf.constant([2]))
    options = ReduceOptions(sparse_as_dense=sparse_as_dense)
    [found] = reduction.reduce_gradients([slices], [table], options)
    return isinstance(found, tf.IndexedSlices)


@pytest.mark.parametrize(
    ("rows", "sparse_as_dense", "gate", "expected"),
    [
        (2048, None, "0", True),
        (2047, None, "0", False),
        (2048, True, "0", False),
        (3, False, "0", True),
        (2048, None, "1", False),
    ],
)
def test_large_tables_are_reduced_by_rows(rows, sparse_as_dense, gate, expected):
    env = {"TFDIST_ATOMIC_STEPS": gate}
    found = run_ranks(chosen, 2, rows, sparse_as_dense, gate, env=env)
    assert found == [expected, expected]


def test_an_elastic_loop_reduces_tables_as_dense_tensors_by_default(monkeypatch):
    tfdist.init()
    monkeypatch.setattr(runtime.state, "hides_failures", True)
    assert not chosen(2048, None, "0")
    assert chosen(3, False, "0")


def differing_options():
    table = tf.Variable(tf.zeros((4, 1)), name="table")
    options = ReduceOptions(sparse_as_dense=tfdist.rank() == 0)
    try:
        reduction.reduce_gradients([tf.zeros((4, 1))], [table], options)
    except tfdist.MismatchError as error:
        return str(error)
    return "accepted"


def test_0_is_false_and_not_the_default():
    assert ReduceOptions(sparse_as_dense=0).sparse_as_dense is False
    assert ReduceOptions(sparse_as_dense=np.True_).sparse_as_dense is True


def test_ranks_with_other_options_are_refused():
    for message in run_ranks(differing_options, 2):
        assert "sparse_as_dense" in message


def many_duplicates():
    rng = np.random.default_rng(tfdist.rank())
    table = tf.Variable(tf.zeros((64, 8)), name="table")
    slices = tf.IndexedSlices(
        tf.constant(rng.normal(size=(50_000, 8)), tf.float32),
        tf.constant(rng.integers(0, 64, 50_000)),
    )
    options = ReduceOptions(sparse_as_dense=False)
    found = []
    for _ in range(20):
        [total] = reduction.reduce_gradients([slices], [table], options)
        found.append(total.values.numpy().tobytes() + total.indices.numpy().tobytes())
    return len(set(found)), found[0]


def test_the_same_bits_on_every_run_and_rank():
    (count, bits), (other_count, other_bits) = run_ranks(many_duplicates, 2)
    assert count == other_count == 1
    assert bits == other_bits


def mixed_precision():
    """An embedding under mixed_float16; on rank 1 one row overflows."""
    inner = keras.optimizers.Adam(0.1)
    optimizer = tfdist.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0),
        sparse_as_dense=False,
    )
    table = keras.Variable(np.ones((4, 1), "float32"), name="table")
    seen = []
    for number in range(3):
        bad = number == 1 and tfdist.rank() == 1
        values = tf.constant([[4.0], [np.inf if bad else 8.0]])
        optimizer.apply([tf.IndexedSlices(values, tf.constant([1, 1]))], [table])
        seen.append([float(optimizer.dynamic_scale), int(inner.iterations)])
    return seen, table.numpy().tolist()


def test_an_overflowing_row_on_one_rank_skips_the_step_on_all():
    ranks = run_ranks(mixed_precision, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == [[4.0, 1], [2.0, 1], [2.0, 2]]
