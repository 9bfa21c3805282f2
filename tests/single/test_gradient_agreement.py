"""Groups of gradients at size 1: what is described, made dense, and left out."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import signature
from tfdist.collectives.tf_ops import emit
from tfdist.core import native
from tfdist.gradients import reduction
from tfdist.gradients.options import ReduceOptions


@pytest.fixture(autouse=True)
def world_of_one():
    tfdist.init()


@pytest.fixture
def registered(monkeypatch):
    """Descriptions given to the core, in order."""
    seen = []
    original = native.register_gradient_list

    def note(description, present, **options):
        seen.append(description)
        return original(description, present, **options)

    monkeypatch.setattr(native, "register_gradient_list", note)
    return seen


def test_the_description_names_path_dtype_shape_and_options(registered):
    kernel = keras.Variable(np.zeros((2, 3), "float32"), name="kernel")
    bias = tf.Variable(np.zeros(3), name="bias")
    reduction.reduce_gradients(
        [tf.ones((2, 3)), None],
        [kernel, bias],
        ReduceOptions(name="tower"),
    )
    assert registered[0].splitlines() == [
        f"{kernel.path} float32 [2,3]",
        "bias:0 float64 [3]",
        "op=average compression=none sparse_as_dense=None name=tower "
        "by=operations eager",
    ]


def test_equal_groups_of_one_graph_are_told_apart_and_a_retrace_finds_them(registered):
    v = tf.Variable([1.0, 2.0], name="v")

    @tf.function
    def step(x):
        g = v * x
        return reduction.reduce_gradients([g], [v]) + reduction.reduce_gradients(
            [2 * g], [v]
        )

    step(tf.constant(1.0))
    step(tf.constant([1.0, 1.0]))  # traces again
    numbers = [d.rpartition("call=")[2].partition(" ")[0] for d in registered]
    assert numbers == ["0", "1"]


def test_gradients_that_no_rank_has_stay_none():
    v, w = tf.Variable(1.0), tf.Variable(2.0)
    assert reduction.reduce_gradients([None, None], [w, v]) == [None, None]
    v, w = tf.Variable(1.0, name="v"), tf.Variable(2.0, name="w")
    first, second = reduction.reduce_gradients([None, tf.constant(3.0)], [v, w])
    assert first is None
    assert float(second) == 3.0


@pytest.mark.parametrize("in_graph", [False, True])
def test_sparse_gradients_are_made_dense_with_duplicates_summed(in_graph, caplog):
    table = keras.Variable(np.zeros((4, 2), "float32"), name=f"table{in_graph}")

    def reduce():
        slices = tf.IndexedSlices(
            tf.ones((3, 2)), tf.constant([1, 1, 3]), tf.constant([4, 2])
        )
        return reduction.reduce_gradients([slices], [table])[0]

    with caplog.at_level("INFO", "tfdist"):
        dense = (tf.function(reduce) if in_graph else reduce)()
        reduce()
    assert dense.numpy().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    [record] = [r for r in caplog.records if table.path in r.getMessage()]
    assert "sparse" in record.getMessage()


def test_a_list_that_gets_another_name_in_each_step_is_warned_of_once(
    monkeypatch, caplog, init_with
):
    init_with()  # nothing is registered yet
    monkeypatch.setattr(signature, "_MANY_LISTS", 5)
    w = tf.Variable(1.0, name="w")
    for step in range(8):
        options = ReduceOptions(name=f"step {step}")
        reduction.reduce_gradients([tf.constant(2.0)], [w], options)
        reduction.reduce_gradients([tf.constant(2.0)], [w], options)
        said = [
            r.getMessage() for r in caplog.records if "all of them" in r.getMessage()
        ]
        assert len(said) == (step >= 4)


def test_one_operation_for_each_bucket_with_indices_of_the_list(monkeypatch, init_with):
    calls = []
    original = emit.allreduce

    def note(tensors, *arguments, **options):
        calls.append(options)
        return original(tensors, *arguments, **options)

    monkeypatch.setattr(emit, "allreduce", note)
    init_with(TFDIST_FIRST_BUCKET_BYTES="8192", TFDIST_BUCKET_BYTES="16384")
    variables = [tf.Variable(tf.fill([2048], float(i))) for i in range(5)]
    grads = [v * 2 for v in variables]
    grads[2] = None
    reduced = reduction.reduce_gradients(grads, variables)
    assert [options["tensor_indices"] for options in calls] == [(4,), (3, 1), (0,)]
    assert [options["bucket"] for options in calls] == [0, 1, 2]
    assert {options["bucket_count"] for options in calls} == {3}
    assert [g if g is None else float(g[0]) for g in reduced] == [0, 2, None, 6, 8]


@pytest.mark.parametrize(
    ("grads", "variables", "words"),
    [
        ([None], [], "1 gradients"),
        ([None], [tf.Variable([1.0], shape=[None])], "known shape"),
    ],
)
def test_wrong_arguments_are_refused(grads, variables, words):
    with pytest.raises(ValueError, match=words):
        reduction.reduce_gradients(grads, variables)


def test_reductions_that_are_not_for_gradients_are_refused():
    with pytest.raises(ValueError, match="AVERAGE, SUM or ADASUM"):
        ReduceOptions(tfdist.ReduceOp.MAX)


def test_before_init_the_error_says_what_to_call():
    tfdist.shutdown()
    try:
        with pytest.raises(tfdist.NotInitializedError, match="init"):
            reduction.reduce_gradients([tf.constant(1.0)], [tf.Variable(1.0)])
    finally:
        tfdist.init()


@pytest.mark.parametrize("others", ["by=operations", "by=xla"])
def test_ranks_of_which_some_reduce_in_xla_are_told_so(monkeypatch, others):
    def differ(*_, **__):
        message = f"rank 0 says op=average by=xla, rank 1 says op=sum {others}"
        raise native.CoreError(3, message, {"kind": "mismatch"})

    monkeypatch.setattr(native, "register_gradient_list", differ)
    kernel = keras.Variable(np.zeros(3, "float32"), name=f"kernel_{others[3:]}")
    with pytest.raises(tfdist.MismatchError) as caught:
        reduction.reduce_gradients([tf.ones(3)], [kernel])
    assert ("Only the ranks with by=xla" in str(caught.value)) == (
        others == "by=operations"
    )
