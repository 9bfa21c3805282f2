"""Options that Horovod's tapes and optimizers have in common are the same in all."""

import warnings

import keras
import pytest
import tensorflow as tf

import tfdist.horovod.keras as hvd_keras
import tfdist.horovod.tensorflow as hvd
from tfdist.horovod.tensorflow._groups import groups_of

WRAPPERS = {
    "tape": lambda **o: hvd.DistributedGradientTape(tf.GradientTape(), **o),
    "partial tape": lambda **o: hvd.PartialDistributedGradientTape(
        tf.GradientTape(), **o
    ),
    "optimizer of TensorFlow 1": lambda **o: hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.5), **o
    ),
    "optimizer of Keras": lambda **o: hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.5), **o
    ),
    "horovod.keras": lambda **o: hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.5), **o
    ),
    "partial optimizer": lambda **o: hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.5), **o
    ),
}
WRONG = [
    ({"op": hvd.Max}, ValueError, "only supports Average and Sum"),
    (
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        *(ValueError, "not supported with op != Average"),
    ),
    *(({"groups": wrong}, ValueError, "number > 0") for wrong in (0, -1, "all", True)),
    ({"num_groups": -1}, ValueError, "number > 0"),
    ({"groups": [[3]]}, TypeError, "lists of variables"),
    ({"compression": object()}, TypeError, "Compression.fp16"),
    ({"compression": "fp8"}, ValueError, "bf16"),
    ({"process_set": [0]}, TypeError, "ProcessSet"),
]
RIGHT = [
    {"groups": 2},
    {"groups": [[], []]},
    {"compression": hvd.Compression.fp16},
    {"compression": "bf16"},
    {"op": hvd.Sum},
    {"gradient_predivide_factor": 2.0, "scale_local_gradients": False},
    {"sparse_as_dense": True},
]


@pytest.fixture(autouse=True)
def world():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.filterwarnings("ignore:num_groups:DeprecationWarning")
def test_wrong_options_are_refused_alike(wrap):
    for options, kind, words in WRONG:
        with pytest.raises(kind, match=words):
            wrap(**options)
    for options in RIGHT:
        wrap(**options)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_num_groups_is_told_with_the_line_of_the_script(wrap):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        wrap(num_groups=2)
    told = [w for w in caught if "groups=2" in str(w.message)]
    assert [w.filename for w in told] == [__file__]


@pytest.mark.parametrize("name", ["partial tape", "partial optimizer"])
def test_local_layers_are_layers(name):
    for wrong in ([1], "layer", tf.Variable(1.0), [[keras.layers.Dense(1)]]):
        with pytest.raises(ValueError, match="a layer or a list of layers"):
            WRAPPERS[name](local_layers=wrong)
    WRAPPERS[name](local_layers=(keras.layers.Dense(1),))


def test_an_optimizer_of_keras_gets_all_options():
    with pytest.warns(DeprecationWarning):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.5),
            name="mine",
            compression=hvd.Compression.fp16,
            sparse_as_dense=True,
            gradient_predivide_factor=4.0,
            backward_passes_per_step=3,
            num_groups=2,
        )
    options = optimizer.tfdist_options
    assert (options.name, options.compression) == ("mine", "fp16")
    assert options.sparse_as_dense and options.gradient_predivide_factor == 4.0
    assert options.manual_buckets.describe([]) == "2"
    assert optimizer.gradient_accumulation_steps == 3
    summing = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), op=hvd.Sum)
    assert summing.tfdist_options.op.name == "SUM"


def test_groups_leave_out_what_has_no_gradient_and_take_the_first_of_two():
    a, b, c, d = (tf.Variable([0.0], name=name) for name in "abcd")
    groups = groups_of([[a, d], [b, a], [c]], 0)
    assert groups.places([a, b], [4, 4]) == [[0], [1]]
    assert groups.places([c, a, b], [4, None, 4]) == [[2], [0]]
    assert groups.describe([a, b, c]) == "0,1,2"
    assert groups_of(None, 0) is None


def test_a_compressor_of_the_users_own_is_for_tapes():
    class Mine(hvd.Compression.fp16):
        """One with methods of its own."""

    for name, wrap in WRAPPERS.items():
        if "tape" in name or "TensorFlow 1" in name:
            wrap(compression=Mine)
            continue
        with pytest.raises(ValueError, match="DistributedGradientTape"):
            wrap(compression=Mine)


def test_horovod_keras_takes_an_op_or_the_sum():
    with pytest.raises(ValueError, match="supersedes average"):
        hvd_keras.allreduce(1.0, average=False, op=hvd.Max)
    assert float(hvd_keras.allreduce(2.0, average=None)) == 2.0
