"""Modules that `import tfdist` loads, and the functions of the core for one process."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.deadline import deadline
from helpers.launcher import clean_environment

import tfdist
from tfdist.core import library, native, runtime, world

ROOT = Path(__file__).resolve().parents[2]
built = pytest.mark.skipif(
    not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
)


def run_python(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


@deadline(70)
@pytest.mark.parametrize(
    "module",
    [
        "tfdist",
        "tfdist.core.native",
        "tfdist.core.world",
        "tfdist.launch.cli",
        "tfdist.core.rendezvous.connect",
    ],
)
def test_the_launcher_and_the_rendezvous_start_without_tensorflow(module):
    code = f"import sys, {module}; print('tensorflow' in sys.modules)"
    assert run_python(code).stdout == "False\n"


@deadline(70)
@built
def test_init_at_size_one_needs_no_launcher_and_no_tensorflow():
    code = (
        "import sys, tfdist; tfdist.init(); tfdist.init();"
        "print(tfdist.rank(), tfdist.size(), tfdist.local_rank(), tfdist.local_size(),"
        "tfdist.cross_rank(), tfdist.cross_size(), tfdist.is_initialized());"
        "tfdist.shutdown(); tfdist.shutdown(); print(tfdist.is_initialized());"
        "tfdist.init(); print(tfdist.size(), 'tensorflow' in sys.modules)"
    )
    done = run_python(code)
    assert done.stdout == "0 1 0 1 0 1 True\nFalse\n1 False\n", done.stderr
    assert done.returncode == 0 and done.stderr == ""


def test_public_names_are_exactly_these():
    expected = """
        init shutdown is_initialized rank size local_rank local_size cross_rank
        cross_size allreduce grouped_allreduce allgather broadcast barrier
        broadcast_variables broadcast_object allgather_object ReduceOp
        DistributedGradientTape DistributedOptimizer MismatchError RankFailedError
        EvictedError ThreadError TimeoutError NotInitializedError
        pin_gpu callbacks data elastic errors layers optimizers __version__
        reduce reduce_scatter gather scatter alltoall send recv
        ProcessSet add_process_set remove_process_set process_sets
        join evaluate predict restore run newest_checkpoint
        """.split()
    assert sorted(tfdist.__all__) == sorted(expected) == dir(tfdist)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tfdist.nothing


def test_the_version_is_the_one_of_the_package():
    assert importlib.metadata.version("tfdist") == tfdist.__version__


def test_a_library_that_is_not_built_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "none.so")
    native.library.cache_clear()
    with pytest.raises(ImportError, match="pip install -e . --no-build-isolation"):
        native.library()
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(ImportError, match="does not load"):
        native.library()
    native.library.cache_clear()


def test_a_source_folder_that_hides_the_installed_package_is_named(
    monkeypatch, tmp_path
):
    core = Path("tfdist", "_native", "libtfdist_core.so")
    source, installed = tmp_path / "clone", tmp_path / "site-packages"
    (installed / core).parent.mkdir(parents=True)
    (installed / core).touch()
    monkeypatch.setattr(library, "LIBRARY_PATH", source / core)
    monkeypatch.setattr(sys, "path", [str(source), str(tmp_path), str(installed)])
    native.library.cache_clear()
    with pytest.raises(ImportError) as caught:
        native.library()
    text = str(caught.value)
    assert f"in its source folder {source}, which is not built" in text
    assert f"installed in {installed}. Start Python, or tfdistrun, in another" in text
    assert "pip install --no-build-isolation -e ." in text


@built
def test_errors_of_the_core_carry_code_message_and_record(monkeypatch):
    monkeypatch.setenv("TFDIST_TIMEOUT_S", "soon")
    with pytest.raises(native.CoreError) as caught:
        native.config()
    assert caught.value.code == native.INVALID_ARGUMENT
    assert "TFDIST_TIMEOUT_S" in caught.value.message
    assert caught.value.payload["kind"] == "invalid_argument"


@built
def test_configuration_is_read_anew(monkeypatch):
    monkeypatch.setenv("TFDIST_TIMEOUT_S", "12.5")
    assert native.value("TFDIST_TIMEOUT_S") == 12.5
    monkeypatch.delenv("TFDIST_TIMEOUT_S")
    assert native.value("TFDIST_TIMEOUT_S") == 300
    with pytest.raises(KeyError, match="TFDIST_NOTHING is not in the table"):
        native.value("TFDIST_NOTHING")


@built
def test_a_value_that_is_no_utf_8_reads_as_in_the_environment(monkeypatch):
    monkeypatch.setenv("TFDIST_LOG_DIR", os.fsdecode(b"caf\xe9"))
    assert os.fsencode(native.value("TFDIST_LOG_DIR")) == b"caf\xe9"


@built
def test_every_variable_that_python_reads_is_in_the_table():
    """Else the core would refuse, as unknown, what tfdistrun sets."""
    names = set()
    for path in (ROOT / "tfdist").rglob("*.py"):
        names |= set(re.findall(r"\bTFDIST_[A-Z_]+[A-Z]\b", path.read_text()))
    macros = {"TFDIST_EXPORT", "TFDIST_API_VERSION", "TFDIST_LOCAL", "TFDIST_CROSS"}
    assert names - macros <= set(native.config())


@built
@deadline(70)
def test_bad_arguments_of_init_are_refused():
    world.shutdown()  # of an earlier test in this process
    for value in (0.0, -1.0, float("nan"), 1e9, "30", True):
        with pytest.raises(ValueError, match=f"Expected timeout_s .* got {value!r}"):
            world.start(timeout_s=value)
    assert not runtime.is_initialized()


@built
@deadline(70)
def test_errors_of_init_are_the_public_classes(monkeypatch):
    import tensorflow as tf

    world.shutdown()  # of an earlier test in this process
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)

    def told(act, kind):
        with pytest.raises(kind) as caught:
            act()
        assert type(caught.value) is kind
        return str(caught.value).splitlines()[0]

    assert told(tfdist.rank, tfdist.NotInitializedError) == (
        "tfdist is not initialized; call tfdist.init() first"
    )
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "x")
    assert told(tfdist.init, tf.errors.InvalidArgumentError) == (
        "PMI_SIZE='x' is not a whole number from 1 to 1048576; correct it, or unset it "
        "to start without that launcher"
    )
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("TFDIST_JOB_ID", f"test {os.getpid()}")
    assert told(lambda: tfdist.init(timeout_s=1), tfdist.TimeoutError) == (
        "rank 1 of 2 did not call tfdist.init() within 1 s (TFDIST_START_TIMEOUT_S); "
        "look at the output of those ranks, or allow more time"
    )
    assert not tfdist.is_initialized()
