"""The examples in the docstrings of every module run, as they stand, at size 1."""

import doctest
import importlib
import pkgutil

import keras
import pytest
import tensorflow as tf

import tfdist

# Importing these is running them, or an error that says what to use.
SKIPPED = {
    "tfdist.launch.__main__",
    "tfdist.tools.__main__",
    "tfdist.horovod.tensorflow.data",
    "tfdist.ray",  # needs Ray: tests/integration/test_ray.py
}
MODULES = sorted(
    {"tfdist", *(m.name for m in pkgutil.walk_packages(tfdist.__path__, "tfdist."))}
    - SKIPPED
)


def examples_of(name):
    """Names of what has examples in a module."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(importlib.import_module(name))
    return [test.name for test in found if test.examples]


@pytest.fixture
def clean_world(tmp_path, monkeypatch):
    """An example may write files, start a world and change the names of layers."""
    monkeypatch.chdir(tmp_path)
    keras.utils.clear_session()  # a tenth of a second, hence only where there are some
    yield
    tfdist.shutdown()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name, request):
    if not examples_of(name):  # it has been imported, at least
        return
    request.getfixturevalue("clean_world")
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"tfdist": tfdist, "tf": tf})
    assert failed == 0


def test_examples_are_found():
    with_examples = [one for name in MODULES for one in examples_of(name)]
    assert len(with_examples) >= 25
    assert "tfdist.callbacks" in with_examples
    assert "tfdist.collectives._allreduce.allreduce" in with_examples
