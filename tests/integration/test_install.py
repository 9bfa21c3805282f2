"""README's `pip install --no-build-isolation .` in a fresh environment of Python."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers.launcher import clean_environment
from helpers.tree import ROOT, tracked_files

# Stands in for packages of hundreds of MB, which would be installed first.
TENSORFLOW = sysconfig.get_path("purelib")
FRESH = ["pip==23.2.1", "setuptools==65.5.0"]  # what Python 3.11 brings
SOURCES = ("tfdist", "tfdist_ops", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def run(command, cwd, timeout_s=60):
    environ = clean_environment(
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    del environ["PYTHONPATH"]
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.slow
def test_it_installs_as_the_readme_says(tmp_path):
    source = tmp_path / "tfdist"
    for file in tracked_files(SOURCES):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    made = run([sys.executable, "-m", "venv", str(tmp_path / "env")], tmp_path, 120)
    assert made.returncode == 0, made.stderr
    python = tmp_path / "env" / "bin" / "python"
    old = run([python, "-m", "pip", "install", "-q", *FRESH], tmp_path, 120)
    if old.returncode != 0:
        pytest.skip(f"PyPI cannot be reached: {old.stderr[-500:]}")
    site = run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        tmp_path,
    ).stdout.strip()
    # Behind the environment's own packages: its setuptools is the one that builds.
    Path(site, "tensorflow.pth").write_text(TENSORFLOW)

    done = run(
        [python, "-m", "pip", "install", "--no-build-isolation", "."], source, 1000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = run([python, "-m", "pip", "show", "tfdist"], tmp_path).stdout
    assert "License: Apache-2.0" in shown
    question = "import tfdist; tfdist.init(); print(tfdist.__file__, tfdist.size())"
    there = run([python, "-c", question], tmp_path)
    assert there.stdout == f"{site}/tfdist/__init__.py 1\n", there.stderr
    here = run([python, "-c", question], source)
    assert f"installed in {site}" in here.stderr
    assert "Start Python, or tfdistrun, in another folder" in here.stderr
