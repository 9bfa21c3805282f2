"""UnevenData and join: ranks with different numbers of batches train as one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.float64 import assert_like_one_process, in_float64, state_of
from helpers.pages import run_page
from helpers.ranks import run_ranks

import tfdist
from tfdist.callbacks import StopTogether, uneven_data

SLOW = pytest.mark.slow
FEATURES = 4
EPOCHS = 2
STEPS = [5, 3, 0]  # batches of each rank in an epoch
VALIDATION = [1, 4, 2]


def sizes_of(rank, steps):
    """The sizes of a rank's batches, the last of which is smaller."""
    count = steps[rank]
    return [6] * (count - 1) + [2 + rank] if count else []


def batches_of(rank, steps):
    rng = np.random.default_rng([rank, *steps])
    found = []
    for size in sizes_of(rank, steps):
        x = rng.normal(size=(size, FEATURES))
        found.append((x, (x.sum(axis=1, keepdims=True) > 0.3).astype("float64")))
    return found


def dataset(batches, counted=True):
    """A dataset of these batches; it may not know how many they are."""
    spec = tf.TensorSpec([None, FEATURES], "float64")
    made = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=(spec, tf.TensorSpec([None, 1], "float64")),
    )
    if not counted:
        return made
    return made.apply(tf.data.experimental.assert_cardinality(len(batches)))


def make_model(kind, optimizer, **compiled):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh")]
    if "sync_bn" in kind:
        layers.append(keras.layers.BatchNormalization())
    layers.append(keras.layers.Dense(1, activation="sigmoid"))
    head = [] if "lazy" in kind else [keras.Input((FEATURES,))]
    model = keras.Sequential([*head, *layers])
    if "sync_bn" in kind and tfdist.is_initialized():
        tfdist.layers.synchronize_batch_normalization(model)
    metrics = ["mae", keras.metrics.AUC(num_thresholds=20, name="auc")]
    model.compile(optimizer, loss="binary_crossentropy", metrics=metrics, **compiled)
    return model


def optimizer_of(name):
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.2, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5),
    }
    return made[name]()


@in_float64
def fit(steps, kind, name, compiled, counted):
    """The state after fit and the history, on one rank."""
    optimizer = tfdist.DistributedOptimizer(optimizer_of(name))
    model = make_model(kind, optimizer, **compiled)
    rank = tfdist.rank()
    history = model.fit(
        dataset(batches_of(rank, steps), counted=counted),
        epochs=EPOCHS,
        verbose=0,
        validation_data=dataset(batches_of(rank, VALIDATION)),
        callbacks=[
            tfdist.callbacks.UnevenData(),
            tfdist.callbacks.BroadcastInitialState(),
            tfdist.callbacks.MetricAverage(),
            *([] if "steps_per_execution" in compiled else [StopTogether()]),
        ],
    ).history
    return [state_of(model, model.optimizer), plain(history)]


@in_float64
def fit_alone(size, steps, kind, name):
    """The same in one process: at each step the batches of all ranks that have one."""
    model = make_model(kind, optimizer_of(name))
    own = [batches_of(rank, steps) for rank in range(size)]
    together = []
    for i in range(max(steps)):
        at_step = [batches[i] for batches in own if i < len(batches)]
        together.append(
            tuple(np.concatenate(part) for part in zip(*at_step, strict=True))
        )
    validation = [b for r in range(size) for b in batches_of(r, VALIDATION)]
    history = model.fit(
        dataset(together),
        epochs=EPOCHS,
        verbose=0,
        validation_data=dataset(validation),
    ).history
    return [state_of(model, model.optimizer), plain(history)]


def plain(history):
    return {key: list(map(float, values)) for key, values in history.items()}


