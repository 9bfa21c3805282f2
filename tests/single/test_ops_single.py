"""The operations at size 1, without a launcher: values, gradients, graphs, errors."""

import ctypes
import logging
import types

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import errors
from tfdist.collectives import ReduceOp, _arguments
from tfdist.collectives.tf_ops import call_order, op_library, op_names
from tfdist.collectives.tf_ops import emit as emit_module

REDUCIBLE = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
OTHERS = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "uint64", "complex64"]
SHAPES = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3, 4)]


@pytest.fixture(autouse=True, scope="module")
def _initialized():
    tfdist.init()
    yield
    tfdist.shutdown()


def numbers(shape, dtype):
    values = np.arange(int(np.prod(shape))).reshape(shape) % 7
    return tf.cast(tf.constant(values), dtype)


def same(a, b):
    assert a.dtype == b.dtype
    assert tuple(a.shape) == tuple(b.shape)
    assert np.asarray(a.numpy()).tobytes() == np.asarray(b.numpy()).tobytes()


@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("op", [op for op in ReduceOp if op <= ReduceOp.PRODUCT])
def test_allreduce_of_one_rank_is_the_identity(dtype, op):
    for shape in SHAPES:
        x = numbers(shape, dtype)
        same(tfdist.allreduce(x, op=op), x)


@pytest.mark.parametrize("dtype", REDUCIBLE + OTHERS)
def test_allgather_and_broadcast_of_one_rank_are_the_identity(dtype):
    for shape in SHAPES:
        x = numbers(shape, dtype)
        same(tfdist.broadcast(x), x)
        same(tfdist.allgather(x), tf.reshape(x, (1,)) if shape == () else x)


@pytest.mark.parametrize("dtype", REDUCIBLE + OTHERS)
def test_what_moves_rows_is_the_identity_of_one_rank(dtype):
    for shape in SHAPES:
        x = numbers(shape, dtype)
        expected = tf.reshape(x, (1,)) if shape == () else x
        same(tfdist.gather(x), expected)
        same(tfdist.scatter(x), expected)
        rows, received = tfdist.alltoall(x)
        same(rows, expected)
        assert received.numpy().tolist() == [expected.shape[0]]


@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_reduce_and_reduce_scatter_of_one_rank_are_the_identity(dtype):
    for shape in SHAPES:
        x = numbers(shape, dtype)
        same(tfdist.reduce(x, op=ReduceOp.SUM), x)
        expected = tf.reshape(x, (1,)) if shape == () else x
        same(tfdist.reduce_scatter(x, op=ReduceOp.SUM), expected)


def test_inputs_may_be_numbers_arrays_and_variables():
    import keras

    assert float(tfdist.allreduce(2.5)) == 2.5
    assert tfdist.allreduce(np.array([1, 2])).dtype == tf.int64
    assert tfdist.broadcast(tf.Variable([3.0])).numpy().tolist() == [3.0]
    assert tfdist.allgather(keras.Variable([1.0, 2.0])).numpy().tolist() == [1.0, 2.0]


def test_scales_arrive_as_float64():
    x = tf.constant([1.0], tf.float64)
    third = 1.0 / 3.0  # not a float32
    assert float(tfdist.allreduce(x, prescale=third)[0]) == third
    assert float(tfdist.allreduce(x, postscale=third)[0]) == third
    assert float(tfdist.allreduce(x, prescale=2.0, postscale=1e-300)[0]) == 2e-300


