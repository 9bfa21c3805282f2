"""tfdist.evaluate and tfdist.predict on several ranks: the numbers of one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist
from tfdist.training.metric_states import Snapshot

MORE = ["arrays, listed", "unknown length", "batches", "sequence"]
ROWS = 37  # divides by none of the numbers of ranks; 10 batches of 4, the last of 1


class Largest(keras.metrics.Metric):
    """A metric of the user's own, with states that are no sums."""

    tfdist_merge = {"most": "max", "least": "min", "seen": "sum"}

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros", name="most")
        self.least = self.add_variable((), "zeros", name="least")
        self.seen = self.add_variable((), "zeros", dtype="int32", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred - y_true)))
        self.least.assign(keras.ops.minimum(self.least, keras.ops.min(y_pred - y_true)))
        self.seen.assign_add(keras.ops.shape(y_true)[0])

    def result(self):
        return {"most": self.most, "least": self.least, "seen": self.seen}


def data():
    rng = np.random.default_rng(3)
    x = {
        "a": rng.normal(size=(ROWS, 3)).astype("float32"),
        "b": rng.normal(size=(ROWS, 2)).astype("float32"),
    }
    y = {
        "p": (rng.random((ROWS, 1)) > 0.4).astype("float32"),
        "q": np.eye(4, dtype="float32")[rng.integers(4, size=ROWS)],
    }
    weight = {
        "p": rng.integers(0, 4, ROWS).astype("float32"),
        "q": rng.integers(1, 3, ROWS).astype("float32"),
    }
    return x, y, weight


class Adds(keras.layers.Layer):
    """A loss of its own, and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(x)))
        self.size.update_state(x)
        return x


def two_outputs(**options):
    """Two inputs, two outputs, metrics with and without weights, one lazily built."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(8)
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    joint = Adds()(keras.layers.Concatenate()([a, b]))
    p = keras.layers.Dense(1, activation="sigmoid", name="p")(joint)
    q = keras.layers.Dense(4, activation="softmax", name="q")(joint)
    model = keras.Model({"a": a, "b": b}, {"p": p, "q": q})
    k = keras.metrics
    model.compile(
        None,
        {"p": "binary_crossentropy", "q": "categorical_crossentropy"},
        metrics={
            "p": ["accuracy", k.AUC(name="auc"), Largest()],
            "q": [k.F1Score(name="f1", average=None), k.OneHotMeanIoU(4, name="iou")],
        },
        weighted_metrics={
            "p": [k.Recall(name="recall"), k.R2Score(name="r2")],
            "q": [],
        },
        **{"jit_compile": False, **options},
    )
    return model


def dataset_of(arrays, known):
    rows = tf.data.Dataset.from_tensor_slices(arrays)
    return rows if known else rows.filter(lambda *_: True)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // 4)

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return keras.tree.map_structure(lambda a: a[rows], data())


def evaluated(kind, options):
    x, y, weight = data()
    model = two_outputs(**options)
    given = {"x": (x, y, weight), "batch_size": 4}
    if kind.startswith("arrays"):
        given = {"x": x, "y": y, "sample_weight": weight, "batch_size": 4}
    elif kind == "sequence":
        given = {"x": Sequence()}
    elif kind == "batches":
        given = {"x": dataset_of((x, y, weight), True).batch(4)}
    elif kind == "unknown length":
        given["x"] = dataset_of(given["x"], False)
    results = tfdist.evaluate(model, **given, return_dict=True)
    listed = tfdist.evaluate(model, **given) if kind == "arrays, listed" else None
    states = [np.asarray(v).tobytes() for v in Snapshot(model).values]
    return results, listed, states


def same_numbers(found, expected, rtol=2e-6):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("arrays", 2),
        *(pytest.param(kind, 3, marks=SLOW) for kind in ("arrays", *MORE)),
    ],
)
def test_evaluate_is_that_of_one_process(kind, size):
    x, y, weight = data()
    alone = two_outputs()
    given = {"x": x, "y": y, "sample_weight": weight, "batch_size": 4, "verbose": 0}
    expected = alone.evaluate(**given, return_dict=True)
    results = run_ranks(evaluated, size, kind, {})
    for found, listed, states in results:
        same_numbers(found, expected)
        assert found["seen"] == ROWS and found["most"] == expected["most"]
        assert states == results[0][2]
        if listed is not None:
            np.testing.assert_allclose(
                np.concatenate([np.ravel(v) for v in listed]),
                np.concatenate([np.ravel(v) for v in alone.evaluate(**given)]),
                rtol=2e-6,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"steps_per_execution": 3}, {"jit_compile": True}],
    ids=str,
)
def test_however_the_model_is_compiled(options):
    x, y, weight = data()
    given = {"x": x, "y": y, "sample_weight": weight, "batch_size": 4, "verbose": 0}
    expected = two_outputs(**options).evaluate(**given, return_dict=True)
    for found, _, _ in run_ranks(evaluated, 3, "arrays", options, timeout_s=100):
        same_numbers(found, expected)


