"""broadcast_object, allgather_object and broadcast_variables on several ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.collectives import objects


def share():
    rank, size = tfdist.rank(), tfdist.size()
    own = {"rank": rank, "text": "x" * rank, "shape": (rank, 2), "a": np.arange(rank)}
    gathered = tfdist.allgather_object(own)
    assert [g["rank"] for g in gathered] == list(range(size))
    assert [g["shape"] for g in gathered] == [(r, 2) for r in range(size)]
    assert [g["a"].tolist() for g in gathered] == [list(range(r)) for r in range(size)]
    for root in range(size):
        # Only the root's object is looked at.
        sent = tfdist.broadcast_object(own if rank == root else object(), root)
        assert sent["text"] == "x" * root
    return tfdist.broadcast_object(None, 0)


@pytest.mark.parametrize("size", [1, 3])
def test_objects_reach_all_ranks(size):
    assert run_ranks(share, size) == [None] * size


def refused_object(kind):
    own = [1, {2}] if kind == "kind" else b"x" * 100
    limits = {"max_bytes": 50} if kind == "bytes" else {}
    most = objects._HEADER_MAX_BYTES
    if kind == "header":
        objects._HEADER_MAX_BYTES = 60  # a small one, for those of 2 GiB
    obj = own if tfdist.rank() == 1 else 5
    errors = []
    for call in (
        lambda: tfdist.allgather_object(obj, **limits),
        lambda: tfdist.broadcast_object(obj, 1, **limits),
    ):
        try:
            call()
        except (TypeError, ValueError, tfdist.RankFailedError) as error:
            record = getattr(error, "record", None)
            errors.append([type(error).__name__, str(error), record and record.rank])
    objects._HEADER_MAX_BYTES = most
    # The world goes on.
    return [errors, tfdist.allgather_object(tfdist.rank())]


@pytest.mark.parametrize(
    ("kind", "own", "words"),
    [
        ("kind", "TypeError", "object[1]"),
        ("bytes", "ValueError", "at most 50 bytes"),
        ("header", "ValueError", "at most 60 bytes, whatever max_bytes is"),
    ],
)
def test_an_object_that_cannot_be_sent_is_an_error_on_all_ranks(kind, own, words):
    for rank, (errors, later) in enumerate(run_ranks(refused_object, 2, kind)):
        assert [e[0] for e in errors] == [own if rank == 1 else "RankFailedError"] * 2
        for _, message, culprit in errors:
            assert words in message
            assert culprit == (None if rank == 1 else 1)
        assert later == [0, 1]


def in_a_function():
    found = []
    for send in (tfdist.broadcast_object, tfdist.allgather_object):
        with pytest.raises(RuntimeError, match="call outside of the tf.func") as error:
            tf.function(lambda: send(1))()  # noqa: B023 - called at once
        found.append(send.__name__ in str(error.value))
    return [found, tfdist.allgather_object(tfdist.rank())]


def test_in_a_function_objects_are_refused():
    assert run_ranks(in_a_function, 2) == [[[True, True], [0, 1]]] * 2


def wrong_root():
    try:
        tfdist.broadcast_object(1, 2)
    except ValueError as error:
        return str(error)
    return ""


def test_a_root_that_is_no_rank_is_refused():
    assert run_ranks(wrong_root, 2) == ["Expected root to be in 0..1, got 2."] * 2


DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
] + ["int32", "int64", "uint32", "uint64", "bool", "complex64"]


def send_variables(root):
    rank = tfdist.rank()
    variables = [
        tf.Variable(tf.cast(tf.constant([rank, 1 - rank, 1]), dtype))
        for dtype in DTYPES
    ]
    scalar = keras.Variable(float(rank), name="scalar")
    empty = tf.Variable(tf.zeros([0, 3]))
    tfdist.broadcast_variables([*variables, scalar, empty], root=root)
    tfdist.broadcast_variables([], root=root)
    values = [tf.cast(v, tf.float64).numpy().tolist() for v in variables]
    return [values, float(scalar.numpy())]


@pytest.mark.parametrize("root", [0, 1])
def test_variables_of_all_dtypes_get_the_roots_values(root):
    for values, scalar in run_ranks(send_variables, 2, root):
        assert values == [[root, 1 - root, 1]] * len(DTYPES)
        assert scalar == root


def variables_of_open_shapes():
    own = [float(tfdist.rank()), 7.0]
    v = [tf.Variable(own, shape=tf.TensorShape(shape)) for shape in ([None], None)]
    tfdist.broadcast_variables(v, root=1)
    return [one.numpy().tolist() for one in v]


def test_variables_whose_shape_is_not_known_get_the_roots_values():
    assert run_ranks(variables_of_open_shapes, 2) == [[[1.0, 7.0]] * 2] * 2


def differing_variables():
    v = tf.Variable(tf.fill([2 + tfdist.rank()], float(tfdist.rank())), name="kernel")
    try:
        tfdist.broadcast_variables([v])
    except tfdist.MismatchError as error:
        return [str(error), v.numpy().tolist()]
    return None


def test_variables_that_differ_are_refused_before_any_is_changed():
    for rank, (message, values) in enumerate(run_ranks(differing_variables, 2)):
        assert "kernel" in message
        assert values == [float(rank)] * (2 + rank)


def unsendable(kind):
    text = tf.Variable("text") if kind == "string" else tf.constant(1.0)
    try:
        tfdist.broadcast_variables([text])
    except TypeError as error:
        return str(error)
    return ""


def test_what_is_no_numeric_variable_is_refused():
    assert "dtype string" in run_ranks(unsendable, 1, "string")[0]
    assert "EagerTensor" in run_ranks(unsendable, 1, "tensor")[0]


def model_of(dropout):
    keras.utils.set_random_seed(5)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(dropout)]
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def while_one_has_joined(names):
    """The errors while rank 1 is in join(); then the same calls on all ranks."""
    x, model = np.ones((6, 2), "float32"), model_of(0.5)
    start = tfdist.callbacks.BroadcastInitialState()
    calls = {
        "combine_moving_statistics": lambda: tfdist.layers.combine_moving_statistics(
            model
        ),
        "broadcast_seed_generators": lambda: tfdist.layers.broadcast_seed_generators(
            model
        ),
        "tfdist.evaluate": lambda: tfdist.evaluate(model, x, x[:, :1], verbose=0),
        "tfdist.predict": lambda: tfdist.predict(model, x, verbose=0),
        "tfdist.data.scatter": lambda: tfdist.data.scatter(
            tf.data.Dataset.range(6), readers=1
        ),
        "model.fit": lambda: model.fit(x, x[:, :1], verbose=0, callbacks=[start]),
    }
    found = []
    for name in names if tfdist.rank() != 1 else []:
        try:
            calls[name]()
        except tfdist.MismatchError as error:
            found.append([str(error), error.record.rank])
    latest = tfdist.join()
    for name in names:
        calls[name]()
    return found, latest


JOINED = ["combine_moving_statistics", "broadcast_seed_generators", "tfdist.evaluate"]
OTHERS = ["tfdist.predict", "tfdist.data.scatter", "model.fit"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(JOINED, id="some"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
def test_what_needs_all_ranks_says_at_once_that_one_has_joined(names):
    results = run_ranks(while_one_has_joined, 3, names)
    for rank, (found, latest) in enumerate(results):
        assert latest == 0
        assert len(found) == (0 if rank == 1 else len(names))
        for name, (message, culprit) in zip(names, found, strict=False):
            assert message.startswith(f"{name}: it needs every rank, and rank 1 has")
            assert "or after tfdist.join() has returned on all ranks" in message
            assert culprit == 1