def test_the_input_keeps_its_value():
    x = tf.constant([1.0, 2.0])
    tfdist.allreduce(x, prescale=10.0)
    assert x.numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda x: tfdist.allreduce(tf.IndexedSlices(x, tf.constant([0, 1]))),
            TypeError,
            "tf.convert_to_tensor",
        ),
        (
            lambda x: tfdist.allgather(tf.RaggedTensor.from_row_lengths(x, [2, 0])),
            TypeError,
            r"got tf.RaggedTensor. Make it dense first \(value.to_tensor\(\)\)",
        ),
        (
            lambda x: tfdist.allreduce(tf.sparse.from_dense(x)),
            TypeError,
            "got tf.SparseTensor.*tf.sparse.to_dense",
        ),
        (lambda x: tfdist.allreduce("hello"), TypeError, "allgather_object"),
        (lambda x: tfdist.allgather(["a", "b"]), TypeError, "got string"),
        (
            lambda x: tfdist.allreduce([x, tf.ones([3])]),
            ValueError,
            r"tfdist.grouped_allreduce\(tensors\)",
        ),
        (lambda x: tfdist.broadcast([x, tf.ones([3])]), ValueError, "one after"),
        (lambda x: tfdist.allreduce(True), TypeError, "bool takes.*tf.int32"),
        (
            lambda x: tfdist.grouped_allreduce([x, True]),
            TypeError,
            "tfdist.grouped_allreduce: .*got average",
        ),
        (
            lambda x: tfdist.allreduce(x, op=ReduceOp.LOGICAL_OR),
            TypeError,
            "float32 takes.*got logical_or.*tf.bool",
        ),
        (
            lambda x: tfdist.allreduce(tf.cast(x, "float8_e4m3fn")),
            TypeError,
            "got float8_e4m3fn.*tf.bfloat16",
        ),
        (lambda x: tfdist.broadcast(tf.cast(x, tf.qint8)), TypeError, "got qint8"),
        (
            lambda x: tfdist.allreduce(True, op=ReduceOp.MAX, postscale=2.0),
            ValueError,
            "postscale=1 for bool",
        ),
        (lambda x: tfdist.broadcast("a"), TypeError, "broadcast_object"),
        (lambda x: tfdist.allreduce(1, prescale=0.5), ValueError, "prescale=1"),
        (lambda x: tfdist.allreduce(1, postscale=2.0), ValueError, "postscale=1"),
        (lambda x: tfdist.allreduce(x, prescale=np.nan), ValueError, "finite"),
        (lambda x: tfdist.allreduce(x, op=9), ValueError, "got 9"),
        (
            lambda x: tfdist.allreduce(x, op="sum"),
            ValueError,
            "tfdist.ReduceOp.SUM, .*tfdist.ReduceOp.ADASUM, got 'sum'",
        ),
        (lambda x: tfdist.allreduce(x, timeout_s=0), ValueError, "timeout_s"),
        *(
            (
                lambda x, wrong=wrong: tfdist.add_process_set([0], timeout_s=wrong),
                ValueError,
                f"Expected timeout_s to be a number of seconds > 0, got {wrong!r}",
            )
            for wrong in ("x", True, np.nan, np.inf, -1.0, 0)
        ),
        (
            lambda x: tfdist.remove_process_set(
                tfdist.add_process_set([0]), timeout_s="x"
            ),
            ValueError,
            "Expected timeout_s to be a number of seconds > 0, got 'x'",
        ),
        (lambda x: tfdist.broadcast(x, -1), ValueError, "root"),
        (lambda x: tfdist.broadcast(x, True), ValueError, "root"),
        (
            lambda x: tfdist.broadcast(x, 7),
            tf.errors.InvalidArgumentError,
            r'^"broadcast.eager": the root is not valid: rank 0: .* in \[0, 1\), got 7',
        ),
        (lambda x: tfdist.gather(x, -1), ValueError, "root"),
        (lambda x: tfdist.scatter(x, 1.0), ValueError, "root"),
        (lambda x: tfdist.reduce(x, "0"), ValueError, "root"),
        (
            lambda x: tfdist.reduce(x, 1),
            tf.errors.InvalidArgumentError,
            r"root must be in \[0, 1\), got 1",
        ),
        (lambda x: tfdist.reduce(True), TypeError, "that bool takes .*got average"),
        (lambda x: tfdist.reduce_scatter(1, prescale=2.0), ValueError, "prescale=1"),
        (lambda x: tfdist.reduce_scatter(x, op=99), ValueError, "got 99"),
        (lambda x: tfdist.alltoall(x, [0.5, 1.5]), ValueError, "vector of integers"),
        (lambda x: tfdist.alltoall(x, 2), ValueError, "vector of integers, .* got 2"),
        (lambda x: tfdist.alltoall(x, []), ValueError, "Omit splits"),
        (lambda x: tfdist.scatter(x, 0, [[2]]), ValueError, "vector of integers"),
        (lambda x: tfdist.reduce_scatter(x, tf.ones([1])), ValueError, "of integers"),
        (lambda x: tfdist.alltoall("a"), TypeError, "broadcast_object"),
        (
            lambda x: tfdist.scatter(x, 0, [1, 1]),
            tf.errors.InvalidArgumentError,
            r"splits \[1,1\] have length 2, expected 1",
        ),
        (lambda x: tfdist.send(x, -1), ValueError, "dst"),
        (
            lambda x: tfdist.send(x, 0),
            tf.errors.InvalidArgumentError,
            "two different ranks",
        ),
        (lambda x: tfdist.recv([2], tf.string, 0), TypeError, "got string"),
        (lambda x: tfdist.recv([None, 2], tf.int32, 0), ValueError, "unknown dim"),
        (lambda x: tfdist.recv(3, tf.int32, 0), ValueError, "list of integers"),
        (lambda x: tfdist.recv([2], tf.int32, True), ValueError, "src"),
        (
            lambda x: tfdist.recv([-2], tf.int32, 1),
            tf.errors.InvalidArgumentError,
            "-2",
        ),
    ],
)
def test_a_bad_argument_is_an_error_that_names_it(call, error, words):
    with pytest.raises(error, match=words):
        call(tf.constant([1.0, 2.0]))


