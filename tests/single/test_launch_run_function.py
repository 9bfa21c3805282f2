"""tfdist.run without ranks: output and end of its launcher, the path of the ranks."""

import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
from helpers.deadline import deadline
from helpers.launcher import until

from tfdist.launch import function_files, run_function


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Writes a program in the place of tfdistrun; returns its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        (tmp_path / "a_launcher.py").write_text(text)
        return "a_launcher"

    return write


def test_a_progress_bar_stays_one_line(launcher, capsys):
    module = launcher(
        "import os, time\n"
        r"for part in (b'1/2\r', b'2/2 \xc3', b'\xa9\r\n', b'\xff\n'):"
        "\n    os.write(1, part); time.sleep(0.05)\n"
    )
    assert run_function.finish(module, [], is_echoed=True) == 0
    assert capsys.readouterr().out == "1/2\r2/2 \u00e9\r\n\ufffd\n"


@deadline(30)
def test_a_second_interrupt_ends_a_launcher_whose_ranks_still_save(
    launcher, tmp_path, monkeypatch
):
    """The second signal ends the job at once, as that of tfdistrun."""
    module = launcher(
        "import os, pathlib, signal, time\n"
        "def first(*_):\n"
        "    signal.signal(signal.SIGTERM, second)\n"
        "    os.write(1, b'x' * 100_000)\n"
        "    pathlib.Path('first').touch()\n"
        "def second(*_):\n"
        "    pathlib.Path('second').touch()\n"
        "    os._exit(1)\n"
        "signal.signal(signal.SIGTERM, first)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.chdir(tmp_path)
    seen = []

    def interrupt():
        for name in ("ready", "first"):
            until((tmp_path / name).exists, 20)
            time.sleep(0.5)
            seen.append((tmp_path / "second").exists())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_function.finish(module, [], is_echoed=True)
    thread.join()
    assert (tmp_path / "second").exists() and seen == [False, False]


@pytest.mark.parametrize("code", [3, 143])
def test_exit_code_143_is_not_the_reason_for_a_failure(tmp_path, code):
    call = run_function.FunctionCall(sys.exit, (code,), {})
    with call:
        with pytest.raises(SystemExit):
            function_files.call(call.folder, lambda: (1, 2))
        reason = run_function._reason(call.folder, 137)
    assert "exit code 137" in reason if code == 143 else "SystemExit: 3" in reason


def test_the_ranks_get_all_folders_except_those_of_python(monkeypatch):
    stdlib = sysconfig.get_path("stdlib")
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    own = [f"{stdlib}-extra", "/data/more.zip", "/data"]
    pythons = [
        stdlib,
        f"{stdlib}/lib-dynload",
        f"{Path(stdlib).parent}/python{version}.zip",
        sysconfig.get_path("purelib"),
    ]
    monkeypatch.setattr(sys, "path", [*pythons, "", Path("/ignored"), *own])
    monkeypatch.chdir("/usr")
    assert run_function._own_path() == ["/usr", *own]
