"""`import horovod` means tfdist.horovod: by activate(), and under `--horovod`."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.deadline import deadline
from helpers.launcher import clean_environment, run

import tfdist.horovod
from tfdist.horovod._alias import AliasFinder

HOROVOD = "import tfdist.horovod; tfdist.horovod.activate()\n"


def python(code, *folders, **environ):
    """Runs a program; `folders` come first on its path."""
    environ = clean_environment(**environ)
    path = [*map(str, folders), environ["PYTHONPATH"]]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def real(tmp_path):
    """A folder with an installed Horovod."""
    folder = tmp_path / "site"
    (folder / "horovod" / "torch").mkdir(parents=True)
    (folder / "horovod" / "__init__.py").write_text("REAL = True\n")
    (folder / "horovod" / "torch" / "__init__.py").write_text("")
    return folder


@pytest.fixture
def active():
    """`activate()` in this process, taken back at the end."""
    tfdist.horovod.activate()
    yield
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, AliasFinder)]
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        del sys.modules[name]


@pytest.mark.usefixtures("active")
def test_one_object_has_two_names():
    importlib.import_module("horovod.tensorflow.keras.callbacks")
    importlib.import_module("horovod.keras.callbacks")
    hvd = importlib.import_module("horovod.tensorflow")
    from horovod.tensorflow.keras import callbacks

    assert hvd is tfdist.horovod.tensorflow
    assert callbacks is tfdist.horovod.tensorflow.keras.callbacks
    names = [name for name in sys.modules if name.split(".")[0] == "horovod"]
    assert len(names) > 5
    for name in names:
        module = sys.modules[name]
        assert module is sys.modules[f"tfdist.{name}"]
        assert module.__name__ == module.__spec__.name == f"tfdist.{name}"


def test_not_in_place_of_a_horovod_that_carries_the_tensors(monkeypatch):
    monkeypatch.setenv("TFDIST_ENGINE", "horovod")
    before = list(sys.meta_path)
    with pytest.raises(RuntimeError, match="Unset the variable, or start .* without"):
        tfdist.horovod.activate()
    assert sys.meta_path == before


@deadline(70)
def test_activate_and_the_package_load_no_tensorflow_and_may_come_twice():
    code = HOROVOD + HOROVOD + (
        "import horovod, sys; print(horovod is tfdist.horovod, 'tensorflow' in "
        "sys.modules, len([f for f in sys.meta_path if 'Alias' in str(f)]))"
    )  # fmt: skip
    assert python(code) == "True False 1"


@deadline(70)
def test_a_horovod_that_is_installed_is_left_alone_and_not_used(real):
    assert python("import horovod; print(horovod.REAL)", real) == "True"
    code = HOROVOD + "import horovod; print(hasattr(horovod, 'REAL'))"
    assert python(code, real) == "False"


@deadline(70)
def test_a_horovod_that_was_imported_before_is_an_error(real):
    said = python("import horovod\n" + HOROVOD, real)
    assert said.startswith("RuntimeError: Horovod itself has been imported")
    assert str(real) in said and "tfdistrun --horovod" in said


@deadline(70)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch", "for PyTorch keep Horovod"),
        ("spark.keras", "start the ranks with tfdistrun"),
        ("nothing", "docs/from-horovod.md"),
    ],
)
def test_a_part_that_does_not_exist_says_so(real, name, says):
    said = python(HOROVOD + f"import horovod.{name}", real)
    assert said.startswith("ModuleNotFoundError: No module named 'horovod.")
    assert says in said


@deadline(70)
@pytest.mark.parametrize(
    ("code", "starts"),
    [
        ("from horovod import torch", "ModuleNotFoundError: "),
        ("import horovod; horovod.ray", "AttributeError: "),
        ("import horovod.runner.launch", "ModuleNotFoundError: "),
        ("import horovod.run.run", "ModuleNotFoundError: "),
    ],
)
def test_a_part_that_does_not_exist_says_so_however_it_is_asked_for(code, starts):
    said = python(HOROVOD + code)
    assert said.startswith(starts) and "horovod" in said
    assert ("keep Horovod" if "torch" in code else "the ranks with tfdistrun") in said


# ---- tfdistrun --horovod ----

PRINT = (
    "import os, sys, horovod\n"
    "print(__name__, sys.argv[1:], horovod.__name__, os.environ['HOROVOD_RANK'],\n"
    "      os.environ['HOROVOD_LOCAL_SIZE'], os.environ['TFDIST_FUSION_BYTES'],\n"
    "      'tensorflow' in sys.modules)\n"
)


@deadline(90)
@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "-x", "1"],
        pytest.param([sys.executable, "train.py", "-x", "1"], marks=pytest.mark.slow),
        [sys.executable, "-m", "train", "-x", "1"],
        ["sh", "-c", f"{sys.executable} train.py -x 1"],
    ],
    ids=["script", "python", "module", "shell"],
)
def test_a_script_is_started_as_it_always_was(tmp_path, command):
    (tmp_path / "train.py").write_text(PRINT)
    done = run(
        tmp_path,
        *("--horovod", "-np", "2", *command),
        HOROVOD_FUSION_THRESHOLD="4096",
        HOROVOD_CYCLE_TIME="5",
    )
    assert done.code == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {r}] __main__ ['-x', '1'] tfdist.horovod {r} 2 4096 False"
        for r in range(2)
    ]
    assert done.stderr.count("HOROVOD_CYCLE_TIME has no effect") == 1


@deadline(60)
def test_horovodrun_does_the_same(tmp_path):
    (tmp_path / "train.py").write_text(PRINT)
    flags = ["-np", "2", "--fusion-threshold-mb", "1", "--cycle-time-ms", "3", "--gloo"]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch.horovod", *flags, "train.py", "-np", "7"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {r}] __main__ ['-np', '7'] tfdist.horovod {r} 2 {1 << 20} False"
        for r in range(2)
    ]
    named = re.findall(r"warning: (--[\w-]+) has no effect", done.stderr)
    assert named == ["--cycle-time-ms", "--gloo"]


@deadline(60)
def test_without_it_horovod_is_what_it_ever_was(tmp_path, real):
    (tmp_path / "train.py").write_text("import horovod; print(horovod.REAL)")
    path = os.pathsep.join([str(real), clean_environment()["PYTHONPATH"]])
    done = run(tmp_path, "-np", "1", sys.executable, "train.py", PYTHONPATH=path)
    assert done.stdout == "[rank 0] True\n" or done.stdout == "True\n"


@deadline(60)
def test_who_forgets_it_is_told(tmp_path):
    (tmp_path / "train.py").write_text("import horovod.tensorflow as hvd")
    done = run(tmp_path, "-np", "1", sys.executable, "train.py")
    assert done.code == 1
    assert "hint: start a program that was written for Horovod" in done.stderr
    (tmp_path / "train.py").write_text("import horovod.torch as hvd")
    done = run(tmp_path, "--horovod", "-np", "1", "train.py")
    assert done.code == 1
    assert "for PyTorch keep Horovod" in done.stderr and "hint:" not in done.stderr


@deadline(60)
def test_a_variable_that_means_nothing_ends_it_before_anything_starts(tmp_path):
    done = run(tmp_path, "--horovod", "-np", "2", "true", HOROVOD_LOG_LEVEL="loud")
    assert done.code == 2
    assert "HOROVOD_LOG_LEVEL='loud': expected one of" in done.stderr
    assert not (tmp_path / "tfdist-logs").exists()


@deadline(60)
def test_a_sitecustomize_of_the_users_own_runs_first(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.MINE = 1")
    (tmp_path / "train.py").write_text(
        "import sys, horovod\n"
        "print(MINE, horovod.__name__, sys.modules['sitecustomize'].__file__)"
    )
    path = os.pathsep.join([str(tmp_path), clean_environment()["PYTHONPATH"]])
    done = run(tmp_path, "--horovod", "-np", "1", "train.py", PYTHONPATH=path)
    own = tmp_path / "sitecustomize.py"
    assert done.stdout.split("] ")[-1] == f"1 tfdist.horovod {own}\n"


@deadline(60)
def test_a_sitecustomize_of_the_users_own_that_fails_takes_nothing_away(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')")
    (tmp_path / "train.py").write_text("import horovod; print(horovod.__name__)")
    path = os.pathsep.join([str(tmp_path), clean_environment()["PYTHONPATH"]])
    done = run(tmp_path, "--horovod", "-np", "1", "train.py", PYTHONPATH=path)
    assert done.stdout.split("] ")[-1] == "tfdist.horovod\n"
    assert "ValueError: mine" in done.stderr


@deadline(60)
def test_a_python_without_tfdist_runs_and_is_told_where_it_needs_horovod(tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "train.py").write_text("print('fine')\nimport horovod")
    (tmp_path / "tfdist").mkdir()  # hides the real one: it stands first on the path
    (tmp_path / "tfdist" / "__init__.py").write_text("raise ImportError('no numpy')")
    folder = Path(__file__).resolve().parents[2] / "tfdist" / "horovod" / "_path"
    done = subprocess.run(
        [sys.executable, "train.py"],
        env=clean_environment(PYTHONPATH=f"{folder}:{tmp_path}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "fine\n"
    assert "tfdist cannot be imported by" in done.stderr
    assert "ImportError('no numpy')" in done.stderr


@deadline(60)
def test_under_another_launcher_the_module_does_the_same(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, horovod\n"
        "print(__name__, sys.argv, horovod.__name__, os.environ['HOROVOD_RANK'])"
    )
    command = [sys.executable, "-m", "tfdist.horovod", "train.py", "-v"]
    done = subprocess.run(
        command,
        env=clean_environment(PMI_RANK="1", PMI_SIZE="2"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "__main__ ['train.py', '-v'] tfdist.horovod 1\n", done.stderr


@deadline(60)
def test_what_waits_for_imports_is_called_when_all_of_them_are_complete(tmp_path):
    (tmp_path / "outer.py").write_text("import inner; DONE = True")
    (tmp_path / "inner.py").write_text("import outer; DONE = True")
    code = (
        "import sys\n"
        "from tfdist.horovod._after_import import after_import\n"
        "def act(): print(sys.modules['outer'].DONE, sys.modules['inner'].DONE)\n"
        "after_import(['outer', 'inner'], act)\n"
        "import json, outer, inner\n"
        "print(type(outer.__spec__.loader).__name__, type(outer.__loader__).__name__)\n"
        "after_import(['outer'], act)"
    )
    assert python(code, tmp_path).splitlines() == [
        "True True",
        "SourceFileLoader SourceFileLoader",
        "True True",
    ]
