"""The seam where another library may carry the tensors, and what the Horovod one says.

No Horovod is needed here; with one: tests/horovod_engine/test_launchers.py.
"""

import http.client
import os
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.callbacks._base import RankCallback
from tfdist.collectives.engines.horovod import _start, _types, _watch
from tfdist.collectives.engines.horovod._store import MAX_VALUE_BYTES, Store
from tfdist.collectives.tf_ops import emit, op_library
from tfdist.core import engines, exit_report, native, runtime

ROOT = Path(__file__).resolve().parents[2]


class Echo:
    """An engine for one rank, whose allreduce adds 100."""

    name = "echo"

    def __init__(self):
        self.calls, self.done = [], 0

    def start(self, mesh, timeout_s):
        self.calls.append(("start", mesh.topology.size, timeout_s > 0))

    def close(self):
        self.calls.append("close")

    def operations(self):
        return SimpleNamespace(
            tfdist_allreduce=lambda *, tensors, **_rest: [t + 100 for t in tensors]
        )

    def refusal(self, dtype, op):
        is_double = tf.dtypes.as_dtype(dtype) == tf.float64
        return "the echo takes no float64" if is_double else None

    def add_process_set(self, number, ranks):
        self.calls.append(("add", tuple(ranks)))

    def remove_process_set(self, number):
        self.calls.append("remove")

    def finished_count(self):
        return self.done

    def to_core_error(self, error):
        if "echo broke" not in str(error):
            return None
        return native.CoreError(native.ABORTED, "it broke", {"kind": "rank_failed"})


@pytest.fixture
def echo(monkeypatch):
    """Chosen, and forgotten afterwards."""
    made = Echo()
    monkeypatch.setenv("TFDIST_ENGINE", "echo")
    monkeypatch.setattr(engines, "names", lambda: ["native", "echo"])
    module = SimpleNamespace(make=lambda: made)
    monkeypatch.setitem(sys.modules, "tfdist.collectives.engines.echo", module)
    tfdist.shutdown()
    _forget()
    yield made
    tfdist.shutdown()
    _forget()


def _forget():
    engines.first.cache_clear()
    op_library.ops.cache_clear()
    emit.eager_allreduce.cache_clear()


def test_an_engine_starts_with_the_world_and_ends_with_it(echo):
    tfdist.init()
    assert echo.calls == [("start", 1, True)]
    tfdist.shutdown()
    assert echo.calls[1:] == ["close"]


def test_collectives_go_through_the_engine(echo):
    tfdist.init()
    assert tfdist.allreduce(tf.constant([1, 2])).numpy().tolist() == [101, 102]
    compiled = tf.function(lambda x: tfdist.allreduce(x) + 1)
    assert int(compiled(tf.constant(1))) == 102


def test_what_the_engine_cannot_reduce_is_refused_in_its_words(echo):
    tfdist.init()
    with pytest.raises(TypeError, match="tfdist.allreduce: the echo takes no float64"):
        tfdist.allreduce(tf.constant(1.0, tf.float64))


def test_the_engine_learns_of_process_sets(echo):
    tfdist.init()
    made = tfdist.add_process_set([0])
    assert tfdist.add_process_set([0]) == made
    tfdist.remove_process_set(made)
    assert echo.calls[1:] == [("add", (0,)), "remove"]


def test_join_is_refused_with_the_name_of_the_engine_that_can(echo):
    tfdist.init()
    with pytest.raises(NotImplementedError, match="native engine can"):
        tfdist.join()