def test_grouped_allreduce_keeps_order_and_splits_by_dtype(monkeypatch):
    seen = []
    emit = emit_module.allreduce

    def spy(values, name, *args, **kwargs):
        seen.append(
            (name, [v.dtype.name for v in values], list(kwargs["tensor_indices"]))
        )
        return emit(values, name, *args, **kwargs)

    monkeypatch.setattr(emit_module, "allreduce", spy)
    xs = [tf.constant([1.0]), tf.constant(2), tf.constant([3.0]), tf.constant(4)]
    ys = tfdist.grouped_allreduce(xs, name="g")
    for x, y in zip(xs, ys, strict=True):
        same(x, y)
    assert seen == [
        ("g", ["float32"] * 2, [0, 2]),
        ("g[1]", ["int32"] * 2, [1, 3]),
    ]
    assert tfdist.grouped_allreduce([]) == []


@pytest.mark.parametrize(
    "limit, expected",
    [("0", [[0], [1], [2], [3]]), ("8", [[0, 1], [2], [3]]), ("400", [[0, 1, 2, 3]])],
)
def test_a_group_is_cut_at_the_fusion_threshold(
    monkeypatch, init_with, limit, expected
):
    xs = [tf.zeros([1]), tf.zeros([1]), tf.zeros([3]), tf.zeros([0])]
    whole = _arguments.batches_of(xs)
    monkeypatch.setenv("TFDIST_FUSION_BYTES", limit)
    assert _arguments.batches_of(xs) == whole  # the other ranks do not know of it
    init_with(TFDIST_FUSION_BYTES=limit)
    assert _arguments.batches_of(xs) == expected


# ---- in a tf.function ----


def forward_and_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        a, b = tfdist.grouped_allreduce([x, 2 * x])
        y = (
            tf.reduce_sum(tfdist.allreduce(x, prescale=0.5, postscale=3.0) ** 2)
            + tf.reduce_sum(a * b)
            + tf.reduce_sum(tfdist.allgather(x) ** 3)
            + tf.reduce_sum(tfdist.broadcast(x))
        )
    return y, tape.gradient(y, x)


