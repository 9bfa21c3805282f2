"""Options of Horovod's Keras optimizers, and collectives of values, on two ranks."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.horovod_calls import on_ranks, recorded
from helpers.outcome import outcome

import tfdist
import tfdist.horovod.keras as hvd_keras
import tfdist.horovod.tensorflow as horovod
import tfdist.horovod.tensorflow.keras as hvd
from tfdist.core import native

SIZE = 2


# ---- options


@recorded
def reduced_with(options):
    """What a step of SGD(1) subtracts, for [rank + 1, 2**17] and a table's."""
    w, table = tf.Variable([0.0, 0.0]), tf.Variable(tf.zeros((3, 2)))
    named = {"Sum": hvd.Sum, "fp16": hvd.Compression.fp16, "lists": [[w], [table]]}
    given = {k: named[v] if v in named else v for k, v in options.items()}
    package = hvd_keras if hvd.rank() == 0 else hvd  # both are the same
    optimizer = package.DistributedOptimizer(keras.optimizers.SGD(1.0), **given)
    rows = tf.constant([hvd.rank(), 2])
    slices = tf.IndexedSlices(tf.ones((2, 2)), rows, tf.constant([3, 2]))
    grads = [tf.constant([hvd.rank() + 1.0, 2.0**17]), slices]  # too large for fp16
    native.take_records()
    optimizer.apply_gradients(zip(grads, [w, table], strict=True))
    count = len([r for r in native.take_records() if "." in r["name"]])
    return (-w).numpy().tolist(), (-table).numpy()[:, 0].tolist(), count


DENSE = {"sparse_as_dense": True}


@pytest.mark.parametrize(
    ("options", "dense", "rows", "operations"),
    [
        ({}, [1.5, 2.0**17], [0.5, 0.5, 1.0], 0),
        ({"op": "Sum", **DENSE, "name": "mine"}, [3.0, 2.0**18], [1.0, 1.0, 2.0], 1),
        (
            {"compression": "fp16", "gradient_predivide_factor": 4.0},
            *([1.5, 2.0**17], [0.5, 0.5, 1.0], 0),
        ),
        ({"groups": "lists", **DENSE}, [1.5, 2.0**17], [0.5, 0.5, 1.0], 2),
        ({"num_groups": 2, **DENSE}, [1.5, 2.0**17], [0.5, 0.5, 1.0], 2),
    ],
)
@pytest.mark.filterwarnings("ignore:num_groups:DeprecationWarning")
def test_options_of_the_optimizer_reach_the_reduction(options, dense, rows, operations):
    for found in on_ranks(reduced_with, SIZE, options):
        assert found[:2] == [dense, rows]
        assert found[2] == operations or not operations


@recorded
def own_set():
    """Gradients of a set of one rank stay there."""
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    w = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=sets[hvd.rank()]
    )
    optimizer.apply_gradients([(tf.constant([hvd.rank() + 1.0]), w)])
    return w.numpy().tolist()


def test_an_optimizer_of_a_process_set_reduces_within_it():
    assert on_ranks(own_set, SIZE) == [[-1.0], [-2.0]]


FACTORS = (1.0, 10.0, 3.0)  # of the loss on each rank; the set has the average 2


class Doubles(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        super().apply_gradients([(2.0 * g, v) for g, v in grads_and_vars])


@recorded
def outside_of_a_set(in_graph):
    """What a tape gives and a step of SGD(1) subtracts, for two variables."""
    pair = hvd.add_process_set([0, 2])
    factor = FACTORS[hvd.rank()]
    kind = keras.optimizers.SGD

    def gradients(shared, own):
        with tf.GradientTape() as tape:
            loss = factor * (tf.reduce_sum(shared) + tf.reduce_sum(own))
        tape = horovod.DistributedGradientTape(tape, process_set=pair)
        tape.register_local_source(own)
        return tape.gradient(loss, [shared, own])

    def step(made, passes):
        shared, own = tf.Variable([0.0]), tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(
            made, process_set=pair, backward_passes_per_step=passes
        )
        optimizer.register_local_var(own)
        optimizer.build([shared, own])
        scale = getattr(optimizer, "initial_scale", 1.0)
        grads = [tf.constant([factor * scale])] * 2

        def apply():
            optimizer.apply_gradients(zip(grads, [shared, own], strict=True))

        for _ in range(passes):
            (tf.function(apply) if in_graph else apply)()
        return [-shared, -own]

    def legacy(shared, own):
        made = horovod.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), process_set=pair
        )
        made.register_local_var(own)
        made.apply_gradients(
            made.compute_gradients(
                lambda: factor * (tf.reduce_sum(shared) + tf.reduce_sum(own)),
                [shared, own],
            )
        )
        return [-shared, -own]

    variables = [tf.Variable([0.0], name=name) for name in ("shared", "own")]
    scaled = [
        keras.optimizers.LossScaleOptimizer(kind(1.0), initial_scale=4.0)
        for _ in range(2)
    ]
    found = {
        "tape": (tf.function(gradients) if in_graph else gradients)(*variables),
        "optimizer": step(kind(1.0), 1),
        "passes": step(kind(1.0), 2),
        "doubled": step(Doubles(1.0), 1),
        "scaled": step(scaled[0], 1),
        "scaled passes": step(scaled[1], 2),
    }
    if not in_graph:
        found["legacy"] = legacy(*variables)
    return {name: [float(one[0]) for one in ends] for name, ends in found.items()}


