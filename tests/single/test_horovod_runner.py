"""horovod.run and what programs import from horovod.runner."""

import os
import sys
import threading
from pathlib import Path

import pytest
from helpers.launcher import clean_environment
from helpers.unplain import Point

from tfdist.core import pickling
from tfdist.horovod import runner
from tfdist.horovod.runner import words_of
from tfdist.horovod.runner.common.util.env import get_env_rank_and_size
from tfdist.horovod.runner.util.threads import in_thread
from tfdist.launch import function_files


@pytest.fixture
def alone(monkeypatch):
    """No launcher's variables."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4"}, (2, 4)),
        ({"TFDIST_RANK": "1", "TFDIST_SIZE": "3"}, (1, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3", "HOROVOD_RANK": "2"}, (1, 3)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, (5, 6)),
    ],
)
def test_a_process_knows_its_place_before_init(alone, environ, place):
    for name, value in environ.items():
        alone.setenv(name, value)
    assert get_env_rank_and_size() == place


def test_a_place_that_is_no_number_is_an_error(alone):
    alone.setenv("HOROVOD_RANK", "first")
    alone.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ValueError, match="numbers, got 'first' and '2'"):
        get_env_rank_and_size()


def test_a_function_runs_in_a_thread():
    seen = []
    thread = in_thread(
        lambda *args: seen.append((threading.current_thread().name, args)),
        (1, 2),
        name="beside",
        daemon=False,
    )
    thread.join(10)
    assert seen == [("beside", (1, 2))]
    assert not thread.daemon
    assert in_thread(seen.clear).daemon


@pytest.mark.parametrize("silent", [True, False])
def test_what_a_thread_raises_is_told_unless_silent(silent, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    in_thread(int, ("no number",), silent=silent).join(10)
    assert [t.exc_type for t in told] == ([] if silent else [ValueError])


def test_arguments_of_a_thread_are_a_tuple():
    with pytest.raises(ValueError, match=r"got list: \[1\]. For one argument write"):
        in_thread(print, [1])


# ---- horovod.run ----


def test_parameters_become_flags_of_horovodrun():
    assert words_of(
        {
            "func": print,
            "num_proc": 2,
            "hosts": "localhost:2",
            "mpi_args": "-x NAME",
            "network_interfaces": ["eth0", "eth1"],
            "cooldown_range": (1, 2),
            "verbose": 2,
            "use_gloo": True,
            "use_mpi": False,
        }
    ) == [
        *("--num-proc=2", "--hosts=localhost:2", "--mpi-args=-x NAME"),
        *("--network-interfaces=eth0,eth1", "--blacklist-cooldown-range", "1", "2"),
        *("--verbose", "--gloo"),
    ]


def test_older_names_of_parameters_become_the_same_flags(alone, monkeypatch):
    alone.setenv("TFDIST_OBJECTS", "pickle")
    commands = []
    monkeypatch.setattr(runner, "finish", lambda _, command: commands.append(command))
    old = {"np": 2, "min_np": 1, "max_np": 2, "network_interface": "eth0,eth1"}
    new = {"num_proc": 2, "min_num_proc": 1, "max_num_proc": 2}
    for options in (old, new | {"network_interfaces": ["eth0", "eth1"]}, old | new):
        with pytest.raises(RuntimeError, match="exit code None"):
            runner.run(print, **options)
    words = [command[: command.index("--")] for command in commands]
    flags = ["--num-proc=2", "--min-num-proc=1", "--max-num-proc=2"]
    assert words[0] == words[1] == [*flags, "--network-interfaces=eth0,eth1"]
    assert words[2] == words[0]


def test_it_has_to_be_asked_for(alone):
    with pytest.raises(RuntimeError, match="set TFDIST_OBJECTS=pickle"):
        runner.run(print, np=2)


def test_other_hosts_are_refused_before_anything_starts(alone):
    alone.setenv("TFDIST_OBJECTS", "pickle")
    with pytest.raises(NotImplementedError, match="only on this host, got far.invalid"):
        runner.run(print, np=2, hosts="localhost:1,far.invalid:1")
    with pytest.raises(ValueError, match="expected a number of slots"):
        runner.run(print, np=2, hosts="localhost:many")


def test_a_function_of_the_program_needs_cloudpickle(alone):
    alone.setenv("TFDIST_OBJECTS", "pickle")
    alone.setattr(pickling, "can_pickle_by_value", lambda: False)

    def train():
        return 1

    train.__module__ = "__main__"
    with pytest.raises(TypeError, match="pip install cloudpickle"):
        runner.run(train, np=2)


def test_every_rank_returns_its_result(alone, tmp_path, capfd):
    (tmp_path / "program_of_mine.py").write_text(
        "from helpers.unplain import Point\n"
        "from tfdist.core import runtime, world\n"
        "def train(start, step=1):\n"
        "    import horovod\n"
        "    world.start()\n"
        "    print('at', runtime.rank(), horovod.__name__)\n"
        "    return Point(start.x + step * runtime.rank()), runtime.size()\n"
        "def fail():\n"
        "    raise OSError('broken')\n"
    )
    alone.chdir(tmp_path)
    alone.syspath_prepend(str(tmp_path))
    alone.setenv("TFDIST_OBJECTS", "pickle")
    import program_of_mine

    found = runner.run(
        program_of_mine.train,
        (Point(5),),
        {"step": 10},
        np=2,
        executable=sys.executable,
    )
    assert found == [(Point(5), 2), (Point(15), 2)]
    assert "[rank 1] at 1 tfdist.horovod" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="exit code 1; see the report"):
        runner.run(program_of_mine.fail)
    assert "OSError: broken" in capfd.readouterr().err


def write_result(folder, rank, result, size=2):
    name = f"result.{rank}"
    sealed = function_files.seal((size, result), name, b"k")
    function_files.write(folder / name, sealed)


def test_ranks_write_their_results_at_once(tmp_path, monkeypatch):
    """Rank 1 writes while rank 0 has written, and has not given the file its name."""
    rename = Path.rename

    def later(part, path):
        monkeypatch.setattr(Path, "rename", rename)
        write_result(tmp_path, 1, 6)
        return rename(part, path)

    monkeypatch.setattr(Path, "rename", later)
    write_result(tmp_path, 0, 5)
    assert function_files.results(tmp_path, b"k") == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.0", "result.1"]


def change_place(rank, size, result):
    """The program of a rank that gets another place while it trains."""
    os.environ.update(TFDIST_RANK=str(rank), TFDIST_SIZE=str(size))
    if result is None:
        raise ValueError("no result")
    return result


def test_results_have_the_ranks_and_the_number_of_ranks_of_the_end(alone, tmp_path):
    function_files.write(tmp_path / function_files.KEY, b"k")
    (tmp_path / "result.1.1.part").touch()  # by a rank that was killed

    def run_rank(*end):
        alone.setenv("TFDIST_RANK", "1")
        alone.setenv("TFDIST_SIZE", "3")
        call = function_files.seal((change_place, end, {}), function_files.CALL, b"k")
        function_files.write(tmp_path / function_files.CALL, call)
        function_files.call(tmp_path, get_env_rank_and_size)

    run_rank(0, 2, 5)  # the rank that is left of three
    run_rank(1, 2, 6)  # a newcomer
    assert function_files.results(tmp_path, b"k") == [5, 6]
    with pytest.raises(ValueError, match="no result"):
        run_rank(0, 1, None)
    assert function_files.first_failure(tmp_path).rank == 0


def test_a_result_that_is_missing_or_was_changed_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="on rank 0 cannot be read"):
        function_files.results(tmp_path, b"k")
    write_result(tmp_path, 0, 5)
    with pytest.raises(RuntimeError, match="on rank 1 cannot be read"):
        function_files.results(tmp_path, b"k")
    sealed = function_files.seal((2, 5), "result.0", b"k")
    function_files.write(tmp_path / "result.1", sealed)
    assert (tmp_path / "result.1").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError, match="Nothing was unpickled"):
        function_files.results(tmp_path, b"k")
