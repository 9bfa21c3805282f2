"""Ranks that disagree, through Horovod's names: the same error on every rank.

The last rank does something else than the others. Eagerly and in a tf.function, on 2
and on 3 ranks; each case runs after all that came before it, so the ranks can go on.
"""

import keras
import pytest
import tensorflow as tf
from helpers.horovod_calls import in_mode, on_ranks, recorded

import tfdist.horovod.keras as hvd_keras
import tfdist.horovod.tensorflow as hvd

SPLITS = ("splits of one rank", "splits < 0", "too few splits")


def cases():
    """Name → a call."""
    odd = hvd.rank() == hvd.size() - 1
    last = hvd.size() - 1
    x = tf.zeros([2])
    shape = tf.zeros([3 if odd else 2])
    dtype = tf.zeros([2], tf.float64 if odd else tf.float32)
    row = tf.zeros([2, 3 if odd else 2])
    op = hvd.Max if odd else hvd.Sum
    factor = 0.5 if odd else 1.0
    root = 1 if odd else 0
    a, b = tf.Variable(x, name="a"), tf.Variable(x, name="b")
    longer = tf.Variable(shape, name="longer")
    ordered = [b, a] if odd else [a, b]
    equal = [1] * hvd.size()

    def tape(variables, **options):
        with tf.GradientTape() as own:
            loss = tf.add_n([tf.reduce_sum(v) for v in variables])
        return hvd.DistributedGradientTape(own, **options).gradient(loss, variables)

    def optimizer(variables, **options):
        made = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.0), **options)
        with tf.init_scope():
            made.build(variables)
        made.apply([tf.zeros(v.shape) for v in variables], variables)

    return {
        "allreduce shape": lambda: hvd.allreduce(shape),
        "allreduce dtype": lambda: hvd.allreduce(dtype),
        "allreduce op": lambda: hvd.allreduce(x, op=op),
        "allreduce prescale": lambda: hvd.allreduce(x, prescale_factor=factor),
        "allreduce postscale": lambda: hvd.allreduce(x, postscale_factor=factor),
        "allreduce or broadcast": lambda: (
            hvd.broadcast(x, 0, name="x") if odd else hvd.allreduce(x, name="x")
        ),
        "grouped_allreduce shape": lambda: hvd.grouped_allreduce([x, shape]),
        "grouped_allreduce dtype": lambda: hvd.grouped_allreduce([dtype, dtype]),
        "grouped_allreduce op": lambda: hvd.grouped_allreduce([x, x], op=op),
        "grouped_allreduce number": lambda: hvd.grouped_allreduce([x] * (2 + odd)),
        "reducescatter shape": lambda: hvd.reducescatter(row),
        "reducescatter dtype": lambda: hvd.reducescatter(dtype),
        "reducescatter op": lambda: hvd.reducescatter(x, op=op),
        "grouped_reducescatter": lambda: hvd.grouped_reducescatter([shape], op=hvd.Sum),
        "allgather shape": lambda: hvd.allgather(row),
        "allgather dtype": lambda: hvd.allgather(dtype),
        "grouped_allgather shape": lambda: hvd.grouped_allgather([row]),
        "broadcast shape": lambda: hvd.broadcast(shape, 0),
        "broadcast dtype": lambda: hvd.broadcast(dtype, 0),
        "broadcast root": lambda: hvd.broadcast(x, root),
        "broadcast_ shape": lambda: hvd.broadcast_([longer], 0),
        "broadcast_ root": lambda: hvd.broadcast_([a], root),
        "broadcast_variables shape": lambda: hvd.broadcast_variables([longer], 0),
        "broadcast_variables root": lambda: hvd.broadcast_variables([a], root),
        "broadcast_variables order": lambda: hvd.broadcast_variables(ordered, 0),
        "alltoall shape": lambda: hvd.alltoall(row, splits=[2, *[0] * last]),
        "alltoall dtype": lambda: hvd.alltoall(dtype, splits=[2, *[0] * last]),
        "tape order": lambda: tape(ordered),
        "tape shape": lambda: tape([longer]),
        "tape op": lambda: tape([a], op=hvd.Average if odd else hvd.Sum),
        "tape number": lambda: tape([a] if odd else [a, b]),
        "tape compression": lambda: tape([a], compression="fp16" if odd else None),
        "optimizer order": lambda: optimizer(ordered),
        "optimizer shape": lambda: optimizer([longer]),
        "optimizer groups": lambda: optimizer([a, b], groups=2 if odd else 1),
        SPLITS[0]: lambda: hvd.alltoall(tf.zeros([last + 1]), [*equal[1:], 1 + odd]),
        SPLITS[1]: lambda: hvd.alltoall(x, splits=[3, -1, *equal[2:]]),
        SPLITS[2]: lambda: hvd.alltoall(x, splits=[2]),
    }


@recorded
def mismatches(mode):
    found = {}
    for name, call in cases().items():
        try:
            in_mode(mode, call)()
            found[name] = "nothing"
        except tf.errors.OpError as error:
            code = error.error_code
            kind = tf.compat.v1.errors.exception_type_from_error_code(code)
            found[name] = kind.__name__
    total = hvd.allreduce(tf.constant([1.0]), op=hvd.Sum)
    return [found, float(total[0])]


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
def test_a_mismatch_is_horovods_error_on_every_rank(size, mode):
    for found, total in on_ranks(mismatches, size, mode):
        assert total == size
        wrong = {
            name: error
            for name, error in found.items()
            if error
            != ("InvalidArgumentError" if name in SPLITS else "FailedPreconditionError")
        }
        assert wrong == {}
        assert len(found) == 38


ORDERS = (["first", "second"], ["second", "first"])


@recorded
def other_order():
    """Eagerly each rank waits in another operation than the others."""
    try:
        for name in ORDERS[hvd.rank() % 2]:
            hvd.allreduce(tf.zeros([2]), name=name)
    except tf.errors.OpError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def test_other_names_at_the_same_time_end_with_an_error_on_every_rank():
    env = {"TFDIST_TIMEOUT_S": "30"}
    for kind, text in on_ranks(other_order, 2, env=env):
        assert kind == "MismatchError"  # a tf.errors.FailedPreconditionError
        assert "first" in text and "second" in text


@recorded
def other_order_in_a_graph():
    """There operations find each other by their names."""
    values = {"first": 1.0, "second": 10.0}

    @tf.function
    def step():
        return {
            name: hvd.allreduce(tf.constant(values[name]), op=hvd.Sum, name=name)
            for name in ORDERS[hvd.rank() % 2]
        }

    return {name: float(value) for name, value in step().items()}


def test_in_a_graph_the_order_of_the_text_does_not_count():
    assert on_ranks(other_order_in_a_graph, 2) == [{"first": 2.0, "second": 20.0}] * 2
