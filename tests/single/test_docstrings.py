"""The examples in the docstrings of every module run, as they stand, at size 1."""

import doctest
import importlib
import pkgutil

import keras
import pytest
import tensorflow as tf

import tfdist

# Importing these is running them.
SKIPPED = {"tfdist.launch.__main__", "tfdist.tools.__main__"}
MODULES = sorted(
    {"tfdist", *(m.name for m in pkgutil.walk_packages(tfdist.__path__, "tfdist."))}
    - SKIPPED
)


@pytest.fixture(autouse=True)
def clean_world(tmp_path, monkeypatch):
    """An example may write files, start a world and change the names of layers."""
    monkeypatch.chdir(tmp_path)
    keras.utils.clear_session()
    yield
    tfdist.shutdown()


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"tfdist": tfdist, "tf": tf})
    assert failed == 0


def test_examples_are_found():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = map(importlib.import_module, MODULES)
    with_examples = [t.name for m in modules for t in finder.find(m) if t.examples]
    assert len(with_examples) >= 25
    assert "tfdist.callbacks" in with_examples
    assert "tfdist.collectives._allreduce.allreduce" in with_examples