@pytest.mark.parametrize(
    ("kind", "name", "compiled"),
    [
        ("lazy sync_bn", "adam", {}),
        pytest.param("lazy", "adam", {}, marks=SLOW),
        pytest.param("plain", "sgd", {}, marks=SLOW),
        pytest.param("plain", "adam", {"steps_per_execution": 2}, marks=SLOW),
        pytest.param("plain", "sgd", {"run_eagerly": True}, marks=SLOW),
        pytest.param("sync_bn", "adam", {}, marks=SLOW),
    ],
)
def test_uneven_ranks_train_as_one_process_does(kind, name, compiled):
    alone, history = fit_alone(3, STEPS, kind, name)
    ranks = run_ranks(fit, 3, STEPS, kind, name, compiled, True, timeout_s=120)
    assert_like_one_process([state for state, _ in ranks], alone, kind)
    for _, shown in ranks:
        assert shown == ranks[0][1]
        for key, values in history.items():
            np.testing.assert_allclose(shown[key], values, rtol=1e-6, err_msg=key)


# test_uneven_data_ends.py has one such training that is not slow.
@SLOW
@pytest.mark.parametrize("steps", [[2, 4], [3, 3]])
def test_ranks_that_do_not_know_how_many_batches_they_have_end_up_equal(steps):
    ranks = run_ranks(fit, 2, steps, "plain", "adam", {}, False, timeout_s=120)
    assert_like_one_process([s for s, _ in ranks], ranks[0][0], "unknown")
    assert ranks[0][1] == ranks[1][1]


def loop(steps):
    """A loop of one's own, uneven; then the state of a rank that took every step."""
    rng = np.random.default_rng(tfdist.rank())
    variable = tf.Variable(tf.ones([FEATURES], "float64"))
    table = tf.Variable(tf.ones([9, FEATURES], "float64"))

    @tf.function
    def step(x, ids):
        with tfdist.DistributedGradientTape(sparse_as_dense=False) as tape:
            loss = tf.reduce_mean(tf.gather(table, ids) * variable * x)
        for own, grad in zip(
            [variable, table], tape.gradient(loss, [variable, table]), strict=True
        ):
            own.assign_sub(0.1 * tf.convert_to_tensor(grad))

    for _ in range(steps[tfdist.rank()]):
        step(rng.normal(size=(3, FEATURES)), rng.integers(0, 9, 3))
    latest = tfdist.join()
    tfdist.broadcast_variables([variable, table], latest)
    return [latest, variable.numpy(), table.numpy()]


def loop_alone(steps):
    rngs = [np.random.default_rng(rank) for rank in range(len(steps))]
    variable, table = np.ones(FEATURES), np.ones((9, FEATURES))
    for step in range(max(steps)):
        own, rows = [], []
        for rank, rng in enumerate(rngs):
            if step < steps[rank]:
                x, ids = rng.normal(size=(3, FEATURES)), rng.integers(0, 9, 3)
                own.append((table[ids] * x).sum(0) / x.size)
                rows.append(np.zeros_like(table))
                np.add.at(rows[-1], ids, variable * x / x.size)
        variable, table = (
            variable - 0.1 * np.mean(own, 0),
            table - 0.1 * np.mean(rows, 0),
        )
    return [variable, table]


