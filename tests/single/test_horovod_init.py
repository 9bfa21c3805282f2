"""hvd.init() and the variables of Horovod that a program sets itself."""

import os

import pytest

import tfdist
from tfdist.core import native
from tfdist.horovod import tensorflow as hvd
from tfdist.launch.horovod.variables import STATE

NAMES = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "TFDIST_STALL_WARNING_S", STATE)


@pytest.fixture(autouse=True)
def clean():
    tfdist.shutdown()
    yield
    tfdist.shutdown()
    for name in NAMES:
        os.environ.pop(name, None)


def test_they_are_translated_before_the_ranks_connect():
    os.environ[NAMES[0]] = "77"
    hvd.init()
    assert native.value("TFDIST_STALL_WARNING_S") == 77
    os.environ[NAMES[0]] = "78"  # a later world
    hvd.shutdown()
    hvd.init()
    assert native.value("TFDIST_STALL_WARNING_S") == 78


def test_a_variable_that_is_deleted_has_no_effect_in_a_later_world():
    os.environ[NAMES[0]] = "77"
    hvd.init()
    hvd.shutdown()
    del os.environ[NAMES[0]]
    hvd.init()
    assert "TFDIST_STALL_WARNING_S" not in os.environ


def test_a_value_that_means_nothing_is_an_error():
    os.environ[NAMES[0]] = "soon"
    with pytest.raises(ValueError, match="HOROVOD_STALL_CHECK_TIME_SECONDS='soon'"):
        hvd.init()
    assert not hvd.is_initialized()