class Late(keras.Model):
    """Built by its first batch; its metric makes its states then, too."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(3, kernel_initializer="ones")
        self.second = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.second(self.first(x) * keras.ops.arange(3.0))


def late_model():
    keras.utils.clear_session()
    keras.utils.set_random_seed(2)
    model = Late()
    metrics = [keras.metrics.F1Score(name="f1", average="macro"), "accuracy"]
    model.compile(None, "categorical_crossentropy", metrics=metrics, jit_compile=False)
    return model


def few():
    x = np.array([[1.0, -1.0], [2.0, 0.5], [-3.0, 1.0]], "float32")
    return x, np.eye(3, dtype="float32")[[0, 2, 1]]


def evaluated_few():
    """Two batches for three ranks: the first has none."""
    x, y = few()
    model = late_model()
    found = tfdist.evaluate(model, x, y, batch_size=2, return_dict=True)
    states = [np.asarray(v).tobytes() for v in Snapshot(model).values]
    return found, states, tfdist.predict(late_model(), x, batch_size=2)


def test_ranks_without_samples_and_a_model_built_by_its_first_batch():
    x, y = few()
    expected = late_model().evaluate(x, y, batch_size=2, verbose=0, return_dict=True)
    outputs = late_model().predict(x, batch_size=2, verbose=0)
    results = run_ranks(evaluated_few, 3)
    for found, states, predicted in results:
        same_numbers(found, expected)
        assert found == results[0][0]
        assert states == results[0][1]
        assert predicted.tobytes() == outputs.tobytes()


class Integers(keras.metrics.Metric):
    """States that float64 cannot hold; of the rank whose samples are largest."""

    tfdist_merge = {"latest": "max", "most": "max", "sum": "sum", "seen": "max"}

    def __init__(self, name="integers"):
        super().__init__(name=name)
        kinds = {"latest": "int64", "most": "uint64", "sum": "int64", "seen": "bool"}
        for state, dtype in kinds.items():
            variable = self.add_variable((), "zeros", dtype=dtype, name=state)
            setattr(self, state, variable)

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = tf.cast(tf.reduce_max(y_true), tf.int64)
        odd = 2**62 + 1 + largest
        self.latest.assign(tf.maximum(self.latest.value, odd))
        most = tf.cast(odd, tf.uint64) + tf.constant(2**63, tf.uint64)
        self.most.assign(tf.maximum(self.most.value, most))
        self.sum.assign_add(2**55 + largest)
        self.seen.assign(tf.logical_or(self.seen.value, largest > 2))

    def result(self):
        return self.latest


def states_in_64_bits():
    keras.utils.clear_session()
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), layer])
    integers = Integers()
    model.compile(None, "mse", metrics=[integers], jit_compile=False)
    y = np.arange(4.0, dtype="float32").reshape(4, 1)
    tfdist.evaluate(model, y, y, batch_size=1)
    return [v.numpy().item() for v in integers.variables]


def test_integers_are_combined_as_they_are():
    expected = [2**62 + 4, 2**63 + 2**62 + 4, 4 * 2**55 + 6, True]
    assert run_ranks(states_in_64_bits, 3) == [expected] * 3


def outputs_of_all_kinds():
    """A nested structure of outputs, of many dtypes."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    x = keras.Input((3,))
    y = keras.layers.Dense(4)(x)
    cast = keras.ops.cast
    model = keras.Model(
        x,
        {
            "one": (y, cast(y, "float16")),
            "more": [cast(y, "bfloat16"), {"i": cast(y * 9, "int32")}, y[:, 0] > 0],
        },
    )
    model.compile(jit_compile=False)
    return model


def predicted(kind, gather):
    x = data()[0]["a"]
    given = {
        "arrays": lambda: {"x": x, "batch_size": 5},
        "samples": lambda: {"x": dataset_of(x, True), "batch_size": 5},
        "unknown length": lambda: {
            "x": dataset_of(x, True).filter(lambda _: True),
            "batch_size": 5,
        },
    }[kind]()
    found = tfdist.predict(outputs_of_all_kinds(), **given, gather=gather)
    if gather == "none":
        return keras.tree.flatten(found[0]), found[1]
    if found is None:
        return None
    assert sorted(found) == ["more", "one"] and isinstance(found["one"], tuple)
    return keras.tree.flatten(found)


@pytest.mark.parametrize(
    "kind",
    ["arrays", *(pytest.param(k, marks=SLOW) for k in ("samples", "unknown length"))],
)
def test_predict_gives_the_bits_of_one_process_in_order(kind):
    expected = outputs_of_all_kinds().predict(data()[0]["a"], batch_size=5, verbose=0)
    for found in run_ranks(predicted, 3, kind, "all"):
        for array, other in zip(found, keras.tree.flatten(expected), strict=True):
            assert array.dtype == other.dtype
            assert array.shape == other.shape
            assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("gather", [pytest.param("root", marks=SLOW), "none"])