@pytest.mark.parametrize("steps", [[1, 4, 2], [0, 3]])
def test_join_in_a_loop_averages_over_the_ranks_that_have_data(steps):
    expected = loop_alone(steps)
    for latest, *state in run_ranks(loop, len(steps), steps):
        assert latest == int(np.argmax(steps))
        for found, wanted in zip(state, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def gaps():
    """Eager gradients, some of them None, in a list that rank 1 sees later."""
    v = [tf.Variable(1.0, name=f"gap{i}") for i in range(3)]
    found = []
    for turn in range(3):
        if turn == 0 and tfdist.rank() == 1:
            tfdist.join()
            continue
        with tfdist.DistributedGradientTape() as tape:
            loss = 2.0 * v[0] + (v[1] if turn == tfdist.rank() else 0.0)
        grads = tape.gradient(loss, v)
        found.append([None if g is None else float(g) for g in grads])
        if turn == 0:
            tfdist.join()
    return found


def test_a_list_with_gaps_that_was_seen_while_a_rank_had_joined():
    expected = [[2.0, 1.0, None], [2.0, 0.5, None], [2.0, None, None]]
    first, second = run_ranks(gaps, 2)
    assert first == expected
    assert second == expected[1:]


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyError("on purpose")


def fit_again():
    """A fit that raises, and the same once more; the weights of the second one."""
    model = make_model("plain", tfdist.DistributedOptimizer(optimizer_of("sgd")))
    model.optimizer.build(model.trainable_variables)
    before = [v.numpy() for v in model.weights]
    for failing in ([Fails()], []):
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        for slot in model.optimizer.variables[2:]:
            slot.assign(tf.zeros_like(slot))
        callbacks = [tfdist.callbacks.UnevenData(), *failing]
        data = dataset(batches_of(tfdist.rank(), [1, 1]))
        try:
            model.fit(data, verbose=0, callbacks=callbacks)
        except KeyError:
            pass
        yield np.concatenate([v.numpy().ravel() for v in model.weights])


def fit_twice():
    return list(fit_again())


def test_a_fit_that_raised_leaves_no_weighting_behind():
    for first, second in run_ranks(fit_twice, 2):
        assert first.tobytes() == second.tobytes()


WITHOUT_A_JOINED_RANK = {
    "broadcast": lambda: tfdist.broadcast(tf.constant(1.0), 1),
    "broadcast_variables": lambda: tfdist.broadcast_variables([tf.Variable(1.0)], 1),
    "scatter": lambda: tfdist.scatter(tf.ones([3]), 1),
    "add_process_set": lambda: tfdist.add_process_set([0, 2]),
}


def after_a_join(call):
    """What `call` says while rank 1 has joined, and what is said of a later one."""
    said = []
    for ask in (WITHOUT_A_JOINED_RANK[call], lambda: tfdist.allreduce(tf.ones([2]))):
        try:
            if tfdist.rank() == 1:
                tfdist.join()
            else:
                ask()
        except tfdist.MismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("broadcast", "its root, rank 1, has joined and has nothing to broadcast"),
        ("broadcast_variables", "its root, rank 1, has joined and has nothing to br"),
        ("scatter", "its root, rank 1, has joined and has nothing to"),
        ("add_process_set", "process sets can't change while rank 1 has joined"),
    ],
)
def test_what_a_joined_rank_would_have_to_call_ends_the_work_of_all(call, words):
    for text, later in run_ranks(after_a_join, 3, call):
        assert words in text
        assert later == text


