"""Errors of collectives in layers: Keras recreates those that it adds arguments to."""

import copy

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist import errors
from tfdist.collectives.tf_ops.xla_context import InsideXlaError
from tfdist.core import exit_report
from tfdist.elastic import sharing

PAYLOADS = {b"tfdist.error": b'{"kind": "rank_failed", "rank": 1, "message": "died"}'}


class Calling(keras.layers.Layer):
    """A layer that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


class Around(keras.layers.Layer):
    """A layer around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def raised_in_layers(function):
    """The exception that leaves two nested eager layers."""
    layer = Around(Calling(function))
    layer.built = layer.inner.built = True
    with pytest.raises(Exception) as caught:
        layer(tf.ones([2]))
    return caught.value


@pytest.fixture
def shut_down():
    was_initialized = tfdist.is_initialized()
    tfdist.shutdown()
    yield
    if was_initialized:
        tfdist.init()


def test_an_eager_layer_raises_the_error_of_its_collective(shut_down):
    norm = tfdist.layers.SyncBatchNormalization()
    with pytest.raises(tfdist.NotInitializedError, match=r"tfdist\.init\(\)"):
        norm(tf.ones((4, 3)), training=True)


@pytest.mark.parametrize(
    "cls", [tfdist.MismatchError, tfdist.TimeoutError, tfdist.RankFailedError]
)
def test_layers_keep_the_class_message_and_record(cls):
    record = errors.ErrorRecord(kind=cls.KIND, rank=1, host="h", cause="it died")

    def fail(_):
        raise cls("rank 1 died", record)

    error = raised_in_layers(fail)
    assert type(error) is cls
    assert str(error) == "rank 1 died"
    assert error.record == record
    assert exit_report.find_culprit(error, 0) == (1, error)
    assert copy.copy(error).record == record


def test_the_loss_of_a_rank_in_a_traced_function_of_a_layer_is_one():
    def fail(_):
        raise tf.errors.AbortedError(None, None, "of TensorFlow", PAYLOADS)

    assert sharing.is_loss(raised_in_layers(fail))
    assert exit_report.culprit_rank(raised_in_layers(fail), 0) == 1


def test_other_errors_in_layers_are_not_ours():
    def fail(_):
        try:
            raise tf.errors.AbortedError(None, None, "of tfdist", PAYLOADS)
        except tf.errors.AbortedError:
            raise tf.errors.AbortedError(None, None, "of something else") from None

    assert errors.from_tf(raised_in_layers(fail)) is None


def test_a_layer_compiled_by_xla_is_refused_with_the_message_once():
    layer = Calling(tfdist.allreduce)
    layer.built = True
    with pytest.raises(InsideXlaError) as caught:
        tf.function(layer, jit_compile=True)(tf.ones([2]))
    assert caught.value.why is None
    assert str(caught.value).count("jit_compile=False") == 1