@pytest.mark.parametrize(
    "in_graph", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_outside_of_a_process_set_gradients_stay_those_of_the_rank(in_graph):
    for rank, found in enumerate(on_ranks(outside_of_a_set, 3, in_graph)):
        shared = 10.0 if rank == 1 else 2.0
        own = FACTORS[rank] / 2  # of two members, also on the rank outside
        for name, ends in found.items():
            times = 2 if "passes" in name or name == "doubled" else 1
            assert (name, ends) == (name, [times * shared, times * own])


# ---- local variables


@recorded
def local_steps(how, scale):
    rank = hvd.rank()
    shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    own = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    shared.build((None, 1))
    own.build((None, rank + 1))  # another shape on each rank
    if how == "partial":
        optimizer = hvd_keras.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=own, scale_local_gradients=scale
        )
    else:
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), scale_local_gradients=scale
        )
        optimizer.register_local_var(own.kernel)
    if how == "copied":
        optimizer = copy.deepcopy(optimizer)
    elif how == "from_config":
        optimizer = type(optimizer).from_config(optimizer.get_config())
        with pytest.raises(RuntimeError, match="Call register_local_var"):
            optimizer.apply([tf.ones((1, 1))], [shared.kernel])
        optimizer.register_local_var(own.kernel)
    variables = [shared.kernel, own.kernel]
    grads = [tf.fill((1, 1), rank + 1.0), tf.fill((rank + 1, 1), 4.0)]
    for _ in range(2):
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    late = outcome(lambda: optimizer.register_local_var(shared.kernel))
    return [v.numpy().ravel().tolist() for v in variables], late["class"]


@pytest.mark.parametrize(
    ("how", "scale", "subtracted"),
    [
        ("partial", True, 2.0),
        ("register", False, 4.0),
        ("copied", False, 4.0),
        ("from_config", False, 4.0),
    ],
)
def test_gradients_of_local_variables_stay_on_their_rank(how, scale, subtracted):
    for rank, found in enumerate(on_ranks(local_steps, SIZE, how, scale)):
        own = [1.0 - 2 * subtracted] * (rank + 1)
        assert found == [[[1.0 - 2 * 1.5], own], "RuntimeError"]


class OwnWidth(keras.layers.Layer):
    """A layer whose weight has another shape on each rank."""

    def build(self, shape):
        self.own = self.add_weight((tfdist.rank() + 1,), "ones")

    def call(self, x):
        return x * tf.reduce_mean(self.own)


@recorded
def broadcast_but_the_local_ones():
    rank = hvd.rank()
    layer = OwnWidth()
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    layer.own.assign(tf.fill((rank + 1,), 5.0 + rank))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
    optimizer.register_local_var(layer.own)
    model.compile(optimizer, "mse")
    before = model.layers[-1].kernel.numpy()
    x = np.ones((4, 1), "float32")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layer.own)
    model.fit(x, x, epochs=0, verbose=0, callbacks=[start])
    after = model.layers[-1].kernel.numpy()
    return layer.own.numpy().tolist(), before, after


def test_local_variables_are_not_broadcast_and_may_have_other_shapes():
    (own0, before, after0), (own1, _, after1) = on_ranks(
        broadcast_but_the_local_ones, SIZE
    )
    assert own0 == [5.0] and own1 == [6.0, 6.0]
    np.testing.assert_array_equal(after0, before)
    np.testing.assert_array_equal(after1, before)


# ---- values


@recorded
def values():
    rank = hvd.rank()
    rows = np.arange(6.0).reshape(3, 2) + rank
    return [
        np.asarray(v).tolist()
        for v in (
            hvd.allreduce(rank + 1.0),
            hvd.allreduce([rank, 2], op=hvd.Sum, name="named"),
            hvd.allreduce(1.0, prescale_factor=2.0, postscale_factor=3.0, op=hvd.Max),
            hvd.allreduce(rank + 1.0, compression=hvd.Compression.fp16, op=hvd.Min),
            hvd.allreduce(rank + 1.0, average=False),
            hvd_keras.allreduce(rank + 1.0, average=False),
            hvd_keras.allreduce(rank + 1.0, op=hvd.Max),
            hvd_keras.allreduce(1.001, compression=hvd.Compression.fp16),
            hvd_keras.allreduce(rank + 1.0, "other", True, 2.0, 2.0),
            hvd.allgather(rows[: rank + 1], name="rows"),
            hvd.broadcast(rows, 1, name="from 1"),
            hvd.reducescatter(rows, op=hvd.Sum, name="parts"),
        )
    ]


def test_collectives_of_numbers_and_arrays():
    first, second = on_ranks(values, SIZE)
    half = float(np.float32(np.float16(1.001)))
    expected = [1.5, [1, 4], 6.0, 1.0, 3.0, 3.0, 2.0, half, 6.0]
    assert first[:9] == second[:9] == expected
    assert first[9] == second[9] == [[0, 1], [1, 2], [3, 4]]
    assert first[10] == second[10] == [[1, 2], [3, 4], [5, 6]]
    assert (first[11], second[11]) == ([[1, 3], [5, 7]], [[9, 11]])
