"""horovod.tensorflow on two ranks: tapes, optimizers, graphs with a session, layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.horovod_calls import in_mode, on_ranks, recorded

import tfdist
import tfdist.horovod.tensorflow as hvd
from tfdist.core import native as native_library
from tfdist.horovod.tensorflow.compression import Compressor


def last_alone():
    """A process set of the last rank: the others are not in it."""
    return hvd.add_process_set([hvd.size() - 1])


# ---- tapes ----

# Cases that are traced too: the rest is the same in a graph, and tracing takes time.
IN_GRAPH = ("sum", "average", "own", "named", "generic", "partial", "more")


class Halving(Compressor):
    """A compression of the user's own."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tf.cast(tensor * 2, ctx)


@recorded
def tapes(mode):
    rank, alone = hvd.rank(), last_alone()
    a = keras.Variable([1.0, 2.0], name="a")
    b = tf.Variable([3.0], name="b")
    table = tf.Variable(tf.ones([6, 1]), name="table")
    names = tf.Variable([1.0], name=f"name_on_{rank}")
    factor = float(2 * rank + 1)  # 1 and 3: the average is 2, the sum 4

    def gradients(wrap=hvd.DistributedGradientTape, with_names=False, **options):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [5, rank, 5])
            loss = tf.reduce_sum(a) + 2 * tf.reduce_sum(b) + tf.reduce_sum(rows)
            loss = factor * (loss + tf.reduce_sum(names))
        tape = wrap(tape, **options)
        if with_names:
            return tape.gradient(loss, [names], None, True)
        return tape.gradient(loss, [a, b, table])

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 1))

    def partial(op=hvd.Average, **options):
        with tf.GradientTape() as tape:
            loss = factor * (tf.reduce_sum(layer(tf.ones([1, 1]))) + tf.reduce_sum(b))
        tape = hvd.PartialDistributedGradientTape(tape, op=op, **options)
        return tape.gradient(loss, {"own": layer.kernel, "b": b})

    def local_and_tensor():
        x = tf.constant([2.0]) * factor
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = factor * (tf.reduce_sum(a) + tf.reduce_sum(b)) + tf.reduce_sum(x * x)
        tape = hvd.DistributedGradientTape(tape)
        of_x = tape.gradient(loss, x)
        missing = tape.gradient(loss, table, unconnected_gradients="zero")
        tape.register_local_source(a)
        own, others = tape.get_local_and_global_gradients(loss, [a, b])
        assert own[0][0] is a and others[0][0] is b
        return of_x, missing, own[0][1], others[0][1]

    every = {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}
    plan = {
        "average": gradients,
        "sum": lambda: gradients(op=hvd.Sum, **every),
        "fp16": lambda: gradients(compression=hvd.Compression.fp16),
        "own": lambda: gradients(compression=Halving, gradient_predivide_factor=2.0),
        "dense": lambda: gradients(sparse_as_dense=True),
        "divided": lambda: gradients(gradient_predivide_factor=2.0),
        "two": lambda: gradients(groups=2),
        "named": lambda: gradients(groups=[[b, a], [a]]),
        "alone": lambda: gradients(process_set=alone),
        "generic": lambda: gradients(with_names=True),
        "partial": lambda: partial(local_layers=layer, **every),
        "unscaled": lambda: partial(local_layers=[layer], scale_local_gradients=False),
        "partial sum": lambda: partial(
            hvd.Sum,
            local_layers=[layer],
            compression=hvd.Compression.fp16,
            sparse_as_dense=True,
            groups=1,
        ),
        "partial divided": lambda: partial(gradient_predivide_factor=4.0),
        "partial alone": lambda: partial(process_set=alone),
        "more": local_and_tensor,
    }
    found = {}
    for name, call in plan.items():
        if mode != "eager" and name not in IN_GRAPH:
            continue
        native_library.take_records()
        ends = in_mode(mode, call)()
        reductions = sum(
            row["kind"] == native_library.ALLREDUCE
            for row in native_library.take_records()
        )
        found[name] = [tensors_of(end) for end in tf.nest.flatten(ends)]
        found[name].append(reductions)
    with pytest.warns(DeprecationWarning, match="groups=1"):
        found["old"] = [*map(tensors_of, gradients(num_groups=1)), 0]
    with pytest.warns(DeprecationWarning):
        partial(num_groups=1)
    with tf.GradientTape() as tape:
        factor_loss = factor * tf.reduce_sum(b)
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(b)
    found["kept"] = [tensors_of(tape.gradient(factor_loss, b)), 0]
    return found


