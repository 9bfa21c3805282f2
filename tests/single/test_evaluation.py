"""tfdist.evaluate and predict: how data are dealt out, how states are combined."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import all_ranks
from tfdist.training.batch_partition import contiguous_range, partition
from tfdist.training.metric_states import (
    Snapshot,
    _states_of_metric,
    check_metrics,
    states_of,
)

ROWS = 29
CLASSES = 4
# Arguments that a class needs to be made; and the classes that take sparse labels.
ARGUMENTS = {
    "SensitivityAtSpecificity": {"specificity": 0.4},
    "SpecificityAtSensitivity": {"sensitivity": 0.4},
    "PrecisionAtRecall": {"recall": 0.4},
    "RecallAtPrecision": {"precision": 0.4},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": CLASSES},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}
SPARSE = ("SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy")
SLOW = pytest.mark.slow
CLASSES_OF_KERAS = sorted(
    name
    for name, cls in vars(keras.metrics).items()
    if inspect.isclass(cls) and cls is not keras.metrics.Metric
)


@pytest.fixture(scope="module", autouse=True)
def world():
    keras.utils.clear_session()
    tfdist.init()
    yield
    tfdist.shutdown()


def samples(name):
    """Targets, outputs and weights that the class takes."""
    rng = np.random.default_rng(1)
    scores = rng.random((ROWS, CLASSES)).astype("float32")
    scores /= scores.sum(axis=1, keepdims=True)
    labels = rng.integers(CLASSES, size=ROWS)
    weight = rng.integers(0, 4, ROWS).astype("float32")
    if name in (*SPARSE, "SparseCategoricalCrossentropy"):
        return (labels, scores), weight
    if name in ("IoU", "MeanIoU"):
        return (labels, rng.integers(CLASSES, size=ROWS)), weight
    if name in ("Mean", "Sum"):
        return (scores[:, 0],), weight
    if name in ("BinaryIoU", "AUC", "BinaryAccuracy") or "At" in name:
        return ((labels > 1).astype("float32"), scores[:, 0] * 2), weight
    return (np.eye(CLASSES, dtype="float32")[labels], scores), weight


def test_all_metrics_of_keras_are_known():
    assert len(CLASSES_OF_KERAS) >= 45


@pytest.mark.parametrize("name", CLASSES_OF_KERAS)
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=SLOW), True])
def test_the_states_of_every_metric_of_keras_add_up(name, weighted):
    cls, arguments = getattr(keras.metrics, name), ARGUMENTS.get(name, {})
    arrays, weight = samples(name)
    one = cls(**arguments)

    def update(metric, rows):
        options = {"sample_weight": weight[rows]} if weighted else {}
        metric.update_state(*(a[rows] for a in arrays), **options)

    update(one, slice(None))
    sums = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, None)):
        part = cls(**arguments)
        update(part, rows)
        states = list(_states_of_metric(part))
        assert {s.rule for s in states} == {"sum"}
        assert len(states) == len(part.variables)
        values = [np.asarray(s.variable, np.float64) for s in states]
        sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
    for state, value in zip(_states_of_metric(part), sums, strict=True):
        state.variable.assign(np.asarray(value).astype(state.variable.dtype))
    np.testing.assert_allclose(
        np.asarray(part.result()), np.asarray(one.result()), rtol=3e-6, atol=1e-7
    )


class Own(keras.metrics.Metric):
    def __init__(self, **options):
        super().__init__(name="own")
        self.highest = self.add_variable((), "zeros", name="highest")
        self.total = self.add_variable((2,), "zeros", name="total")
        for name, value in options.items():
            setattr(self, name, value)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.ones(2))

    def result(self):
        return self.highest


def compiled(**options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(None, "mse", jit_compile=False, **options)
    return model


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (None, "its state 'highest'"),
        ({"highest": "max"}, "its state 'total'"),
        ("mean", "to be one of"),
        ({"highest": "top"}, "to be one of"),
    ],
)
@pytest.mark.parametrize("where", ["metrics", "weighted_metrics"])
def test_a_metric_that_does_not_say_how_it_is_combined_is_refused(
    declared, text, where
):
    metric = Own(tfdist_merge=declared)
    with pytest.raises(ValueError, match=text):
        check_metrics(compiled(**{where: ["mae", metric]}))


@pytest.mark.parametrize("declared", ["sum", {"highest": "max", "total": "sum"}])
def test_a_metric_that_says_so_is_accepted(declared):
    check_metrics(compiled(metrics=[Own(tfdist_merge=declared)]))


def test_a_rule_may_name_lists_and_dicts_of_states():
    class Parts(keras.metrics.Metric):
        tfdist_merge = {"parts": "sum", "ends": "max"}

        def __init__(self):
            super().__init__(name="parts")
            self.parts = [self.add_variable((), "zeros", name="a")]
            self.ends = {"b": self.add_variable((), "zeros", name="b")}

        def update_state(self, *_, **__):
            self.parts[0].assign_add(1.0)

        def result(self):
            return self.parts[0] + 0.0

    model = compiled(metrics=[Parts()])
    model.evaluate(np.zeros((2, 3)), np.zeros((2, 1)), verbose=0)
    rules = {state.name: state.rule for state in states_of(model)}
    assert (rules["parts/a"], rules["parts/b"]) == ("sum", "max")


def test_a_mean_with_a_state_more_is_refused_and_one_of_metrics_is_accepted():
    class More(keras.metrics.Mean):
        def __init__(self):
            super().__init__()
            self.longest = self.add_variable((), "zeros", name="longest")

    class Both(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="both")
            self.parts = [keras.metrics.Mean(), keras.metrics.AUC()]

    with pytest.raises(ValueError, match="'longest'"):
        check_metrics(compiled(metrics=[More()]))
    check_metrics(compiled(metrics=[Both()]))


def test_evaluate_of_one_rank_is_that_of_keras():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 10, 3)).astype("float32")
    model = compiled(metrics=["mae", keras.metrics.R2Score()])
    found = tfdist.evaluate(model, x, y[:, :1], batch_size=3, verbose=0)
    now = Snapshot(model).values
    assert found == model.evaluate(x, y[:, :1], batch_size=3, verbose=0)
    for value, other in zip(now, Snapshot(model).values, strict=True):
        assert value.tobytes() == other.tobytes()
    found = tfdist.predict(model, x, batch_size=3)
    assert found.tobytes() == model.predict(x, batch_size=3, verbose=0).tobytes()


def test_a_result_of_one_element_has_the_shape_that_keras_gives_it():
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
    y = np.array([[0.0], [1.0], [0.0], [1.0]], "float32")
    model = compiled(metrics=[keras.metrics.F1Score(threshold=0.5)])
    found = tfdist.evaluate(model, x, y, return_dict=True, verbose=0)["f1_score"]
    expected = model.evaluate(x, y, return_dict=True, verbose=0)["f1_score"]
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_array_equal(found, expected)


def rows_of(part):
    if part.inputs is None:
        return []
    return [np.asarray(b[0] if isinstance(b, tuple) else b) for b in part.inputs["x"]]


@pytest.mark.parametrize(("total", "size"), [(1, 2), (7, 1), (8, 3), (17, 3), (12, 5)])
def test_the_ranks_together_have_the_batches_of_one_process(total, size):
    x = np.arange(total, dtype="float32")
    expected = [x[i : i + 4].tolist() for i in range(0, total, 4)]
    source = tf.data.Dataset.from_tensor_slices(x)
    kinds = [
        (x, 4),
        (source, 4),
        (source.filter(lambda _: True), 4),
        (source.batch(4), None),
    ]
    for data, batch_size in kinds:
        parts = [
            partition("f", data, None, None, batch_size, r, size) for r in range(size)
        ]
        found = [b.tolist() for part in parts for b in rows_of(part)]
        assert found == expected
        assert len({part.fingerprint for part in parts}) == 1
        counts = [len(rows_of(part)) for part in parts]
        assert max(counts) - min(counts) <= 1
        specs = {str(p.inputs["x"].element_spec) for p in parts if p.inputs}
        assert len(specs) == 1  # Keras weights losses by what is known of it
        known = [int(p.inputs["x"].cardinality()) if p.inputs else 0 for p in parts]
        assert known == counts


ROWS_OF_MANY_KINDS = {
    "array": lambda order: np.arange(40.0, dtype="float32").reshape(20, 2)[order],
    "tensor": lambda order: tf.constant(np.arange(20, dtype="int64")[order]),
    "bfloat16": lambda order: tf.cast(np.arange(20.0)[order], tf.bfloat16),
    "text": lambda order: np.array([f"row {i}" for i in order], dtype=object),
    "tensor of text": lambda order: tf.constant([f"row {i}" for i in order]),
    "ragged": lambda order: tf.ragged.constant([[int(i)] * (i % 3 + 1) for i in order]),
}


@pytest.mark.parametrize("kind", ROWS_OF_MANY_KINDS)
def test_arrays_in_another_order_are_other_data(kind):
    def whole(order):
        x = ROWS_OF_MANY_KINDS[kind](order)
        return partition("f", {"a": x}, None, None, 4, 0, 2).fingerprint

    order = np.arange(20)
    assert whole(order) == whole(order.copy())
    assert whole(order) != whole(np.roll(order, 1))


@pytest.mark.parametrize("total", [1, 2, 16, 17, 100])
def test_the_first_and_the_last_row_are_looked_at(total):
    def whole(changed):
        x = np.arange(float(total))
        x[changed] = -1.0
        return partition("f", x, None, None, 4, 0, 2).fingerprint

    same = slice(0, 0)
    assert whole(same) == whole(same)
    assert whole(same) not in (whole(0), whole(-1))


def test_the_own_error_is_raised_also_where_the_others_cannot_be_told(monkeypatch):
    tfdist.init()
    lost = ConnectionError("the others are gone")

    def gather(*arguments, **options):
        raise lost

    def work():
        raise ArithmeticError("mine")

    monkeypatch.setattr(all_ranks, "gather_from_all", gather)
    ranks = all_ranks.CoordinatedCall("evaluate", None, None)
    with pytest.raises(ArithmeticError, match="mine") as caught:
        ranks.run("before the first batch", work)
    assert caught.value.__cause__ is None  # not the fault of the other ranks
    with pytest.raises(ConnectionError, match="are gone"):
        ranks.run("before the first batch", lambda: (None, {}))


class Labelled:
    """As a Series of pandas: what is in brackets are labels, places are `iloc`."""

    def __init__(self, values):
        self.iloc, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, label):
        raise KeyError(label)


def test_rows_are_taken_by_their_places():
    values = np.arange(7.0)
    parts = [partition("f", Labelled(values), None, None, 2, r, 2) for r in range(2)]
    found = [b.tolist() for part in parts for b in rows_of(part)]
    plain = [partition("f", values, None, None, 2, r, 2) for r in range(2)]
    assert found == [b.tolist() for part in plain for b in rows_of(part)]
    assert parts[0].fingerprint == plain[0].fingerprint


def test_runs_cover_all_batches():
    for count in range(9):
        for size in range(1, 6):
            runs = [contiguous_range(count, place, size) for place in range(size)]
            assert [n for b, e in runs for n in range(b, e)] == list(range(count))


def test_entries_of_a_dict_have_no_order():
    x, y = np.arange(4.0), np.zeros(4)
    first, second = {"a": x, "b": [y, x]}, {"b": [y, x], "a": x}
    parts = [
        partition("f", data, None, None, 2, 0, 2).fingerprint
        for data in (first, second)
    ]
    assert parts[0] == parts[1]


class Sequence(keras.utils.PyDataset):
    def __init__(self, length):
        super().__init__()
        self.length = length

    def __getitem__(self, index):
        return np.full((2, 3), index, "float32")


class Finite(Sequence):
    def __len__(self):
        return self.length


class Endless(Sequence):
    @property
    def num_batches(self):
        return None


def generator():
    yield np.ones((2, 3))


ONES = np.ones((6, 3), "float32")
SOURCE = tf.data.Dataset.from_tensor_slices(ONES)


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        (ONES[:0], {}, ValueError, "at least one sample"),
        (SOURCE.take(0), {"batch_size": 2}, ValueError, "at least one sample"),
        (SOURCE.filter(lambda _: False).batch(2), {}, ValueError, "at least one"),
        (Finite(0), {}, ValueError, "at least one sample"),
        (Endless(3), {}, ValueError, "without a length"),
        (Finite(3), {"batch_size": 2}, ValueError, "Omit batch_size"),
        (SOURCE.repeat(), {"batch_size": 2}, ValueError, "infinite"),
        (SOURCE.shuffle(6), {"batch_size": 2}, ValueError, "shuffled"),
        (SOURCE.batch(2), {"batch_size": 2}, ValueError, "is batched"),
        (ONES, {"batch_size": 0}, ValueError, "integer of at least 1"),
        (ONES, {"batch_size": 2.0}, ValueError, "integer of at least 1"),
        (ONES, {"gather": "some"}, ValueError, "one of"),
        ([1.0, 2.0], {}, TypeError, "numpy.asarray"),
        (generator(), {}, TypeError, "from_generator"),
        (tf.sparse.from_dense(ONES), {}, TypeError, r"SparseTensor. .*_tensor_slices"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(data, options, error, text):
    with pytest.raises(error, match=text):
        tfdist.predict(compiled(), data, **options)


def test_what_was_dealt_out_before_is_refused():
    own = SOURCE.shard(2, 1).map(lambda x: x)
    for data, batch_size in ((own, 2), (own.batch(2), None)):
        with pytest.raises(ValueError, match="tfdist.evaluate, which distributes"):
            partition("tfdist.evaluate", data, None, None, batch_size, 1, 2)


def test_targets_of_another_length_or_beside_a_dataset_are_refused():
    with pytest.raises(ValueError, match=r"lengths 5 \(y\), 6 \(x\)"):
        tfdist.evaluate(compiled(), ONES, ONES[:5, :1])
    with pytest.raises(ValueError, match="Omit y"):
        tfdist.evaluate(compiled(), SOURCE, ONES[:, :1], batch_size=2)


def test_models_that_cannot_be_dealt_with_are_refused():
    keras.utils.clear_session()
    states = keras.Sequential(
        [keras.Input((2, 3), batch_size=2), keras.layers.SimpleRNN(1, stateful=True)]
    )
    with pytest.raises(ValueError, match="stateful"):
        tfdist.predict(states, np.ones((4, 2, 3), "float32"), batch_size=2)

    class Numbers(keras.Sequential):
        def test_step(self, data):
            return {"other": tf.constant(1.0)}

    model = Numbers([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(None, "mse", jit_compile=False)
    with pytest.raises(NotImplementedError, match="'other'"):
        tfdist.evaluate(model, ONES, ONES[:, :1], verbose=0)
    with pytest.raises(ValueError, match="compile"):
        tfdist.evaluate(keras.Sequential([keras.layers.Dense(1)]), ONES, ONES)


def test_outputs_that_cannot_be_sent_are_refused_or_stay_where_they_are():
    class Texts(keras.Model):
        def call(self, x):
            return tf.strings.as_string(x)

    model = Texts()
    model.compile(jit_compile=False)
    with pytest.raises(TypeError, match="string"):
        tfdist.predict(model, ONES, verbose=0)
    outputs, indices = tfdist.predict(model, ONES, verbose=0, gather="none")
    assert outputs.shape == (6, 3)
    assert indices.tolist() == list(range(6))


def test_the_batches_of_a_sequence_in_order():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(1.0)])
    found = tfdist.predict(model, Finite(5), verbose=0)
    assert found[:, 0].tolist() == [float(i // 2) for i in range(10)]


class Watched(Finite):
    """Its batches are known when an epoch begins."""

    def __init__(self):
        super().__init__(5)
        self.seen = []

    def on_epoch_begin(self):
        self.seen.append("begin")

    def on_epoch_end(self):
        self.seen.append("end")

    def __getitem__(self, index):
        x = super().__getitem__(index) * self.seen.count("begin")
        return x, x[:, :1]


def test_a_sequence_is_told_of_epochs_as_by_keras():
    model = compiled()
    ours, of_keras = Watched(), Watched()
    found = tfdist.evaluate(model, ours, verbose=0)
    assert found == model.evaluate(of_keras, verbose=0) > 0.0
    tfdist.predict(model, ours, verbose=0)
    model.predict(of_keras, verbose=0)
    assert ours.seen == of_keras.seen
    assert ours.seen.count("begin") == 2