def test_predict_to_one_rank_and_to_none(gather):
    expected = outputs_of_all_kinds().predict(data()[0]["a"], batch_size=5, verbose=0)
    expected = keras.tree.flatten(expected)
    parts = run_ranks(predicted, 3, "arrays", gather)
    if gather == "root":
        whole, *others = parts
        assert others == [None, None]
        assert [a.tobytes() for a in whole] == [a.tobytes() for a in expected]
        return
    assert [len(indices) for _, indices in parts] == [10, 15, 12]
    assert [i for _, indices in parts for i in indices] == list(range(ROWS))
    for arrays, indices in parts:
        for array, other in zip(arrays, expected, strict=True):
            assert array.tobytes() == other[indices].tobytes()


def in_a_set():
    members = tfdist.add_process_set([0, 2])
    x, y = few()
    if tfdist.rank() == 1:
        return None
    found = tfdist.evaluate(late_model(), x, y, batch_size=1, process_set=members)
    return [*found, tfdist.predict(late_model(), x, batch_size=1, process_set=members)]


def dealt_among_all():
    """Data of which each rank has the part that is its own among all three."""
    members = tfdist.add_process_set([0, 2])
    x = np.arange(12.0, dtype="float32").reshape(12, 1)
    data = tf.data.Dataset.from_tensor_slices((x, x)).shard(3, tfdist.rank()).batch(2)
    if not members.included():
        return ""
    try:
        tfdist.evaluate(late_model(), data, process_set=members)
    except ValueError as error:
        return str(error)
    return "none"


def test_data_dealt_among_all_ranks_are_refused_in_a_process_set_too():
    first, none, last = run_ranks(dealt_among_all, 3)
    assert none == ""
    for message in (first, last):
        assert "already distributed to 3 ranks before tfdist.evaluate" in message


def renormalized():
    """Evaluates and predicts after a training that leaves renorm_mean different."""
    layers = [keras.layers.BatchNormalization(renorm=True), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    sgd = keras.optimizers.SGD(0.01)
    model.compile(tfdist.DistributedOptimizer(sgd), "mse", jit_compile=False)
    x = np.random.default_rng(tfdist.rank()).normal(size=(8, 3)).astype("float32")
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    model.fit(x, x[:, :1], verbose=0, callbacks=callbacks)
    own = layers[0].renorm_mean.numpy()
    tfdist.layers.combine_moving_statistics(model)
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    loss = tfdist.evaluate(model, x, y, batch_size=1)
    return own, loss, tfdist.predict(model, x, batch_size=1)


def test_statistics_that_only_training_uses_may_differ():
    (own, *found), (other, *same) = run_ranks(renormalized, 2)
    assert (own != other).all()
    assert found[0] == same[0]
    assert found[1].tobytes() == same[1].tobytes()


def global_batches_again():
    """Messages about the batches of one rank where all samples are expected."""
    x, own = np.arange(36.0).reshape(12, 3), np.arange(12)
    batches = tfdist.data.global_batches(
        (x, x), global_batch=4, shuffle=False, drop_remainder=False
    )
    calls = {
        "evaluate": lambda: tfdist.evaluate(late_model(), batches),
        "predict": lambda: tfdist.predict(late_model(), batches.map(lambda x, _: x)),
        "shard": lambda: tfdist.data.shard(batches.unbatch(), batch_size=2),
        "scatter": lambda: tfdist.data.scatter(batches.unbatch()),
        "function": lambda: tfdist.data.scatter(
            lambda rank: tfdist.data.global_batches(own, global_batch=4)
        ),
    }
    return {name: outcome(call) for name, call in calls.items()}


def test_batches_that_are_each_ranks_own_are_refused():
    for rank, found in enumerate(run_ranks(global_batches_again, 2)):
        for name, one in found.items():
            tells = rank == 0 or name not in ("scatter", "function")
            assert one["class"] == ("ValueError" if tells else "RankFailedError"), name
            assert "tfdist.data.global_batches" in one["message"], name


def test_the_ranks_of_a_process_set():
    x, y = few()
    expected = late_model().evaluate(x, y, batch_size=1, verbose=0)
    first, other, last = run_ranks(in_a_set, 3)
    assert other is None
    np.testing.assert_allclose(first[:-1], expected, rtol=1e-6)
    assert first[:-1] == last[:-1]
    assert first[-1].tobytes() == last[-1].tobytes()


def half_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = few()
        found = tfdist.evaluate(late_model(), x, y, batch_size=1, return_dict=True)
        return found, tfdist.predict(late_model(), x, batch_size=1)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.slow
def test_mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = few()
        model = late_model()
        expected = model.evaluate(x, y, batch_size=1, verbose=0, return_dict=True)
        outputs = model.predict(x, batch_size=1, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    for found, predicted in run_ranks(half_precision, 2):
        same_numbers(found, expected)
        assert predicted.dtype == outputs.dtype
        assert predicted.tobytes() == outputs.tobytes()