def fit_once(callbacks, optimizer=None, train_step=None, executions=1):
    """One epoch of one step; the error."""
    made = [getattr(tfdist.callbacks, name)(**named) for name, named in callbacks]
    inner = keras.optimizers.SGD(0.1, **(optimizer or {}))

    class Model(keras.Sequential):
        pass

    if train_step == "own":

        def own_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x) - y) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss}

        Model.train_step = own_step
    model = Model([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(inner)
    model.compile(optimizer, loss="mse", steps_per_execution=executions)
    before = [v.numpy() for v in model.weights]
    try:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=made)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        same = all(
            np.array_equal(a, b) for a, b in zip(before, model.weights, strict=True)
        )
        return [f"{type(error).__name__}: {error}", same]
    return ["fine", "compute_loss" in vars(model)]


@pytest.mark.parametrize(
    ("callbacks", "options", "text"),
    [
        ([["UnevenData", {}]], {}, "fine"),
        (
            [["MetricAverage", {}], ["UnevenData", {}]],
            {},
            "has to be the first tfdist callback",
        ),
        (
            [["UnevenData", {}]],
            {"optimizer": {"gradient_accumulation_steps": 2}},
            "gradient_accumulation_steps",
        ),
        (
            [["UnevenData", {}], ["StopTogether", {}]],
            {"executions": 2},
            "remove StopTogether",
        ),
        (
            [
                ["UnevenData", {}],
                ["Checkpoint", {"filepath": "x.keras", "save_freq": 2}],
            ],
            {},
            "save_freq='epoch'",
        ),
        ([["UnevenData", {}]], {"train_step": "own"}, "UnevenData(weighted=False)"),
        pytest.param(
            [["UnevenData", {"weighted": False}]],
            {"train_step": "own"},
            "fine",
            marks=SLOW,
        ),
    ],
)
def test_what_cannot_be_uneven_is_refused(callbacks, options, text):
    for message, unchanged in run_ranks(
        fit_once,
        2,
        callbacks,
        options.get("optimizer"),
        options.get("train_step"),
        options.get("executions", 1),
    ):
        assert text in message
        if message == "fine":
            assert not unchanged  # nothing is left on the model
        elif "weighted=False" not in message:
            assert unchanged


class StopsRankOne(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if tfdist.rank() == 1 and batch == 1:
            self.model.stop_training = True


def stopped(steps):
    """The number of epochs and steps of a training that rank 1 stops."""
    model = make_model("plain", tfdist.DistributedOptimizer(optimizer_of("sgd")))
    batches = [(np.ones((2, FEATURES)), np.ones((2, 1)))] * steps[tfdist.rank()]
    done = keras.callbacks.LambdaCallback()
    counted = []
    done.on_train_batch_end = lambda batch, logs: counted.append(batch)
    history = model.fit(
        dataset(batches, counted=False),
        epochs=3,
        verbose=0,
        callbacks=[
            tfdist.callbacks.UnevenData(),
            StopsRankOne(),
            done,
            StopTogether(),
        ],
    ).history
    return [len(history["loss"]), len(counted)]


def test_a_stop_reaches_a_rank_whose_data_have_ended():
    assert run_ranks(stopped, 3, [4, 3, 1]) == [[1, 2], [1, 2], [1, 1]]


def page():
    """The lines of docs/uneven-data.md, one block after the other."""
    names = run_page("uneven-data.md")
    steps = int(names["model"].optimizer.iterations)
    return [steps, names["latest"], float(names["variable"])]


def test_the_lines_of_the_page_run():
    # 3 and 4 batches; x -> 0.8 x in each of 3 and 4 steps
    for steps, latest, value in run_ranks(page, 2, init=False):
        assert (steps, latest) == (4, 1)
        assert value == pytest.approx(0.8**4)


def objects(turns):
    """What ranks tell each other, of which some have joined."""
    rank, found = tfdist.rank(), []
    for turn in range(turns[rank]):
        found.append(tfdist.allgather_object({"rank": rank, "turn": turn}))
        found.append(tfdist.broadcast_object([turn], 0))
    tfdist.join()
    try:
        if rank == 0:
            return [found, tfdist.join()]
        tfdist.broadcast_object("lost", 0)
    except tfdist.MismatchError as error:
        tfdist.join()
        return [found, str(error)]


def test_objects_are_those_of_the_ranks_that_have_not_joined():
    told = run_ranks(objects, 3, [3, 1, 2])
    for rank, (found, last) in enumerate(told):
        for turn in range([3, 1, 2][rank]):
            has_more = [turns > turn for turns in [3, 1, 2]]
            assert found[2 * turn] == [
                {"rank": r, "turn": turn} if more else None
                for r, more in enumerate(has_more)
            ]
            assert found[2 * turn + 1] == [turn]
        if rank > 0:
            assert "its root, rank 0, has joined" in last


@pytest.mark.parametrize(
    ("inner", "options", "words"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps"),
        ({}, {"op": tfdist.ReduceOp.ADASUM}, "ADASUM"),
        ({}, {"op": tfdist.ReduceOp.SUM}, "op=SUM"),
    ],
)
def test_an_optimizer_that_is_an_attribute_is_refused_too(inner, options, words):
    tfdist.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=None, loss="mse")
    optimizer = keras.optimizers.SGD(0.1, **inner)
    model.own = tfdist.DistributedOptimizer(optimizer, **options)
    with pytest.raises((NotImplementedError, ValueError), match=words):
        uneven_data._check_model(model, weighted=True)
