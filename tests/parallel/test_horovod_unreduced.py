"""Steps whose gradients were not reduced are refused, and no others, on two ranks.

Each case is two steps, of which the first may be there to make the optimizer's
variables. What is hard to tell apart stands in test_horovod_right_steps.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.guarded import guarded
from helpers.ranks import run_ranks

import tfdist
import tfdist.horovod.tensorflow as hvd

TAKEN = "taken"
TRACED = "RuntimeError"  # eagerly, or while the step is traced
RUN = "FailedPreconditionError"  # when the traced step runs
DRIFT = "MismatchError"  # eagerly, by the weights
BATCH = 64
SLOW = pytest.mark.slow


class Model:
    """Two weights, one of them a table; gradients depend on the rank."""

    def __init__(self, elements=40):
        self.weight = keras.Variable(np.ones(elements, "float32"))
        self.table = keras.Variable(np.ones((30, 2), "float32"))
        self.optimizer = keras.optimizers.SGD(0.1)
        self.data = tf.random.normal([BATCH])

    def loss(self, variables=None, data=None):
        data = self.data if data is None else data
        loss = tf.reduce_sum(self.weight * self.weight) * tf.reduce_mean(data)
        if variables is None or len(variables) == 1:
            return loss
        return loss + tf.reduce_sum(tf.gather(self.table.value, [3, hvd.rank(), 3]))

    def grads(self, variables=None, data=None, wrap=None):
        variables = variables or [self.weight]
        with tf.GradientTape() as tape:
            loss = self.loss(variables, data)
        tape = wrap(tape) if wrap else tape
        return tape.gradient(loss, variables)

    def apply(self, grads, variables=None):
        variables = variables or [self.weight]
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))


def case(function):
    CASES[function.__name__] = function
    return function


CASES = {}
wrapped = hvd.DistributedGradientTape

# ---- eagerly ----


@case
def eager_plain(model):
    model.apply(model.grads())


@case
def eager_plain_clipped_beside_the_loss(model):
    hvd.allreduce(model.loss())
    model.apply([tf.clip_by_norm(model.grads()[0], 1e6)])


@case
def eager_plain_beside_the_loss(model):
    hvd.allreduce(model.loss())
    model.apply(model.grads())


@case
def eager_plain_beside_labels(model):
    hvd.allgather(tf.range(5 * BATCH))
    model.apply(model.grads())


@case
def eager_plain_after_broadcast(model):
    hvd.broadcast_variables([model.weight], root_rank=0)
    model.apply(model.grads())


@case
def eager_plain_of_outputs_of_all(model):
    with tf.GradientTape() as tape:
        outputs = tf.reshape(model.weight.value * tf.ones([BATCH, 1]), [-1])
        loss = tf.reduce_sum(hvd.allgather(outputs) ** 2)
    model.apply(tape.gradient(loss, [model.weight]))


@case
def eager_plain_with_statistics_of_all(model):
    layer = hvd.SyncBatchNormalization(axis=-1)
    with tf.GradientTape() as tape:
        inputs = tf.random.normal([4, 40]) * model.weight
        loss = tf.reduce_sum(layer(inputs, training=True) ** 3)
    model.apply(tape.gradient(loss, [model.weight]))


@case
def eager_wrapped(model):
    model.apply(model.grads(wrap=wrapped))


@case
def eager_by_hand(model):
    (grad,) = model.grads()
    model.apply([tf.clip_by_norm(hvd.allreduce(grad), 1.0)])


@case
def eager_by_hand_in_halves(model):
    (grad,) = model.grads()
    model.apply([hvd.allreduce(grad, compression=hvd.Compression.fp16)])


@case
def eager_by_hand_scattered(model):
    (grad,) = model.grads()
    model.apply([hvd.allgather(hvd.reducescatter(grad))])


class FirstHalf(hvd.Compression.none):
    """A compression that sends less than the gradient has."""

    @staticmethod
    def compress(tensor):
        return tensor[: len(tensor) // 2], tensor

    @staticmethod
    def decompress(tensor, ctx):
        return tf.concat([tensor, tf.zeros_like(tensor)], axis=0)


@case
def eager_by_hand_compressed(model):
    (grad,) = model.grads()
    model.apply([hvd.allreduce(grad, compression=FirstHalf)])


@case
def eager_compressed_by_tape(model):
    model.apply(model.grads(wrap=lambda t: wrapped(t, compression=FirstHalf)))


@case
def eager_rows(model):
    both = [model.weight, model.table]
    model.apply(model.grads(both, wrap=wrapped), both)


@case
def eager_rows_made_dense(model):
    both = [model.weight, model.table]
    grads = [hvd.allreduce(grad) for grad in model.grads(both)]
    assert isinstance(grads[1], tf.IndexedSlices)
    model.apply([tf.convert_to_tensor(g) for g in grads], both)


@case
def eager_partial(model):
    def partial(tape):
        tape = hvd.PartialDistributedGradientTape(tape)
        tape.register_local_source(model.table)  # of more elements than the other
        return tape

    both = [model.weight, model.table]
    grads = model.grads(both, wrap=partial)
    model.apply([tf.convert_to_tensor(g) for g in grads], both)


@case
def eager_all_local(model):
    def partial(tape):
        tape = hvd.PartialDistributedGradientTape(tape)
        tape.register_local_source(model.weight)
        return tape

    model.apply(model.grads(wrap=partial))


@case
def eager_not_in_the_set(model):
    model.apply(model.grads(wrap=model.of_last_rank))


@case
def eager_added_up_then_reduced(model):
    grads = [model.grads()[0] for _ in range(3)]
    model.apply([hvd.allreduce(tf.add_n(grads))])


@case
def eager_reduced_then_added_up(model):
    grads = [model.grads(wrap=wrapped)[0] for _ in range(3)]
    model.apply([tf.add_n(grads)])


@case
def eager_accumulated_by_keras(model):
    model.optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    for _ in range(4):
        model.apply(model.grads(wrap=wrapped))


@case
def eager_loss_scale(model):
    model.optimizer = keras.optimizers.LossScaleOptimizer(model.optimizer)
    model.apply(model.grads(wrap=wrapped))


@case
def eager_one_variable_after_the_other(model):
    both = [model.weight, model.table]
    model.optimizer.build(both)
    for grad, variable in zip(model.grads(both, wrap=wrapped), both, strict=True):
        model.optimizer.apply([grad], [variable])


@case
def eager_same_gradients_again(model):
    grads = model.grads(wrap=wrapped)
    model.apply(grads)
    model.apply(grads)


@case
def eager_two_models(model):
    other = Model()
    ready = [m.grads(wrap=wrapped) for m in (model, other)]
    for one, grads in zip((model, other), ready, strict=True):
        one.apply(grads)


@case
def eager_two_models_one_plain(model):
    if not hasattr(model, "other"):
        model.other = Model()
    ready = [model.grads(wrap=wrapped), model.other.grads()]
    for one, grads in zip((model, model.other), ready, strict=True):
        one.apply(grads)


@case
def eager_plain_beside_a_wrapped_optimizer(model):
    other = Model()
    other.optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    other.apply(other.grads())
    model.apply(model.grads())


@case
def eager_plain_beside_a_traced_step(model):
    other = Model()
    tf.function(lambda: other.apply(other.grads(wrap=wrapped)))()
    model.apply(model.grads())


@case
def eager_plain_beside_rows(model):
    other = Model()
    both = [other.weight, other.table]
    other.apply(other.grads(both, wrap=wrapped), both)
    model.apply(model.grads())


@case
def eager_step_of_a_function_that_reduces(model):
    model.apply(tf.function(lambda: model.grads(wrap=wrapped))())


@case
def eager_step_of_a_function_with_local_gradients(model):
    def partial(tape):
        tape = hvd.PartialDistributedGradientTape(tape)
        tape.register_local_source(model.table)
        return tape

    both = [model.weight, model.table]

    @tf.function
    def gradients():
        grads = model.grads(both, wrap=partial)
        return [tf.convert_to_tensor(g) for g in grads]

    model.apply(gradients(), both)


@case
def eager_step_of_a_function_that_reduces_the_loss(model):
    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = hvd.allreduce(model.loss())
        return tape.gradient(loss, [model.weight])

    model.apply(gradients())


@case
def eager_step_of_a_function_with_outputs_of_all(model):
    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            outputs = tf.reshape(model.weight * model.data[:, tf.newaxis], [-1])
            loss = tf.reduce_sum(hvd.allgather(outputs) ** 2)
        return tape.gradient(loss, [model.weight])

    model.apply(gradients())


@case
def eager_tensorflow_1(model):
    model.optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    weight = tf.Variable(tf.ones([40]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight)
    grads = wrapped(tape).gradient(loss, [weight])
    model.optimizer.apply_gradients(zip(grads, [weight], strict=True))


# ---- in a graph ----


def function_of(model, gradients, **options):
    """A function that takes a step, made once for a model."""
    if not hasattr(model, "function"):
        model.function = tf.function(
            lambda *given: model.apply(gradients(*given)), **options
        )
    return model.function


@case
def graph_of_arguments(model):
    function_of(model, lambda grad: [grad])(*model.grads(wrap=wrapped))


@case
def graph_of_plain_arguments(model):
    function_of(model, lambda grad: [grad])(*model.grads())


@case
def graph_of_arguments_of_unknown_size(model):
    rows = tf.TensorSpec([None], tf.float32)
    step = function_of(model, lambda grad: [grad], input_signature=[rows])
    step(*model.grads(wrap=wrapped))


@case
def graph_of_plain_arguments_of_unknown_size(model):
    rows = tf.TensorSpec([None], tf.float32)
    step = function_of(model, lambda grad: [grad], input_signature=[rows])
    step(*model.grads())


@case
def graph_of_what_was_reduced_before(model):
    grads = model.grads(wrap=wrapped)
    tf.function(lambda: model.apply(grads))()


@case
def graph_of_arguments_under_xla(model):
    step = function_of(model, lambda grad: [grad], jit_compile=True)
    step(*model.grads(wrap=wrapped))


def of_variables(model, wrap):
    if not hasattr(model, "sum"):
        model.sum = tf.Variable(tf.zeros([40]))

        @tf.function
        def step(last):
            model.sum.assign_add(model.grads(wrap=wrap)[0])
            if last:
                model.apply([model.sum / 2.0])
                model.sum.assign(tf.zeros([40]))

        model.step = step
    for last in (False, True):
        model.step(tf.constant(last))


@case
def graph_of_variables(model):
    of_variables(model, wrapped)


@case
def graph_of_plain_variables(model):
    of_variables(model, None)


@case
def graph_by_a_formula(model):
    def formula(x):
        return [x * model.weight]

    function_of(model, formula)(tf.random.normal([40]))


@case
def graph_plain_with_decay(model):
    def decayed():
        return [model.grads()[0] + 0.1 * model.weight]

    function_of(model, decayed)()


@case
def graph_wrapped_with_decay(model):
    def decayed():
        return [model.grads(wrap=wrapped)[0] + 0.1 * model.weight]

    function_of(model, decayed)()


@case
def graph_of_labels_of_all(model):
    def gradients(labels):
        return model.grads(data=hvd.allgather(labels))

    function_of(model, gradients)(model.data)


@case
def graph_of_gathered_gradients(model):
    def gradients():
        (grad,) = model.grads()
        return [tf.reduce_mean(hvd.allgather(grad[tf.newaxis]), axis=0)]

    function_of(model, gradients)()


@case
def graph_of_gathered_rows(model):
    @tf.function
    def step():
        both = [model.weight, model.table]
        grad = model.grads(both)[1]
        grad = tf.IndexedSlices(
            hvd.allgather(grad.values) / hvd.size(), hvd.allgather(grad.indices)
        )
        model.apply([grad], [model.table])

    step()


@case
def graph_of_rows(model):
    both = [model.weight, model.table]
    if not hasattr(model, "step"):
        model.step = tf.function(
            lambda: model.apply(model.grads(both, wrap=wrapped)[1:], [model.table])
        )
    model.step()


@case
def graph_not_in_the_set(model):
    tf.function(lambda: model.apply(model.grads(wrap=model.of_last_rank)))()


@case
def graph_of_rows_of_a_function(model):
    """In one function they are reduced, in another applied."""
    both = [model.weight, model.table]
    if not hasattr(model, "step"):
        model.reduce = tf.function(lambda: model.grads(both, wrap=wrapped))
        model.step = tf.function(lambda *grads: model.apply(grads, both))
    model.step(*model.reduce())


EXPECTED = {
    "eager_plain": TRACED,
    "eager_plain_beside_the_loss": TRACED,
    "eager_plain_beside_labels": TRACED,
    "eager_plain_clipped_beside_the_loss": DRIFT,
    "eager_plain_after_broadcast": TRACED,
    "eager_plain_of_outputs_of_all": TRACED,
    "eager_plain_with_statistics_of_all": TRACED,
    "eager_two_models_one_plain": TRACED,
    "eager_plain_beside_a_wrapped_optimizer": TRACED,
    "eager_plain_beside_a_traced_step": TRACED,
    "eager_plain_beside_rows": TRACED,
    "eager_step_of_a_function_that_reduces_the_loss": DRIFT,
    "eager_step_of_a_function_with_outputs_of_all": DRIFT,
    "graph_of_plain_arguments": RUN,
    "graph_of_plain_arguments_of_unknown_size": RUN,
    "graph_of_plain_variables": RUN,
    "graph_by_a_formula": RUN,
    "graph_plain_with_decay": RUN,
    "graph_of_labels_of_all": RUN,
    "graph_of_arguments_under_xla": "InsideXlaError",
}


SOME = (  # of each outcome, and of each way to come to a step
    *("eager_plain", "eager_plain_clipped_beside_the_loss", "eager_wrapped"),
    *("eager_plain_with_statistics_of_all", "eager_by_hand", "eager_partial"),
    *("eager_compressed_by_tape", "eager_rows", "eager_not_in_the_set"),
    *("eager_reduced_then_added_up", "eager_accumulated_by_keras"),
    *("eager_two_models_one_plain", "eager_step_of_a_function_that_reduces"),
    *("eager_tensorflow_1", "graph_of_arguments", "graph_of_plain_arguments"),
    *("graph_of_arguments_under_xla", "graph_wrapped_with_decay", "graph_of_rows"),
)


def outcomes(names):
    found = {}
    last = hvd.add_process_set([1])
    with guarded():
        for name in names:
            steps = CASES[name]
            tf.random.set_seed(hvd.rank())
            model = Model()
            model.of_last_rank = lambda tape: wrapped(tape, process_set=last)
            try:
                for _ in range(2):
                    steps(model)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            else:
                found[name] = TAKEN
    return found


@pytest.fixture(scope="module")
def of_some():
    return run_ranks(outcomes, 2, SOME, timeout_s=120)


@pytest.fixture(scope="module")
def of_all():
    return run_ranks(outcomes, 2, list(CASES), timeout_s=120)


@pytest.mark.parametrize("name", SOME)
def test_a_step_is_taken_or_refused(name, of_some):
    check(name, of_some)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_taken_or_refused(name, of_all):
    check(name, of_all)


def check(name, ranks):
    for found in ranks:
        expected = EXPECTED.get(name, TAKEN)
        assert found[name].partition(":")[0] == expected, found[name]
        if expected in (TRACED, RUN, DRIFT):
            assert "gradients that were not reduced over the 2 ranks" in found[name]


def joined():
    """The second rank has two batches, the first one three."""
    with guarded():
        model = Model()
        for _ in range(3 - hvd.rank()):
            model.apply(model.grads(wrap=wrapped))
        hvd.join()
        try:
            model.apply(model.grads())
        except RuntimeError:
            return "refused"
    return "taken"


def test_a_rank_goes_on_alone_until_the_others_join_and_then_needs_reduced_gradients():
    assert run_ranks(joined, 2) == ["refused", "refused"]


# ---- reduced twice ----


def twice(tape_op, optimizer_op, in_graph, own_names, clipped):
    """The weights after a step by both wrappers, or the error."""
    weight = keras.Variable([8.0, 8.0])
    api = tfdist if own_names else hvd
    ops = {"sum": tfdist.ReduceOp.SUM, "average": tfdist.ReduceOp.AVERAGE}
    if not own_names:
        ops = {"sum": hvd.Sum, "average": hvd.Average}
    optimizer = api.DistributedOptimizer(
        keras.optimizers.SGD(1.0, name="twice"), op=ops[optimizer_op]
    )

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * (1.0 + hvd.rank()))
        tape = api.DistributedGradientTape(tape, op=ops[tape_op])
        grads = tape.gradient(loss, [weight])
        if clipped:
            grads, _ = tf.clip_by_global_norm(grads, 100.0)
        optimizer.apply_gradients(zip(grads, [weight], strict=True))

    try:
        (tf.function(step) if in_graph else step)()
    except ValueError as error:
        return str(error)
    return weight.numpy()


@pytest.mark.parametrize(
    ("in_graph", "own_names"),
    [
        *((False, False), (True, True)),
        *(pytest.param(*c, marks=SLOW) for c in [(False, True), (True, False)]),
    ],
)
def test_a_sum_of_what_a_tape_has_added_up_is_an_error(in_graph, own_names):
    for text in run_ranks(twice, 2, "sum", "sum", in_graph, own_names, in_graph):
        assert isinstance(text, str), text
        assert "'twice' are reduced twice: by a DistributedGradientTape" in text
        assert "DistributedOptimizer, both with op=Sum" in text
        assert "Use only one of the two" in text


@pytest.mark.parametrize(
    "tape_op, optimizer_op, expected, in_graph",
    [
        ("average", "average", 6.5, True),
        ("sum", "average", 5.0, False),
        ("average", "sum", 5.0, True),
        pytest.param("average", "average", 6.5, False, marks=SLOW),
        pytest.param("sum", "average", 5.0, True, marks=SLOW),
        pytest.param("average", "sum", 5.0, False, marks=SLOW),
    ],
)
def test_beside_an_average_the_other_reduction_changes_nothing(
    tape_op, optimizer_op, expected, in_graph
):
    for found in run_ranks(twice, 2, tape_op, optimizer_op, in_graph, False, False):
        np.testing.assert_array_equal(found, [expected, expected])
