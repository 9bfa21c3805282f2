"""Operations are compiled once for each TensorFlow, and say why they cannot be."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import tensorflow as tf
from helpers.launcher import clean_environment
from helpers.tree import ROOT

from tfdist.core import op_compiler

SOURCE = ROOT / "tfdist_ops"
TENSORFLOW = op_compiler.TensorFlow("2.30.1", "/include", "/library", ("-std=c++20",))
# Writes what it is told into the file behind -o.
COMPILER = """#!/bin/sh
echo run >> {runs}
sleep 0.3
echo "$0: warning: of no importance" >&2
while [ "$1" != -o ]; do echo "$1"; shift; done > "{folder}/words"
cat > "$2"
exit {code}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Sets a compiler that ends with an exit code; returns how often it ran."""
    runs = tmp_path / "runs"

    def install(code=0):
        program = tmp_path / "compiler"
        program.write_text(COMPILER.format(runs=runs, folder=tmp_path, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("CXX", f"{program} --own")
        return lambda: len(runs.read_text().split()) if runs.exists() else 0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXXFLAGS", raising=False)
    return install


def first_use(said=lambda line: None):
    return op_compiler.compiled_on_first_use(TENSORFLOW, SOURCE, SOURCE, said)


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("2.18.0", "2.18.0", True),
        ("2.18.0", "2.18.1", True),
        ("2.18.1", "2.19.1", False),
        ("2.1.0", "2.18.0", False),
        ("2.22.0-rc0", "2.22.0", False),
        ("2.22.0", "2.22.0-dev20260101", False),
        ("2.22.0-rc0", "2.22.0-rc0", True),
        ("", "2.21.0", False),
    ],
)
def test_releases_of_a_minor_version_fit_each_other(built, running, fits):
    assert op_compiler.fits(built, running) == fits


def test_every_header_of_tfdist_is_among_the_sources():
    files = op_compiler.source_files(SOURCE)
    assert len(files) == len(set(files))
    names = {str(file.relative_to(SOURCE)) for file in files}
    assert {"tf/allreduce_op.cc", "base/status.h", "runtime/c_api.h"} <= names
    folders = tuple(f"{f.name}/" for f in SOURCE.iterdir() if f.is_dir())
    for file in files:
        for name in op_compiler._INCLUDE.findall(file.read_text()):
            assert name in names or not name.startswith(folders)


def test_the_compiler_gets_all_sources_and_the_flags_of_tensorflow(compiler, tmp_path):
    runs = compiler()
    said = []
    path = first_use(said.append)
    assert path.name == "libtfdist_tf-2.30.so"
    assert tmp_path / "cache" / "tfdist" in path.parents
    text = path.read_text()
    assert '#include "tf/allreduce_op.cc"\n' in text
    assert '#include "base/status.cc"\n' in text
    words = (tmp_path / "words").read_text().splitlines()
    assert words[0] == "--own"
    assert {"-std=c++20", '-DTFDIST_TF_VERSION="2.30.1"', "/include"} <= set(words)
    assert len(said) == 1 and "TensorFlow 2.30.1" in said[0]
    assert first_use(said.append) == path
    assert runs() == len(said) == 1


def test_the_library_is_used_again_whatever_the_umask(compiler):
    runs = compiler()
    before = os.umask(0o002)  # files are then writable for the group
    try:
        path = first_use()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644  # others may read it if installed
    assert first_use() == path
    assert runs() == 1


def test_ranks_that_start_together_compile_once(compiler):
    runs = compiler()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(first_use())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(found) == 4 and len(set(found)) == 1
    assert runs() == 1


def test_a_failed_compilation_shows_why_and_is_not_kept(compiler, tmp_path):
    runs = compiler(code=3)
    with pytest.raises(op_compiler.CompileError) as caught:
        first_use()
    assert "exit code 3" in str(caught.value)
    assert "of no importance" in str(caught.value)
    with pytest.raises(op_compiler.CompileError):
        first_use()
    assert runs() == 2
    assert [f.name for f in (tmp_path / "cache").rglob("*") if f.is_file()] == ["lock"]


def test_a_cache_that_cannot_be_written_names_the_variable(compiler, monkeypatch):
    compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(op_compiler.CompileError, match="Set XDG_CACHE_HOME"):
        first_use()


def test_a_cache_that_others_can_write_is_refused(compiler, tmp_path):
    """Its libraries are code that this process would run."""
    compiler()
    folder = first_use().parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(op_compiler.CompileError, match="another user could have put"):
        first_use()
    folder.chmod(0o700)
    assert first_use().parent == folder


def test_the_environment_may_be_odd(compiler, monkeypatch):
    compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/nowhere")
    assert str(op_compiler.cache_folder()) == "/nowhere/.cache/tfdist"
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(op_compiler.CompileError, match="CXX=.* cannot be read"):
        first_use()


def test_a_compiler_that_is_not_there_is_named(compiler, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(op_compiler.CompileError, match="tried no-such-compiler -O1"):
        first_use()


def test_the_key_depends_on_all_that_the_library_depends_on(tmp_path, monkeypatch):
    monkeypatch.delenv("CXXFLAGS", raising=False)
    for file in op_compiler.source_files(SOURCE):
        copy = tmp_path / file.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    key = op_compiler.cache_key(tmp_path, TENSORFLOW)
    assert key == op_compiler.cache_key(SOURCE, TENSORFLOW)
    keys = [
        op_compiler.cache_key(tmp_path, replace(TENSORFLOW, **changed))
        for changed in (
            {"version": "2.30.2"},
            {"flags": ()},
            {"library": str(tmp_path)},
        )
    ]
    assert keys.pop() == key  # there is no TensorFlow in either folder
    (tmp_path / op_compiler.FRAMEWORK).touch()
    built = replace(TENSORFLOW, library=str(tmp_path))
    keys.append(op_compiler.cache_key(tmp_path, built))
    monkeypatch.setenv("CXXFLAGS", "-O1")
    keys.append(op_compiler.cache_key(tmp_path, TENSORFLOW))
    monkeypatch.delenv("CXXFLAGS")
    with (tmp_path / "base" / "status.h").open("a") as file:
        file.write("// changed\n")
    keys.append(op_compiler.cache_key(tmp_path, TENSORFLOW))
    assert len({key, *keys}) == 6


PROGRAM = """
import pathlib, sys, tfdist
from tfdist.collectives.tf_ops import op_library
op_library.LIBRARY_PATH = pathlib.Path("/nowhere.so")
tfdist.init()
print(tfdist.allreduce(2.5).numpy(), op_library.library_path())
"""


@pytest.mark.slow
def test_compiled_operations_run(tmp_path):
    environ = clean_environment(XDG_CACHE_HOME=str(tmp_path))
    for compilations in (1, 0):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            **{"env": environ, "cwd": ROOT, "capture_output": True, "text": True},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"2.5 {tmp_path}/tfdist/")
        assert done.stderr.count("compiling tfdist's operations") == compilations
    assert op_compiler.built_for(next(tmp_path.rglob("*.so"))) == tf.__version__
