"""Tests that need `libtfdist_xla.so` are skipped where `make xla` has not been run."""

import pytest
import tensorflow as tf

from tfdist.core.op_compiler import built_for
from tfdist.gradients import xla


def _missing() -> str:
    if not xla.LIBRARY_PATH.is_file():
        return xla.NOT_BUILT
    built = built_for(xla.LIBRARY_PATH)
    return "" if built == tf.__version__ else f"libtfdist_xla.so is for {built}"


needs_xla_library = pytest.mark.skipif(bool(_missing()), reason=_missing() or "built")
