"""The set-up: setup.py says what is missing, and every package has its reason."""

import importlib.util
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
from setuptools.errors import SetupError

SETUP = Path(__file__).resolve().parents[2] / "setup.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return runpy.run_path(str(SETUP))


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """An interpreter with nothing beside it, and a PATH of chosen programs."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)

    def add(*names):
        for name in names:
            program = tmp_path / "bin" / name
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)

    return add


def test_without_tensorflow_it_names_no_build_isolation(script, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install --no-build-isolation"):
        script["find_tensorflow"]()


def test_a_tensorflow_that_does_not_import_shows_why(script, monkeypatch, tmp_path):
    package = tmp_path / "tensorflow" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('a library is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: importlib.util.spec_from_file_location(name, package),
    )
    monkeypatch.setitem(
        script["find_tensorflow"].__globals__, "build_folder", lambda: tmp_path
    )
    with pytest.raises(SetupError, match="a library is missing"):
        script["find_tensorflow"]()


def test_the_answer_about_tensorflow_is_kept(script, monkeypatch, tmp_path):
    function = script["find_tensorflow"]
    monkeypatch.setitem(function.__globals__, "build_folder", lambda: tmp_path)
    # What was built was told by the real question, which takes seconds.
    answer = "print('some noise'); print('{\"version\": \"2.99\"}')"
    monkeypatch.setitem(function.__globals__, "QUESTION", answer)
    first = function()
    assert first["version"] == "2.99"
    monkeypatch.setitem(function.__globals__, "QUESTION", "raise SystemExit(1)")
    assert function() == first


@pytest.mark.parametrize(
    "present, words",
    [
        ((), "pip install cmake ninja"),
        (("cmake",), "C\\+\\+17 compiler"),
        (("cmake", "g++"), "pip install ninja"),
    ],
)
def test_a_missing_tool_is_named_with_the_command(script, programs, present, words):
    programs(*present)
    with pytest.raises(SetupError, match=words):
        script["check_tools"]()


@pytest.mark.parametrize(
    "tool, generator", [("ninja", "Ninja"), ("make", "Unix Makefiles")]
)
def test_ninja_or_make_is_used(script, programs, tool, generator):
    programs("cmake", "g++", tool)
    cmake, arguments = script["check_tools"]()
    assert os.path.basename(cmake) == "cmake"
    assert arguments[:2] == ["-G", generator]


def test_a_failing_build_ends_with_what_to_do(script):
    with pytest.raises(SetupError, match="exit code 3"):
        script["run_tool"](sys.executable, "-c", "raise SystemExit(3)")


def test_each_package_of_the_recipes_is_installed_and_has_a_reason():
    root = SETUP.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["recipes"]
    script = (root / ".ci" / "setup").read_text()
    assert 'extras["recipes"]' in script
    apart = re.search("^DATA_PACKAGES='(.*)'$", script, re.MULTILINE)[1].split()
    assert {package.split("==")[0] for package in apart} <= set(extra)
    reasons = (root / "docs" / "dependencies.md").read_text()
    for package in extra:
        assert f"| `{re.split('[<>=]', package)[0]}` |" in reasons, package
