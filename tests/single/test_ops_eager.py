"""Eager allreduces that come again: what was checked for one holds for no other."""

import dataclasses
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import ReduceOp, _arguments
from tfdist.collectives.tf_ops import emit
from tfdist.core import runtime

X = tf.constant([1.0, -2.0, 0.5])


@pytest.fixture(autouse=True, scope="module")
def _initialized():
    tfdist.init()
    for _ in range(2):
        tfdist.allreduce(X)
    yield
    if tfdist.is_initialized():
        tfdist.shutdown()


def bits(tensor):
    return tensor.dtype, np.asarray(tensor.numpy()).tobytes()


def test_a_call_that_comes_again_is_not_checked_again(monkeypatch):
    tfdist.allreduce(X, op=ReduceOp.MAX, name="again", timeout_s=30.0)
    monkeypatch.setattr(emit, "check_reducible", None)
    monkeypatch.setattr(_arguments, "check_reducible", None)
    again = tfdist.allreduce(X, op=ReduceOp.MAX, name="again", timeout_s=30.0)
    assert bits(again) == bits(X)
    with pytest.raises(TypeError):  # nobody can check it now
        tfdist.allreduce(X, op=ReduceOp.MAX, name="another", timeout_s=30.0)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"op": True}, ValueError, "Expected op to be one of"),
        ({"op": 1.0}, ValueError, "Expected op to be one of"),
        ({"op": "AVERAGE"}, ValueError, "Expected op to be one of"),
        ({"op": [ReduceOp.AVERAGE]}, ValueError, "Expected op to be one of"),
        ({"op": ReduceOp.LOGICAL_OR}, TypeError, "tfdist.allreduce: .*float32"),
        ({"timeout_s": 0}, ValueError, "Expected timeout_s to be a number"),
        ({"timeout_s": True}, ValueError, "Expected timeout_s to be a number"),
        ({"timeout_s": [1.0]}, ValueError, "Expected timeout_s to be a number"),
        ({"prescale": float("nan")}, ValueError, "Expected a finite prescale"),
        ({"postscale": float("inf")}, ValueError, "Expected a finite postscale"),
        ({"process_set": 0}, TypeError, "Expected process_set to be a"),
    ],
)
def test_what_equals_a_known_call_is_still_refused(wrong, error, words):
    tfdist.allreduce(X, timeout_s=1.0)
    for _ in range(2):
        with pytest.raises(error, match=words):
            tfdist.allreduce(X, **wrong)


def test_factors_are_never_those_of_another_call():
    assert tfdist.allreduce(X, prescale=2.0).numpy().tolist() == [2.0, -4.0, 1.0]
    assert tfdist.allreduce(X, postscale=0.5).numpy().tolist() == [0.5, -1.0, 0.25]
    for zero in (-0.0, 0.0):  # by NumPy: TensorFlow keeps one constant for both
        found = tfdist.allreduce(X, prescale=zero).numpy()
        assert found.tobytes() == (X.numpy() * np.float32(zero)).tobytes()
    assert bits(tfdist.allreduce(X, prescale=1, postscale=True)) == bits(X)


def test_dtypes_and_shapes_are_told_apart():
    for dtype in (tf.float32, tf.float64, tf.int32, tf.bfloat16):
        for shape in ((), (3,), (2, 2)):
            x = tf.ones(shape, dtype)
            assert bits(tfdist.allreduce(x, op=ReduceOp.SUM)) == bits(x)
            assert tfdist.allreduce(x, op=ReduceOp.SUM).shape == shape


def test_a_tape_records_a_call_that_comes_again():
    x = tf.constant([3.0])
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tfdist.allreduce(x * x, op=ReduceOp.SUM)
        assert tape.gradient(loss, x).numpy().tolist() == [6.0]


def test_derivatives_of_a_call_with_a_name_and_factors():
    x = tf.constant([3.0])
    options = {"op": ReduceOp.SUM, "name": "of two words", "prescale": 0.5}

    def half_square():
        return tfdist.allreduce(x * x, **options)

    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0])) as forward:
        y = half_square()
    assert forward.jvp(y).numpy().tolist() == [3.0]
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = half_square()
        slope = tape.gradient(y, x)
    assert slope.numpy().tolist() == [3.0]
    assert outer.gradient(slope, x).numpy().tolist() == [1.0]

    @tf.function
    def slope_of_an_eager_call():
        return tape.gradient(y, x)

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = half_square()
    assert slope_of_an_eager_call().numpy().tolist() == [3.0]


def test_a_name_is_a_text():
    with pytest.raises(TypeError):
        tfdist.allreduce(X, name=5)


def test_within_a_function_the_same_call_is_traced():
    @tf.function
    def function(x):
        return tfdist.allreduce(x) + tfdist.allreduce(X)  # an eager tensor, captured

    graph = function.get_concrete_function(X).graph
    names = [n for n in graph.get_operations() if n.type == "TfdistAllreduce"]
    assert [n.get_attr("tensor_name") for n in names] == [
        b"function/allreduce.0",
        b"function/allreduce.1",
    ]
    assert function(X).numpy().tolist() == [2.0, -4.0, 1.0]


def test_what_is_no_tensor_is_converted_each_time():
    for value in ([1.0, 2.0], np.float32([1.0, 2.0]), tf.Variable([1.0, 2.0])):
        for _ in range(2):
            assert tfdist.allreduce(value).numpy().tolist() == [1.0, 2.0]


# ---- last: it ends the world ----


def test_after_the_end_a_known_call_says_that_init_is_missing():
    tfdist.shutdown()
    with pytest.raises(tfdist.NotInitializedError):
        tfdist.allreduce(X)
    tfdist.init()
    assert bits(tfdist.allreduce(X)) == bits(X)


def test_a_newcomer_that_rehearses_is_the_root_of_its_operations(monkeypatch):
    """It has the rank and size that it may get, but is the only rank of its engine."""
    tfdist.init()
    topology = dataclasses.replace(runtime.check_initialized(), rank=1, size=3)
    monkeypatch.setattr(runtime.state, "topology", topology)
    monkeypatch.setattr(runtime.state, "rehearses", True)
    x = tf.constant([1.0, 2.0])
    for call in (tfdist.broadcast, tfdist.reduce, tfdist.gather, tfdist.scatter):
        assert call(x, root=2).numpy().tolist() == [1.0, 2.0]
    variable = tf.Variable(3.0)
    tfdist.broadcast_variables([variable], root=1)
    assert float(variable) == 3.0


def test_a_locale_with_a_decimal_comma_changes_no_number(tmp_path):
    """Programs and libraries (Qt, for example) set the locale of the user."""
    name = "de_DE.UTF-8"
    made = ["localedef", "--no-archive", "-i", "de_DE", "-f", "UTF-8", tmp_path / name]
    if not shutil.which("localedef") or subprocess.run(made).returncode != 0:
        pytest.skip("a locale cannot be made (Debian's package locales)")
    program = (
        f"import locale; locale.setlocale(locale.LC_ALL, {name!r})\n"
        "import tensorflow as tf, tfdist; tfdist.init()\n"
        "x = tfdist.allreduce(tf.constant([1.0]), prescale=0.5)\n"
        "print(f'{locale.str(0.5)} {x.numpy()[0]}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LOCPATH": str(tmp_path)},
        **{"capture_output": True, "text": True, "timeout": 60},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0,5 0.5"
