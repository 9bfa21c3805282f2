"""The set-up: setup.py says what is missing, and every package has its reason."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
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


def test_the_setuptools_of_a_fresh_environment_can_read_the_settings(monkeypatch):
    """Of Python 3.11: 65.5, which refuses a license that is a text."""
    settings = tomllib.loads(SETUP.with_name("pyproject.toml").read_text())
    assert "setuptools>=65.5" in settings["build-system"]["requires"]
    assert not isinstance(settings["project"].get("license"), str)
    assert settings["project"]["dynamic"] == ["license", "version"]
    told = {}
    monkeypatch.setattr(setuptools, "setup", lambda **more: told.update(more))
    runpy.run_path(str(SETUP))
    assert told["license"] == "Apache-2.0"


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
    # The build asked the real question, which takes seconds; this one is quick.
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


@pytest.mark.parametrize("werror, told", [("1", "ON"), ("0", "OFF"), (None, "OFF")])
def test_cmake_is_always_told_whether_warnings_are_errors(
    script, monkeypatch, tmp_path, werror, told
):
    commands = []
    build = script["BuildNative"]
    for name, replaced in {
        "find_tensorflows": lambda: [],
        "remove_others": lambda tensorflows, output: None,  # of this tree
        "check_tools": lambda: ("cmake", []),
        "build_folder": lambda: tmp_path,
        "run_tool": lambda *command: commands.append(command),
    }.items():
        monkeypatch.setitem(build.run.__globals__, name, replaced)
    monkeypatch.delenv("WERROR", raising=False)
    if werror is not None:
        monkeypatch.setenv("WERROR", werror)
    command = build(setuptools.Distribution({"version": "1"}))
    command.ensure_finalized()
    command.inplace = True
    command.run()
    assert f"-DTFDIST_WERROR={told}" in commands[0]
    assert (tmp_path / "built").exists()


def test_the_operations_are_built_for_each_named_interpreter(
    script, monkeypatch, tmp_path
):
    for version in ("2.18.1", "2.21.0"):
        python = tmp_path / version
        python.write_text(
            f'#!/bin/sh\necho noise; echo \'{{"version": "{version}"}}\'\n'
        )
        python.chmod(0o755)
    named = f"{tmp_path / '2.18.1'}:{tmp_path / '2.21.0'}"
    monkeypatch.setenv("BUILD_PYTHONS", named)
    found = script["find_tensorflows"]()
    assert [one["version"] for one in found] == ["2.18.1", "2.21.0"]


def test_a_variable_of_the_build_may_stay_set_when_ranks_start():
    """`tfdist.init()` refuses variables that begin with TFDIST_ and are no settings."""
    names = re.findall(r'environ(?:\.get\(|\[)"(\w+)"', SETUP.read_text())
    assert names and not [name for name in names if name.startswith("TFDIST_")]


def test_libraries_for_another_tensorflow_do_not_stay(script, tmp_path):
    for name in ("tf-2.20.so", "tf-2.21.so", "tf.so", "core.so", "xla.so"):
        (tmp_path / f"libtfdist_{name}").touch()
    script["remove_others"]([{"version": "2.21.0"}], tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["libtfdist_core.so", "libtfdist_tf-2.21.so", "libtfdist_xla.so"]


def test_operations_are_compiled_again_only_when_something_changed(
    script, monkeypatch, tmp_path
):
    build, compiled = script["build_operations"], []
    compiler = script["load_op_compiler"]()

    def compile_operations(tensorflow, source, core, output):
        compiled.append(tensorflow.version)
        output.touch()
        return ""

    monkeypatch.setattr(compiler, "compile_operations", compile_operations)
    monkeypatch.setitem(build.__globals__, "load_op_compiler", lambda: compiler)
    monkeypatch.setitem(build.__globals__, "build_folder", lambda: tmp_path)
    described = {"version": "2.18.0", "include": "", "library": "", "flags": ["-Da"]}
    build(described, tmp_path)
    build(described, tmp_path)
    assert compiled == ["2.18.0"]
    build({**described, "version": "2.18.1"}, tmp_path)
    build({**described, "version": "2.18.1", "flags": ["-Db"]}, tmp_path)
    (tmp_path / "libtfdist_tf-2.18.so").unlink()
    build({**described, "version": "2.18.1", "flags": ["-Db"]}, tmp_path)
    assert compiled == ["2.18.0", *["2.18.1"] * 3]


def test_the_core_is_built_anew_when_warnings_become_errors(tmp_path):
    shutil.copy(SETUP.parent / "Makefile", tmp_path)
    for name in ("pyproject.toml", "setup.py", ".ci/setup", "tfdist_ops/a.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".venv").mkdir()

    def would_build(**variables):
        told = {"PATH": os.environ["PATH"], **variables}
        done = subprocess.run(
            ["make", "-n", "setup"],
            **{"cwd": tmp_path, "env": told, "capture_output": True, "text": True},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return ".ci/setup build" in done.stdout

    (tmp_path / ".venv" / ".installed").touch()
    assert would_build()
    (tmp_path / ".venv" / ".built").touch()
    assert not would_build()
    assert would_build(WERROR="1")
    (tmp_path / ".venv" / ".built-strict").touch()
    assert not would_build(WERROR="1")
    assert not would_build()


def test_objects_that_are_older_than_a_source_are_not_tested(script, tmp_path):
    core, build = tmp_path / "tfdist_ops", tmp_path / "build"
    for folder in (core / "scheduler", build):
        folder.mkdir(parents=True)
    shutil.copy(SETUP.parent / "tfdist_ops" / "fresh.cmake", core)
    (core / "CMakeLists.txt").touch()
    header = core / "scheduler" / "a.h"
    header.touch()

    def refusal():
        done = subprocess.run(
            [
                *(script["find_program"]("cmake"), f"-DBUILT={build}"),
                *("-P", str(core / "fresh.cmake")),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode == 0) == (done.stderr == "")
        return " ".join(done.stderr.split())

    assert "is not a complete build of the core" in refusal()
    (build / "built").touch()
    os.utime(header, ns=(0, 0))
    os.utime(core / "CMakeLists.txt", ns=(0, 0))
    assert refusal() == ""
    os.utime(build / "built", ns=(1, 1))
    header.touch()
    assert f"{header} is newer than the core in" in refusal()
    assert "make setup" in refusal()


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


# An interpreter of an environment: "pip" beside it says whether it has pip, and
# "ensurepip" whether it can install it.
INTERPRETER = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  "-c import sys"*) exit {unsupported} ;;
  --version) echo "Python 3.10.1" ;;
  "-m pip --version") [ -e "$here/pip" ] ;;
  "-m pip --python"*) exit 1 ;;
  "-m ensurepip") [ -e "$here/ensurepip" ] && touch "$here/pip" ;;
esac
"""


@pytest.mark.parametrize(
    ("beside", "unsupported", "ends", "text"),
    [
        ("pip", 0, 0, "installing TensorFlow"),
        ("ensurepip", 0, 0, "installing TensorFlow"),
        ("", 0, 1, ".venv has no pip"),
        ("pip", 1, 1, ".venv has Python 3.10.1; expected Python 3.11"),
    ],
)
def test_what_is_installed_in_an_environment_stays(
    tmp_path, beside, unsupported, ends, text
):
    """As in one that `uv venv` has made, which has no pip."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / ".venv" / "installed").touch()
    if beside:
        (folder / beside).touch()
    for program, code in ((folder / "python", unsupported), (tmp_path / "python3", 0)):
        program.write_text(INTERPRETER.format(unsupported=code))
        program.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    setup = shutil.copy(SETUP.with_name(".ci") / "setup", tmp_path / ".ci")
    environ = {**os.environ, "PYTHON": str(tmp_path / "python3"), "CXX": "true"}
    done = subprocess.run(
        [setup, "packages"],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    assert (done.returncode, text in done.stdout) == (ends, True), done.stdout
    assert (tmp_path / ".venv" / "installed").exists()