def tensors_of(grad):
    """A gradient as lists; slices as index and sum, with how many there are."""
    if not isinstance(grad, tf.IndexedSlices):
        return None if grad is None else grad.numpy().tolist()
    found = {"rows": len(grad.indices)}
    for index, value in zip(grad.indices.numpy(), grad.values.numpy(), strict=True):
        found[str(index)] = found.get(str(index), 0.0) + float(value[0])
    return found


@pytest.mark.parametrize(
    "mode", ["eager", "graph", pytest.param("autograph", marks=pytest.mark.slow)]
)
def test_tapes_reduce_by_their_options(mode):
    for rank, found in enumerate(on_ranks(tapes, 2, mode)):
        own = 2 * rank + 1
        rows = {"rows": 3, "5": 4.0, "0": 0.5, "1": 1.5}
        average = [[2.0, 2.0], [4.0], rows]
        summed = [[4.0, 4.0], [8.0], {**{k: 2 * v for k, v in rows.items()}, "rows": 3}]
        dense = [*average[:2], [[0.5], [1.5], [0.0], [0.0], [0.0], [4.0]]]
        # Rank 0 is outside of the set: its gradient stays as the tape gives it.
        mine = {"rows": 3 - rank, "5": 2.0 * own, str(rank): float(own)}
        expected = {
            **dict.fromkeys(("average", "fp16", "divided", "two", "old"), average),
            **{"sum": summed, "named": average, "dense": dense, "own": dense},
            "alone": [[own, own], [2 * own], mine],
            "generic": [[2.0]],
            "partial": [[2.0], [[own / 2]]],
            "unscaled": [[2.0], [[own]]],
            "partial sum": [[4.0], [[own]]],
            "partial divided": [[2.0], [[2.0]]],
            "partial alone": [[own], [[own]]],
            "more": [[8.0], np.zeros([6, 1]).tolist(), [own / 2] * 2, [2.0]],
            "kept": [[own]],
        }
        names = expected if mode == "eager" else (*IN_GRAPH, "old", "kept")
        assert set(found) == set(names)
        for name, (*ends, _) in found.items():
            assert (name, ends) == (name, expected[name])
        assert found["named"][-1] == 1  # for b and a together, and rows of the table
        assert mode != "eager" or found["two"][-1] == 2


@recorded
def other_variables():
    rank = hvd.rank()
    w = tf.Variable([1.0], name=f"name_on_{rank}")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w)
    try:
        hvd.DistributedGradientTape(tape).gradient(loss, [w])
    except tfdist.MismatchError as error:
        return "name_on_0" in str(error) and "name_on_1" in str(error)
    return None


def test_variables_of_other_names_are_a_mismatch_without_generic_names():
    assert on_ranks(other_variables, 2) == [True, True]


@recorded
def adjoints():
    found, sets = [], [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    alone = sets[hvd.rank()]
    for operation in (
        hvd.allreduce,
        lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, prescale_factor=3.0)[0],
        hvd.allgather,
        lambda x: hvd.grouped_allgather([x])[0],
        lambda x: hvd.broadcast(x, 1),
        hvd.alltoall,
        hvd.reducescatter,
        lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum)[0],
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5),
        # Of one rank alone: as those of two, but for the number of ranks.
        *(
            lambda x, f=f: f(x, process_set=alone)
            for f in (hvd.allgather, hvd.reducescatter)
        ),
        tfdist.allgather,
        lambda x: tfdist.broadcast(x, 1),
        tfdist.reduce_scatter,
    ):
        x = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            y = operation(x)
            weights = tf.range(1.0, tf.cast(tf.size(y), tf.float32) + 1)
            loss = tf.reduce_sum(y * weights) * (hvd.rank() + 1)
        found.append(tape.gradient(loss, x).numpy().tolist())
    return found


