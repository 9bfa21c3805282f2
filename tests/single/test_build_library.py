"""The library of operations refuses another TensorFlow than it was built for."""

import shutil

import pytest
import tensorflow as tf

from tfdist.collectives.tf_ops import op_library


def patched(tmp_path, old, new):
    assert len(old) == len(new)
    copy = tmp_path / op_library.LIBRARY_PATH.name
    data = op_library.LIBRARY_PATH.read_bytes()
    assert old in data
    copy.write_bytes(data.replace(old, new))
    shutil.copy(op_library.LIBRARY_PATH.with_name("libtfdist_core.so"), tmp_path)
    return copy


def test_the_library_says_which_tensorflow_it_was_built_for():
    assert op_library.built_for(op_library.LIBRARY_PATH) == tf.__version__
    op_library.check_built_for(op_library.LIBRARY_PATH, tf.__version__)


def test_another_version_is_refused_naming_both_and_the_command(tmp_path):
    marker = f"built for TensorFlow {tf.__version__};".encode()
    other = tf.__version__.replace("2", "9").encode()
    copy = patched(tmp_path, marker, b"built for TensorFlow " + other + b";")
    with pytest.raises(ImportError) as caught:
        op_library.check_built_for(copy, tf.__version__)
    message = str(caught.value)
    assert f"built for TensorFlow {other.decode()}" in message
    assert f"into TensorFlow {tf.__version__}" in message
    assert "--no-build-isolation" in message


def test_an_unresolved_symbol_becomes_the_same_message(tmp_path):
    # As under another TensorFlow: the dated namespace of absl is part of its symbols.
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


def test_a_missing_library_says_how_to_build_it(tmp_path):
    with pytest.raises(ImportError, match="--no-build-isolation"):
        op_library.built_for(tmp_path / "libtfdist_tf.so")
