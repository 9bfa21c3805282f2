"""horovod.tensorflow on one rank: signatures, errors before init, pure functions."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.horovod.tensorflow as hvd
from tfdist.horovod.common import basics, process_sets, reduce_ops, util
from tfdist.horovod.common.exceptions import (
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)
from tfdist.horovod.tensorflow import mpi_ops
from tfdist.horovod.tensorflow._arguments import scoped
from tfdist.horovod.tensorflow.compression import Compressor, wire_name


@pytest.fixture
def world():
    hvd.init()
    yield
    hvd.shutdown()


def test_what_the_frameworks_share_needs_no_tensorflow():
    code = (
        "import sys, tfdist.horovod.common.elastic, tfdist.horovod.common.util;"
        "from tfdist.horovod.common.basics import basics;"
        "print(basics.is_initialized(), 'tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.parametrize(
    "name",
    ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]
    + ["is_homogeneous", "stop_timeline", "rank_op", "size_op"],
)
def test_before_init_is_a_value_error(name):
    with pytest.raises(ValueError, match="not been initialized; use hvd.init"):
        getattr(hvd, name)()


def test_before_init_other_functions_say_so_too(tmp_path):
    for call in (
        lambda: hvd.start_timeline(str(tmp_path / "timeline")),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.global_process_set.size(),
        lambda: hvd.global_process_set.included(),
    ):
        with pytest.raises(ValueError, match="hvd.init"):
            call()
    with pytest.raises(tf.errors.FailedPreconditionError, match="init"):
        hvd.allreduce(tf.constant(1.0))
    assert int(hvd.process_set_included_op()) == -1
    assert hvd.global_process_set.ranks == []


def test_a_second_timeline_goes_on_in_the_first_ones_folder(tmp_path, caplog):
    hvd.init()
    try:
        for name in ("first", "first", "second"):
            assert "start_timeline" not in caplog.text
            hvd.start_timeline(str(tmp_path / name))
            hvd.stop_timeline()
    finally:
        hvd.shutdown()
    assert f"{tmp_path}/first.d, and continues there" in caplog.text
    assert [one.name for one in tmp_path.iterdir()] == ["first.d"]


def test_an_elastic_job_has_no_timeline(world, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDIST_MEMBER", "0")
    with pytest.raises(ValueError, match="in an elastic job. Omit hvd.start_timeline"):
        hvd.start_timeline(str(tmp_path / "timeline"))
    assert list(tmp_path.iterdir()) == []


def test_what_was_built(capsys):
    assert not hvd.mpi_built() and not hvd.mpi_enabled()
    assert hvd.gloo_built() is True and hvd.gloo_enabled() is True
    assert hvd.nccl_built() == 0 and isinstance(hvd.nccl_built(), int)
    others = (hvd.ddl_built, hvd.ccl_built, hvd.cuda_built, hvd.rocm_built)
    assert [built() for built in others] == [False] * 4
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()
    asked = (util.mpi_built, util.gloo_built, util.nccl_built)
    assert [built() for built in asked] == [False, True, False]
    assert (util.ddl_built(), util.ccl_built()) == (False, False)
    assert util.extension_available("tensorflow")
    assert not util.extension_available("torch", verbose=True)
    assert "torch: built: no" in capsys.readouterr().out
    assert hvd.gpu_available("tensorflow", verbose=True) is False
    assert hvd.gpu_available("torch") is False


def test_average_and_op():
    decide = hvd.handle_average_backwards_compatibility
    assert decide(None, None) == hvd.Average and decide(hvd.Max, None) == hvd.Max
    with pytest.warns(DeprecationWarning, match=r"op=hvd\.Sum"):
        assert decide(None, False) == hvd.Sum
    with pytest.warns(DeprecationWarning):
        assert decide(None, True) == hvd.Average
    with pytest.raises(ValueError, match="supersedes average"):
        decide(hvd.Sum, True)
    assert reduce_ops.name_of(np.int32(1)) == "SUM"
    assert reduce_ops.name_of(tfdist.ReduceOp.MAX) == "MAX"
    for wrong in (6, -1, "sum", True, None, 1.0):
        with pytest.raises(ValueError, match="Expected op to be one of hvd.Average"):
            reduce_ops.name_of(wrong)
    assert reduce_ops.name_of(hvd.Adasum) == "ADASUM"


def test_powers_of_two_and_lists_and_versions():
    assert [n for n in range(-1, 9) if hvd.check_num_rank_power_of_2(n)] == [1, 2, 4, 8]
    assert util.split_list([1, 2, 3, 4, 5, 6, 7], 3) == [[1, 2, 3], [4, 5], [6, 7]]
    assert util.split_list([1], 2) == [[1], []]
    assert util.is_iterable([]) and not util.is_iterable(3)
    assert not util.is_version_greater_equal_than("2.9.0", "2.10.0")
    asked = []
    remembers = util._cache(lambda key: asked.append(key) or key)
    assert (remembers(1), remembers(1), asked) == (1, 1, [1])
    for wrong in (("2.9.0", "2.10"), (2.9, "2.10.0")):
        with pytest.raises(ValueError, match="Expected"):
            util.is_version_greater_equal_than(*wrong)


def test_exceptions_carry_what_scripts_read():
    assert HostsUpdatedInterrupt(True).skip_sync is True
    error = HorovodVersionMismatchError("tensorflow", "2.21", "2.20")
    assert isinstance(error, ImportError) and error.installed_version == "2.20"
    assert "2.20" in str(error) and "2.21" in str(error)


def test_a_name_has_its_scope_unless_told_otherwise():
    with tf.name_scope("outer"):
        assert scoped("mine", False) == "outer/mine"
        assert scoped("mine", True) == "mine"
        assert scoped(None, False) is None
    assert scoped("mine", False) == "mine"


def test_compressions(world):
    assert wire_name(hvd.Compression.none) is None
    assert wire_name(hvd.Compression.fp16) == "fp16"
    with pytest.raises(LookupError):
        wire_name(type("Mine", (hvd.Compression.fp16,), {}))
    assert wire_name("bf16") == "bf16"
    with pytest.raises(TypeError, match=r"hvd\.Compression\.fp16"):
        wire_name(object())
    for reduce in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(TypeError, match=r"hvd\.Compression\.fp16"):
            reduce(tf.constant([1.0]), compression="fp16")
    for reduce in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
        with pytest.raises(TypeError, match=r"hvd\.Compression\.fp16"):
            reduce([tf.constant([1.0])], compression=None)
    for method in (Compressor.compress, lambda t: Compressor.decompress(t, None)):
        with pytest.raises(NotImplementedError):
            method(tf.constant(1.0))
    kept, ctx = hvd.Compression.fp16.compress(tf.constant([3]))
    assert kept.dtype == tf.int32
    assert hvd.Compression.fp16.decompress(kept, ctx).dtype == tf.int32


def test_init_takes_what_means_all_ranks(world):
    class Communicator:
        def __init__(self, rank, size):
            self.Get_rank, self.Get_size = lambda: rank, lambda: size

    for comm in (None, [], [0], Communicator(0, 1)):
        hvd.init(comm=comm)
    for wrong in ([0, 1], [1], Communicator(0, 2), 5):
        with pytest.raises(ValueError, match="Expected"):
            hvd.init(comm=wrong)
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match="'dynamic'"):
        hvd.init(process_sets="static")
    with pytest.raises(TypeError, match=r"hvd\.ProcessSet"):
        hvd.init(process_sets=[[0]])
    with pytest.raises(ValueError, match="duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])


def test_process_sets_that_are_not_bound(world):
    one = hvd.ProcessSet([0])
    assert (one.process_set_id, one.size(), one.rank()) == (None, None, None)
    assert one.included() is True and "ranks=[0]" in str(one)
    assert hvd.remove_process_set(one) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    with pytest.raises(ValueError, match="not initialized, or was removed"):
        hvd.allreduce(tf.constant(1.0), process_set=one)
    with pytest.raises(TypeError, match=r"hvd\.ProcessSet"):
        hvd.allreduce(tf.constant(1.0), process_set=[0])
    for wrong in (["a"], [True], 5):
        with pytest.raises(ValueError, match="list of ranks"):
            hvd.ProcessSet(wrong)
    added = hvd.add_process_set(one)
    assert added is one and one.process_set_id > 0
    assert mpi_ops._basics._get_process_set_ids_and_ranks() == {
        0: [0],
        one.process_set_id: [0],
    }
    assert process_sets.own(one) in tfdist.process_sets()
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([0])
    assert hvd.remove_process_set(one) is True
    assert one.process_set_id is None and one.size() is None


def test_a_process_set_that_could_not_be_removed_stays(world, monkeypatch):
    one = hvd.add_process_set([0])

    def refuse(process_set):
        raise tfdist.MismatchError("operations are in flight")

    with monkeypatch.context() as patched:
        patched.setattr(tfdist, "remove_process_set", refuse)
        with pytest.raises(tfdist.MismatchError, match="in flight"):
            hvd.remove_process_set(one)
    assert float(hvd.allreduce(tf.constant(1.0), process_set=one)) == 1.0
    assert hvd.remove_process_set(one) is True
    assert hvd.remove_process_set(one) is False


def test_what_is_refused_says_what_to_do(world):
    x = tf.constant([1.0])
    for call, error, words in (
        (lambda: hvd.reducescatter(x, op=hvd.Adasum), ValueError, "allreduce"),
        (
            lambda: hvd.allreduce(tf.IndexedSlices(x, [0]), op=hvd.Adasum),
            *(NotImplementedError, "convert_to_tensor"),
        ),
        (
            lambda: hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum
            ),
            *(NotImplementedError, "Use a Keras optimizer"),
        ),
        (
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.SGD(), op=hvd.Adasum, backward_passes_per_step=2
            ),
            *(ValueError, "Use a larger batch"),
        ),
        (
            lambda: hvd.allreduce(tf.IndexedSlices(x, [0]), op=hvd.Max),
            NotImplementedError,
            "convert_to_tensor",
        ),
        (
            lambda: hvd.reducescatter(tf.constant(1.0)),
            tf.errors.InvalidArgumentError,
            "hvd.allreduce",
        ),
        (
            lambda: hvd.alltoall(x, splits=[1.5]),
            tf.errors.InvalidArgumentError,
            "vector of integers",
        ),
        (
            lambda: hvd.alltoall(x, splits=[2]),
            tf.errors.InvalidArgumentError,
            "splits",
        ),
        (lambda: hvd.broadcast_object(object()), TypeError, "plain data"),
        (lambda: hvd.broadcast_object(1, session=5), TypeError, "Session"),
        (lambda: hvd.size_op(process_set_id=99), ValueError, "99"),
        (lambda: hvd.broadcast_global_variables(0), RuntimeError, "eager"),
        (
            lambda: hvd.BroadcastGlobalVariablesHook(0, device="/cpu:0"),
            NotImplementedError,
            "broadcast_global_variables",
        ),
        (lambda: hvd.SyncBatchNormalization(fused=True), ValueError, "fused"),
        (
            lambda: type("Mine", (hvd.SyncBatchNormalization,), {}),
            TypeError,
            "synchronize_batch_normalization",
        ),
        (lambda: hvd.DistributedOptimizer("adam"), ValueError, "Keras 3 optimizer"),
        (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), use_locking=True),
            ValueError,
            "use_locking",
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    assert int(hvd.process_set_included_op(99)) == -3

    @tf.function
    def inside():
        hvd.broadcast_object(1)

    with pytest.raises(RuntimeError, match=r"tf\.function"):
        inside()


def test_what_a_tape_is_and_is_not(world):
    tape = tf.GradientTape()
    wrapped = hvd.DistributedGradientTape(tape)
    assert isinstance(wrapped, tf.GradientTape)
    with pytest.raises(ValueError, match="already wrapped"):
        hvd.DistributedGradientTape(wrapped)
    with pytest.raises(TypeError, match="GradientTape"):
        hvd.DistributedGradientTape(5)
    with pytest.raises(TypeError, match="variables and layers"):
        wrapped.register_local_source(5)
    for method in (wrapped.jacobian, wrapped.batch_jacobian):
        with pytest.raises(NotImplementedError, match=r"hvd\.allreduce"):
            method(None, None)


def test_a_tape_is_wrapped_before_and_while_it_records(world):
    w = tf.Variable(3.0)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = w * w
    assert [float(tape.gradient(loss, w)) for _ in range(2)] == [6.0, 6.0]
    with tf.GradientTape(persistent=True) as own:
        loss = w * w
        tape = hvd.DistributedGradientTape(own)
    assert float(tape.gradient(loss, w)) == 6.0
    assert float(own.gradient(loss, w)) == 6.0  # what was wrapped stays as it is


def test_a_compressor_with_its_own_methods_cannot_run_inside_xla(world):
    class Halving(Compressor):
        compress = staticmethod(lambda tensor: (tensor / 2, None))
        decompress = staticmethod(lambda tensor, ctx: tensor * 2)

    w = tf.Variable(3.0)

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = w * w
        return hvd.DistributedGradientTape(tape, compression=Halving).gradient(loss, w)

    with pytest.raises(NotImplementedError, match="a compressor with its own methods"):
        step()


def test_basics_is_the_object_behind_the_functions():
    assert mpi_ops._basics is basics.basics
    assert basics.basics.Sum == hvd.Sum