def test_gradients_of_collectives_are_horovods():
    """As `_allreduce_grad` and its like in horovod/tensorflow/mpi_ops.py."""
    both = [[1.5, 3.0], [9.0, 18.0]]
    # Of reducescatter: an average, a sum, and a sum of halves.
    parts = [[1.0, 2.0], [2.0, 4.0], [1.0, 2.0]]
    native = [[0.0, 0.0], [0.5, 1.0]]  # sums, and an average of two
    first, second = on_ranks(adjoints, 2)
    own = [[1.0, 2.0]] * 2
    means = [*[[1.5, 3.0]] * 2, [0.0, 0.0], [1.0, 2.0]]
    assert first == [*both, *means, *parts, *own, [3.0, 6.0], *native]
    own, native = [[2.0, 4.0]] * 2, [[3.0, 6.0], [0.5, 1.0]]
    means = [*[[4.5, 6.0]] * 2, [1.5, 3.0], [2.0, 4.0]]
    assert second == [*both, *means, *parts, *own, [9.0, 12.0], *native]


# ---- optimizers of TensorFlow 1, and graphs ----


@recorded
def session_steps():
    rank, alone = hvd.rank(), last_alone()
    factor = float(2 * rank + 1)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None])
        w = tf.compat.v1.get_variable("w", initializer=[float(rank)])
        own = tf.compat.v1.get_variable("own", initializer=[0.0])
        sgd = tf.compat.v1.train.MomentumOptimizer(0.5, 0.0)
        optimizer = hvd.DistributedOptimizer(sgd, name="mine", use_locking=True)
        optimizer.register_local_var(own)
        loss = factor * (tf.reduce_sum(w) + tf.reduce_sum(own))
        train = optimizer.minimize(loss)
        several = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0),
            backward_passes_per_step=2,
            average_aggregated_gradients=True,
        )
        v = tf.compat.v1.get_variable("v", initializer=[0.0])
        step = tf.compat.v1.train.create_global_step()
        twice = several.minimize(factor * tf.reduce_sum(v * x), step, var_list=[v])
        send = hvd.broadcast_global_variables(1)
        in_place = hvd.broadcast_variables([w, own], 0, inplace=True)
        moved = [
            hvd.allreduce(x, op=hvd.Sum),
            hvd.grouped_allreduce([x])[0],
            hvd.allgather(x[: rank + 1]),
            hvd.broadcast(x, 1),
            *hvd.alltoall(x, splits=[1, 1]),
            hvd.reducescatter(x, op=hvd.Max),
            hvd.rank_op(),
            hvd.size_op(),
            hvd.process_set_included_op(alone.process_set_id),
            tf.gradients(hvd.allreduce(x, op=hvd.Sum), x)[0],
        ]
        objects = hvd.allgather_object(rank, session=session)
        # Checkpoints hold no sums: those without accumulation can be restored.
        saved = [v.op.name for v in tf.compat.v1.global_variables()]
        assert "v" in saved and not any("_sums" in name for name in saved)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.local_variables_initializer())
        session.run(send)
        steps = [session.run(w).tolist()]
        session.run(train)
        steps += [session.run(w).tolist(), session.run(own).tolist()]
        values = []
        for number in range(4):
            session.run(twice, {x: [number + 1.0]})
            values.append(session.run(v).tolist() + [int(session.run(step))])
        session.run(in_place)
        ends = [e.tolist() for e in session.run(moved, {x: [rank + 1.0, 5.0]})]
        slots = [optimizer.get_slot_names(), len(optimizer.variables())]
        slots.append(optimizer.get_slot(w, "momentum") is not None)
        return [steps, values, ends, objects, slots]


def test_a_session_runs_all():
    for rank, (steps, values, ends, objects, slots) in enumerate(
        on_ranks(session_steps, 2)
    ):
        own = 2 * rank + 1
        assert steps == [[1.0], [0.0], [-own / 4]]
        # Two passes of 1 and 2, then of 3 and 4, times the mean factor of 2. The global
        # step counts passes, as in Horovod.
        assert values == [[0.0, 1], [-3.0, 2], [-3.0, 3], [-10.0, 4]]
        received = [1.0, 2.0] if rank == 0 else [5.0, 5.0]
        assert ends[:4] == [[3.0, 10.0], [1.5, 5.0], [1.0, 2.0, 5.0], [2.0, 5.0]]
        assert ends[4:6] == [received, [1, 1]]
        assert ends[6] == ([2.0] if rank == 0 else [5.0])
        assert ends[7:] == [rank, 2, rank, [2.0, 2.0]]
        assert objects == [0, 1] and slots == [["momentum"], 2, True]


