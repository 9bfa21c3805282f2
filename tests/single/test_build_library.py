"""The library of operations is chosen by the running TensorFlow, or compiled for it."""

import shutil

import pytest
import tensorflow as tf

from tfdist.collectives.tf_ops import op_library
from tfdist.core import op_compiler


def patched(tmp_path, old, new):
    assert len(old) == len(new)
    copy = tmp_path / op_library.LIBRARY_PATH.name
    data = op_library.LIBRARY_PATH.read_bytes()
    assert old in data
    copy.write_bytes(data.replace(old, new))
    shutil.copy(op_library.LIBRARY_PATH.with_name("libtfdist_core.so"), tmp_path)
    return copy


def built_for_another(tmp_path):
    """A library of this name that was built for a pre-release."""
    version = tf.__version__.encode()
    other = version[:-1] + b"x"
    return patched(tmp_path, b"TensorFlow " + version, b"TensorFlow " + other)


def test_the_library_says_which_tensorflow_it_was_built_for(tmp_path):
    assert op_compiler.built_for(op_library.LIBRARY_PATH) == tf.__version__
    assert op_compiler.built_for(tmp_path / "none.so") == ""
    assert op_compiler.built_for(op_library.native.LIBRARY_PATH) == ""


def test_the_library_of_the_installation_is_used_if_it_fits():
    assert op_library.library_path() == op_library.LIBRARY_PATH


@pytest.mark.parametrize("is_there", [False, True])
def test_another_one_is_compiled_for_the_running_tensorflow(
    tmp_path, monkeypatch, is_there
):
    path = built_for_another(tmp_path) if is_there else tmp_path / "none.so"
    monkeypatch.setattr(op_library, "LIBRARY_PATH", path)
    asked = []

    def compiled(*arguments):
        asked.append(arguments)
        return tmp_path / "compiled.so"

    monkeypatch.setattr(op_compiler, "compiled_on_first_use", compiled)
    assert op_library.library_path() == tmp_path / "compiled.so"
    [(tensorflow, source, core, _)] = asked
    assert tensorflow.version == tf.__version__
    assert (source / "tf" / "allreduce_op.cc").is_file()
    assert (core / "libtfdist_core.so").is_file()


def test_the_refusal_says_what_there_is_and_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(op_library, "LIBRARY_PATH", tmp_path / "none.so")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ImportError) as caught:
        op_library.library_path()
    message = str(caught.value)
    version = tf.__version__
    assert f"no operations for TensorFlow {version}: this installation has" in message
    assert f"those of TensorFlow {version}. They are compiled on first use" in message
    assert "no C++17 compiler was found (tried c++, g++, clang++)" in message
    assert "apt install g++" in message


def test_an_unresolved_symbol_is_explained(tmp_path):
    # As with a TensorFlow of another build: absl's namespace is a part of its symbols.
    data = op_library.LIBRARY_PATH.read_bytes()
    symbol = next(
        s
        for s in data.split(b"\0")
        if s.startswith(b"_ZN10tensorflow") and b"lts_" in s
    )
    copy = patched(tmp_path, symbol, symbol.replace(b"lts_", b"lts9", 1))
    with pytest.raises(ImportError) as caught:
        op_library._load(copy)
    message = str(caught.value)
    assert f"built for TensorFlow {tf.__version__}" in message
    assert "--no-build-isolation" in message
    assert "lts9" in message