@pytest.mark.parametrize(
    ("shape", "compiled"),
    [
        *(((), False), ((4,), False), ((3, 2), False), ((3, 2), True)),
        *(pytest.param(s, True, marks=pytest.mark.slow) for s in ((), (4,))),
    ],
)
def test_gradients_at_size_one_are_those_of_the_identity(shape, compiled):
    x = tf.cast(numbers(shape, "float64"), tf.float64) + 1
    function = tf.function(forward_and_gradient) if compiled else forward_and_gradient
    y, gradient = function(x)
    np.testing.assert_allclose(y, np.sum(2.25 * x**2 + 2 * x**2 + x**3 + x), rtol=1e-14)
    np.testing.assert_allclose(gradient, 4.5 * x + 4 * x + 3 * x**2 + 1, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64"])
def test_logical_operations_of_one_rank_give_zeros_and_ones(dtype):
    x = tf.cast(tf.constant([0, 1, 2, 5]), dtype)
    for op in (ReduceOp.LOGICAL_AND, ReduceOp.LOGICAL_OR, ReduceOp.LOGICAL_XOR):
        same(tfdist.allreduce(x, op=op), tf.cast(tf.constant([0, 1, 1, 1]), dtype))


def test_the_gradient_of_complex_numbers_is_scaled_like_the_value():
    x = tf.constant([1 + 2j, 3 - 1j], tf.complex64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tfdist.allreduce(x, op=ReduceOp.SUM, prescale=0.5, postscale=3.0)
        loss = tf.reduce_sum(tf.abs(y) ** 2)
    assert y.numpy().tolist() == [1.5 + 3j, 4.5 - 1.5j]
    np.testing.assert_allclose(tape.gradient(loss, x), 2 * 1.5**2 * x, rtol=1e-6)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("name", ["allreduce", "reduce", "reduce_scatter"])
def test_the_gradient_of_other_operations_is_an_error_that_says_what_to_do(op, name):
    x = tf.constant([1.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = getattr(tfdist, name)(x, op=op)
    with pytest.raises(ValueError, match=f" {name} .*{op.name}.*SUM or AVERAGE"):
        tape.gradient(y, x)


def test_static_shapes_are_known_while_tracing():
    shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([])])
    def f(matrix, scalar):
        shapes["allreduce"] = tfdist.allreduce(matrix).shape.as_list()
        shapes["broadcast"] = tfdist.broadcast(scalar).shape.as_list()
        shapes["gather"] = tfdist.gather(matrix).shape.as_list()
        shapes["alltoall"] = [t.shape.as_list() for t in tfdist.alltoall(matrix)]
        shapes["rows"] = tfdist.allgather(tf.ensure_shape(matrix, [2, 3])).shape
        shapes["scalars"] = tfdist.allgather(scalar).shape.as_list()
        return scalar

    f(tf.zeros([2, 3]), tf.zeros([]))
    assert shapes["allreduce"] == [None, 3]
    assert shapes["broadcast"] == []
    assert shapes["rows"].as_list() == [None, 3]
    assert shapes["scalars"] == [None]
    assert shapes["gather"] == [None, 3]
    assert shapes["alltoall"] == [[None, 3], [None]]


def test_the_shape_that_is_received_is_known_while_tracing():
    @tf.function
    def f(rows):
        fixed = tfdist.recv([2, 3], tf.bool, 1)
        partly = tfdist.recv([rows, 3], tf.float32, 1)
        return fixed, partly, tfdist.send(fixed, 1)

    fixed, partly, sent = f.get_concrete_function(tf.constant(2)).outputs
    assert fixed.shape == [2, 3] and fixed.dtype == tf.bool
    assert partly.shape.as_list() == [None, 3]
    assert sent.shape == []


def test_in_a_while_loop_every_iteration_runs():
    @tf.function
    def f(x):
        for i in tf.range(5):
            x = tfdist.allreduce(x) + tf.cast(i, tf.float32)
        return x

    assert float(f(tf.constant(1.0))) == 11.0


def outputs():
    counted = (ctypes.c_int64 * 2)()
    op_library.ops()
    library = ctypes.CDLL(str(op_library.LIBRARY_PATH))
    library.tfdist_tf_outputs(counted)
    return list(counted)


def test_in_a_function_results_take_over_the_memory_of_intermediates():
    @tf.function
    def f(x):
        return tfdist.allreduce(x * 2.0), tfdist.broadcast(x * 3.0)

    x = tf.ones([1000])
    f(x)
    before = outputs()
    for _ in range(10):
        f(x)
    in_place, total = np.subtract(outputs(), before)
    assert total == 20
    assert in_place >= 18
    assert x.numpy().tolist() == [1.0] * 1000


# ---- names ----


def attributes(function, *args):
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    named = [n for n in nodes if "tensor_name" in n.attr]
    return sorted(n.attr["tensor_name"].s.decode() for n in named)


def test_names_are_the_same_at_every_trace():
    def build():
        @tf.function
        def inner(x):
            return tfdist.allreduce(x)

        @tf.function
        def step(x):
            y = tfdist.allreduce(x) + tfdist.allreduce(x)
            for _ in tf.range(2):
                y += tfdist.allreduce(y)
            for _ in tf.range(2):
                y += tfdist.allreduce(y)
            return inner(y), tfdist.broadcast(x, name="mine"), tfdist.barrier()

        return step

    step = build()
    names = attributes(step, tf.constant(1.0))
    assert names == [
        "mine",
        "step/allreduce.0",
        "step/allreduce.1",
        "step/barrier.0",
        "step/inner/allreduce.0",
        "step/while_body.1/allreduce.0",
        "step/while_body/allreduce.0",
    ]
    assert attributes(step, tf.constant([1.0])) == names
    assert attributes(build(), tf.constant(1.0)) == names


def test_a_name_used_twice_in_a_function_is_made_unique():
    @tf.function
    def f(x):
        return tfdist.allreduce(x, name="a"), tfdist.allreduce(x, name="a")

    assert attributes(f, tf.constant(1.0)) == ["a", "a.1"]


def test_eager_calls_share_one_name_for_each_kind():
    assert op_names.operation_name("allreduce", None) == "allreduce.eager"
    assert op_names.operation_name("allreduce", "mine") == "mine"


# ---- the list that keeps operations out of the automatic order ----


def test_tensorflow_still_has_the_list_of_unordered_stateful_operations():
    from tensorflow.python.framework import auto_control_deps

    op_library.ops()
    assert (
        op_library.UNORDERED_OPS
        <= auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS
    )
    assert "TfdistBarrier" not in op_library.UNORDERED_OPS
    ours = {name for name in dir(op_library.ops()) if name.startswith("Tfdist")}
    # No collectives: these read files and variables.
    ours -= {"TfdistIndexRecords", "TfdistReadRecords", "TfdistReadVariables"}
    assert ours - op_library.UNORDERED_OPS == {"TfdistBarrier"}


def test_tensorflow_still_chains_calls_by_their_scopes_of_collectives():
    from tensorflow.python.framework import auto_control_deps

    op_library.ops()

    @tf.function
    def reduces(x):
        return tfdist.allreduce(x)

    @tf.function
    def train(x):
        return tf.cond(x[0] > 0, lambda: reduces(x), lambda: x)

    outer = tf.function(lambda x: (train(x), train(x)))
    graph = outer.get_concrete_function(tf.TensorSpec([1])).graph
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    scopes = [set(auto_control_deps.collective_manager_ids_from_op(op)) for op in calls]
    assert len(calls) == 2 and scopes[0] == scopes[1] != set()


def test_without_scopes_of_collectives_there_is_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        call_order.chain_calls(types.SimpleNamespace())
    (record,) = caplog.records
    assert "one of them twice" in record.getMessage()


def test_without_that_list_there_is_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        op_library.release_from_order(types.SimpleNamespace())
    (record,) = caplog.records
    assert "do not overlap" in record.getMessage()


# ---- errors ----


def test_before_init_every_operation_says_what_to_call():
    tfdist.shutdown()
    try:
        x = tf.constant([1.0])
        for call in (
            tfdist.allreduce,
            tfdist.allgather,
            tfdist.broadcast,
            tfdist.reduce,
            tfdist.reduce_scatter,
            tfdist.gather,
            tfdist.scatter,
            tfdist.alltoall,
            lambda x: tfdist.send(x, 1),
            lambda _: tfdist.recv([2], tf.float32, 1),
            lambda _: tfdist.barrier(),
            lambda x: tfdist.grouped_allreduce([x]),
        ):
            with pytest.raises(tfdist.NotInitializedError, match="tfdist.init()"):
                call(x)
    finally:
        tfdist.init()


def test_in_a_function_the_error_of_tensorflow_becomes_ours():
    @tf.function
    def f(x):
        return tfdist.allreduce(x)

    tfdist.shutdown()
    try:
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            f(tf.constant([1.0]))
        ours = errors.from_tf(caught.value)
        assert isinstance(ours, tfdist.NotInitializedError)
        assert ours.record.kind == "not_initialized"
        assert "tfdist.init()" in ours.message
        assert "node" not in ours.message  # of the graph
        assert errors.from_tf(ours) is ours
    finally:
        tfdist.init()


def test_an_error_that_is_not_ours_has_no_class_of_ours():
    assert errors.from_tf(ValueError("x")) is None
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(tf.zeros([2]), [3])
    assert errors.from_tf(caught.value) is None


@pytest.mark.parametrize(
    "kind, cls, base",
    [
        ("mismatch", "MismatchError", tf.errors.FailedPreconditionError),
        ("rank_failed", "RankFailedError", tf.errors.AbortedError),
        ("shutdown", "RankFailedError", tf.errors.AbortedError),
        ("threads", "ThreadError", tf.errors.FailedPreconditionError),
        ("timeout", "TimeoutError", tf.errors.DeadlineExceededError),
        ("not_initialized", "NotInitializedError", tf.errors.FailedPreconditionError),
    ],
)
def test_the_kind_of_a_record_decides_the_class(kind, cls, base):
    from tfdist.core.native import CoreError

    payload = {"kind": kind, "rank": 3, "host": "h", "cause": "c", "later": 1}
    error = errors.from_core(CoreError(10, "rank 3 is gone", payload))
    assert type(error).__name__ == cls
    assert isinstance(error, base)
    assert error.record == errors.ErrorRecord(kind, rank=3, host="h", cause="c")
    assert str(error) == "rank 3 is gone"
    assert repr(error) == f"{cls}('rank 3 is gone')"


def test_a_core_error_without_a_class_of_ours_is_tensorflows():
    from tfdist.core.native import CoreError

    error = errors.from_core(CoreError(3, "no rank 9", {"kind": "invalid_argument"}))
    assert type(error) is tf.errors.InvalidArgumentError


def test_a_function_compiled_by_xla_is_refused_when_it_is_traced():
    @tf.function(jit_compile=True)
    def step(x):
        return tfdist.allreduce(x)

    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        step(tf.ones([2]))


def summed(i):
    return tfdist.allreduce(tf.cast(i, tf.float32))


@tf.function
def summed_if_even(i):
    return tf.cond(i % 2 == 0, lambda: summed(i), lambda: 0.0)


@pytest.mark.parametrize("calls", [2, tf.data.AUTOTUNE])
@pytest.mark.parametrize(
    "use",
    [
        lambda data, calls: data.map(summed, num_parallel_calls=calls),
        lambda data, calls: data.map(
            lambda i: summed_if_even(i + 1), num_parallel_calls=calls
        ),
        lambda data, calls: data.interleave(
            lambda i: tf.data.Dataset.from_tensors(summed(i)), num_parallel_calls=calls
        ),
        lambda data, calls: data.interleave(
            lambda i: tf.data.Dataset.range(i).map(summed), num_parallel_calls=calls
        ),
    ],
)
def test_functions_that_are_called_for_several_elements_at_once_are_refused(use, calls):
    with pytest.raises(ValueError, match="Omit num_parallel_calls"):
        use(tf.data.Dataset.range(4), calls)


def test_functions_that_are_called_one_after_the_other_are_not():
    data = tf.data.Dataset.range(4).map(summed).map(summed, num_parallel_calls=1)
    data = data.filter(lambda x: summed(x) > 0.0).batch(3)
    data = data.map(lambda x: 2.0 * x, num_parallel_calls=2)
    assert [x.numpy().tolist() for x in data] == [[2.0, 4.0, 6.0]]