@recorded
def passes_without_a_gradient():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        w, v = (tf.compat.v1.get_variable(n, initializer=[0.0]) for n in "wv")
        unused = tf.compat.v1.get_variable("unused", initializer=[0.0])
        loss = tf.reduce_sum(w) + (tf.reduce_sum(v) if hvd.rank() == 0 else 0.0)
        sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
        train = optimizer.minimize(loss, var_list=[w, unused, v])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.local_variables_initializer())
        for _ in range(4):
            session.run(train)
        return [value.tolist() for value in session.run([w, unused, v])]


def test_passes_add_up_a_gradient_that_only_one_rank_has():
    ends = on_ranks(passes_without_a_gradient, 2)
    assert ends == [[[-4.0], [0.0], [-2.0]]] * 2


@recorded
def eager_legacy():
    rank, alone = hvd.rank(), last_alone()
    factor = float(2 * rank + 1)
    w, table = tf.Variable([0.0]), tf.Variable(tf.zeros([3, 1]))

    def loss():
        return factor * (tf.reduce_sum(w) + tf.reduce_sum(tf.gather(table, [rank])))

    def step(**options):
        sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(sgd, **options)
        w.assign([0.0]), table.assign(tf.zeros([3, 1]))
        optimizer.minimize(loss, var_list=[w, table])
        return [*w.numpy().tolist(), *table.numpy()[:, 0].tolist()]

    with pytest.warns(DeprecationWarning):
        old = step(num_groups=1)
    with pytest.raises(ValueError, match="graphs"):
        step(backward_passes_per_step=2)
    sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    local = hvd.DistributedOptimizer(sgd, scale_local_gradients=False)
    local.register_local_var(w)
    w.assign([0.0])
    local.minimize(loss, var_list=[w, table])
    return [
        old,
        step(
            device_dense="/cpu:0",
            device_sparse="/cpu:0",
            compression=hvd.Compression.fp16,
            sparse_as_dense=True,
            op=hvd.Sum,
            groups=[[w, table]],
        ),
        step(gradient_predivide_factor=2.0),
        step(process_set=alone),
        w.numpy().tolist(),
    ]


def test_optimizers_of_tensorflow_1_in_eager_mode():
    for rank, found in enumerate(on_ranks(eager_legacy, 2)):
        own = -2.0 * rank - 1
        average = [-2.0, -0.5, -1.5, 0.0]
        alone = [own, own if rank == 0 else 0.0, own if rank == 1 else 0.0, 0.0]
        assert found[:4] == [average, [-4.0, -1.0, -3.0, 0.0], average, alone]
        assert found[4] == [own]


# ---- layers, states ----


@recorded
def layers_and_states():
    rank = hvd.rank()
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    layer = hvd.SyncBatchNormalization(fused=False, momentum=0.5, epsilon=0.0)
    outputs = layer(tf.constant([[[1.0], [3.0]], [[5.0]]][rank]), training=True)
    mean = layer.moving_mean.numpy().tolist()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.5)
    model.layers[0].kernel.assign([[rank + 1.0]])
    of_model = hvd.elastic.TensorFlowKerasState(model, optimizer=optimizer, epoch=rank)
    w = tf.Variable(rank + 1.0)
    of_list = hvd.elastic.TensorFlowState(variables=[w], step=rank)

    def train(state, more):
        return [state.step + more, float(w)]

    results = hvd.elastic.run(train)(of_list, 10)
    of_model.sync()
    kernel = model.layers[0].kernel.numpy().tolist()
    for refused in (
        lambda: hvd.elastic.TensorFlowState([w], session=object()),
        lambda: hvd.elastic.TensorFlowKerasState(model, backend=object()),
    ):
        with pytest.raises(ValueError, match="=None"):
            refused()
    with pytest.raises(NotImplementedError, match="session"):
        hvd.BroadcastGlobalVariablesHook(0, device="/cpu:0")
    ends = [outputs.numpy()[:, 0].tolist(), mean, results, of_model.epoch, kernel]
    return ends


def test_layers_and_states_are_those_of_all_ranks():
    root = float(np.sqrt(np.float32(8 / 3)))
    for rank, (outputs, mean, results, epoch, kernel) in enumerate(
        on_ranks(layers_and_states, 2)
    ):
        wanted = [[-2 / root, 0.0], [2 / root]][rank]
        assert outputs == pytest.approx(wanted, rel=1e-5)
        assert mean == [1.5]
        assert (results, epoch, kernel) == ([10, 1.0], 0, [[1.0]])