@pytest.mark.parametrize("reduced", [1, 0])
def test_the_engines_count_shows_what_a_synchronized_model_reduced(
    echo, monkeypatch, reduced
):
    tfdist.init()
    layers = [tfdist.layers.SyncBatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callback = RankCallback()
    callback.set_model(model)
    callback.on_train_batch_begin(0)
    echo.done += reduced
    with monkeypatch.context() as two_ranks:
        two_ranks.setattr(runtime, "size", lambda: 2)
        if reduced:
            callback.on_train_batch_end(0)
        else:
            with pytest.raises(RuntimeError, match="reduced no gradients"):
                callback.on_train_batch_end(0)


def test_errors_of_the_engine_become_ours_wherever_they_are_raised(echo, monkeypatch):
    def fails(**_arguments):
        raise tf.errors.UnknownError(None, None, "the echo broke")

    monkeypatch.setattr(
        echo, "operations", lambda: SimpleNamespace(tfdist_allreduce=fails)
    )
    tfdist.init()
    with pytest.raises(tfdist.RankFailedError, match="it broke"):
        tfdist.allreduce(tf.constant(1.0))
    raised = tf.errors.UnknownError(None, None, "Graph execution error: echo broke")
    assert isinstance(tfdist.errors.from_tf(raised), tfdist.RankFailedError)
    other = tf.errors.UnknownError(None, None, "a file is missing")
    assert tfdist.errors.from_tf(other) is None


def test_an_engine_that_does_not_start_leaves_nothing(echo, monkeypatch):
    def fail(mesh, timeout_s):
        raise native.CoreError(native.ABORTED, "no network", {"kind": "rank_failed"})

    monkeypatch.setattr(echo, "start", fail)
    with pytest.raises(tfdist.RankFailedError, match="no network"):
        tfdist.init()
    assert not tfdist.is_initialized()
    assert echo.calls == ["close"]


def test_a_process_keeps_its_engine(echo, monkeypatch):
    tfdist.init()
    tfdist.shutdown()
    monkeypatch.setenv("TFDIST_ENGINE", "native")
    with pytest.raises(tf.errors.InvalidArgumentError, match="has used 'echo'"):
        tfdist.init()


def test_engines_are_the_core_and_the_modules_of_the_package():
    assert engines.names() == ["native", "mpi", "horovod"]


def test_an_unknown_engine_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("TFDIST_ENGINE", "gloo")
    with pytest.raises(native.CoreError, match="'gloo' is not one of native, mpi"):
        engines.requested()


PROGRAM = """
import tfdist
try:
    tfdist.init()
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow  # its text: the next one
def test_without_horovod_init_says_what_to_install_and_where_it_builds(tmp_path):
    (tmp_path / "horovod.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TFDIST_ENGINE": "horovod", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("InvalidArgumentError"), done.stderr
    for part in (
        f"was built for TensorFlow {tf.__version__}",
        "--no-build-isolation --no-deps --no-binary horovod horovod==0.28.1",
        "TensorFlow up to 2.15",
        "unset TFDIST_ENGINE",
        "not here",
    ):
        assert part in done.stdout


def test_an_installed_horovod_that_does_not_load_is_named():
    text = _start.missing("0.28.1", "2.21.0")
    assert "Horovod 0.28.1 cannot be loaded" in text
    assert "there is no Horovod" in _start.missing(None, "2.21.0")


@pytest.mark.parametrize(
    ("name", "value"),
    [("TFDIST_ATOMIC_STEPS", "1"), ("TFDIST_ALLREDUCE_ALGORITHM", "ring")],
)
def test_settings_of_the_native_engine_are_refused(monkeypatch, name, value):
    assert _start.refused_setting(native.config()) is None
    monkeypatch.setenv(name, value)
    assert name in _start.refused_setting(native.config())


def test_horovod_is_told_the_place_of_the_rank():
    topology = native.Topology(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        cross_rank=1,
        cross_size=2,
        host_of=(0, 0, 1, 1),
    )
    found = _start.variables(
        topology,
        store=("10.0.0.1", 5000),
        interface="eth1",
        timeout_s=30.0,
    )
    assert found["HOROVOD_RANK"] == "3" and found["HOROVOD_SIZE"] == "4"
    assert found["HOROVOD_HOSTNAME"] == "host1"
    assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "5000"


@pytest.mark.parametrize(
    ("stuck_s", "lost_s", "expected"),
    [
        (5.0, None, "wait"),
        (301.0, None, "late"),
        (0.0, 100.0, "wait"),  # nothing waits
        (0.5, 0.5, "wait"),  # Horovod may see it itself
        (5.0, 2.0, "release"),
        (400.0, 0.5, "wait"),  # it is known only now
        (60.0, 11.0, "die"),
    ],
)
def test_what_waits_in_horovod_is_ended(stuck_s, lost_s, expected):
    assert _watch.verdict(stuck_s, lost_s, 300.0).value == expected


def test_an_operation_that_waits_too_long_shuts_horovod_down(monkeypatch):
    counts = SimpleNamespace(ended_count=lambda: 2, is_waiting=lambda: True)
    released, aborted = threading.Event(), []
    monkeypatch.setattr(native, "failure", lambda: None)
    monkeypatch.setattr(native, "abort", aborted.append)
    watch = _watch.Watch(counts, released.set, 0.5)
    try:
        assert released.wait(20)
    finally:
        watch.close()
    assert "waited 0.5 s in Horovod" in aborted[0]
    assert len(aborted) == 1
    assert watch.late.payload["kind"] == "timeout"


def test_the_interface_is_the_one_that_has_the_address():
    entry = namedtuple("entry", "address")
    known = {"lo": [entry("127.0.0.1")], "eth1": [entry("::1"), entry("10.0.0.7")]}
    assert _start.interface_of("10.0.0.7", known) == "eth1"
    assert _start.interface_of("10.0.0.8", known) is None


def test_a_short_text_travels_as_flags():
    bits = _start.bits_of("255.255.255.255 65535")
    assert len(bits) == len(_start.bits_of(""))
    assert _start.text_of(bits) == "255.255.255.255 65535"
    assert not any(_start.bits_of(""))


def test_the_store_gives_what_it_was_given_and_bounds_it():
    store = Store("127.0.0.1")
    try:
        link = http.client.HTTPConnection("127.0.0.1", store.port, timeout=5)

        def ask(method, path, body=None):
            link.request(method, path, body)
            answer = link.getresponse()
            return answer.status, answer.read()

        assert ask("GET", "/global/0") == (404, b"")
        assert ask("PUT", "/global/0", b"\x00here") == (200, b"")
        assert ask("GET", "/global/0") == (200, b"\x00here")
        assert ask("DELETE", "/global/0") == (200, b"")
        assert ask("GET", "/global/0") == (404, b"")
        link.putrequest("PUT", "/global/1")
        link.putheader("Content-Length", str(MAX_VALUE_BYTES + 1))
        link.endheaders()
        assert link.getresponse().status == 400
    finally:
        store.close()


@pytest.mark.parametrize("op", tfdist.ReduceOp)
@pytest.mark.parametrize("name", ["bool", "int32", "float32", "bfloat16", "complex64"])
def test_a_type_is_reduced_or_refused_with_the_engine_that_does(name, op):
    dtype = tf.dtypes.as_dtype(name)
    logical = op.name.startswith("LOGICAL")
    of_bool = logical or op.name in ("MIN", "MAX")
    expected = {"bool": of_bool, "int32": True, "float32": True}.get(name, False)
    expected = expected and op is not tfdist.ReduceOp.ADASUM
    if name == "bool" and not of_bool:
        assert native.reduction_refusal(dtype.as_datatype_enum, op) is not None
        return
    assert (_types.way_of(dtype, op) is not None) == expected
    if not expected:
        assert "unset TFDIST_ENGINE" in _types.refusal(dtype, op)


def test_the_operations_of_the_engine_count_for_the_warning_at_the_end(
    echo, monkeypatch
):
    """A program that reduces its gradients itself needs no warning."""
    found = []
    monkeypatch.setattr(
        exit_report, "unreduced_training", lambda size, done: found.append(done)
    )
    tfdist.init()
    echo.done = 7
    tfdist.shutdown()
    assert found == [7]
