"""Tests that need `libtfdist_xla.so` are skipped where `make xla` has not been run."""

import pytest
import tensorflow as tf

from tfdist import _xla
from tfdist._library import built_for


def _missing() -> str:
    if not _xla.LIBRARY_PATH.is_file():
        return _xla.NOT_BUILT
    built = built_for(_xla.LIBRARY_PATH)
    return "" if built == tf.__version__ else f"libtfdist_xla.so is for {built}"


needs_xla_library = pytest.mark.skipif(bool(_missing()), reason=_missing() or "built")
