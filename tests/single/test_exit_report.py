"""The notice about an exception that ends a rank: whose fault it is, and its length."""

import subprocess
import sys

import pytest
from helpers.launcher import clean_environment

from tfdist.core import exit_report, failed_rank, mpi, native, world
from tfdist.core.rendezvous import failure_report

LOST = {"kind": "rank_failed", "rank": 0, "cause": "OSError: the disk is full"}


def lost(**more):
    return native.CoreError(native.ABORTED, "rank 0 failed", {**LOST, **more})


def raised(program):
    """The exception that ends a program, as its hook gets it."""
    try:
        program()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def again():
    try:
        raise lost()
    except native.CoreError:
        raise


def wrapped():
    try:
        raise lost()
    except native.CoreError as error:
        raise RuntimeError("training failed") from error


def while_handled():
    try:
        raise lost()
    except native.CoreError:
        try:
            raise KeyError("clean-up")
        except KeyError as error:
            raise ValueError("of the clean-up") from error


def circle():
    error = lost()
    error.__cause__ = error  # a circle, as some libraries make
    raise error


@pytest.mark.parametrize("program", [again, wrapped, while_handled, circle])
def test_who_raises_because_of_another_rank_blames_it(program):
    error = raised(program)
    assert exit_report.culprit_rank(error, 1) == 0
    rank, found = exit_report.find_culprit(error, 1)
    assert rank == 0 and found.payload["rank"] == 0


def handled():
    try:
        raise lost()
    except native.CoreError:
        pass
    raise ValueError("its own")


def hidden():
    try:
        raise lost()
    except native.CoreError:
        raise ValueError("says that it is another matter") from None


def evicted():
    raise lost(kind="no_majority")


@pytest.mark.parametrize("program", [handled, hidden, evicted])
def test_who_fails_itself_blames_nobody(program):
    assert exit_report.culprit_rank(raised(program), 1) is None


def test_a_rank_that_others_blame_does_not_blame_itself():
    assert exit_report.culprit_rank(lost(), 0) is None
    assert exit_report.culprit_rank(lost(rank=-1), 1) is None


TRACEBACK = """Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    model.fit(
    ^^^^^^^^^^
  File "/site/keras/src/utils/traceback_utils.py", line 122, in error_handler
    raise e.with_traceback(filtered_tb) from None
  File "/site/tfdist/collectives/all_ranks.py", line 59, in run_on_rank
    raise failure
  File "/job/train.py", line 6, in on_epoch_end
    raise OSError("full")
OSError: full
"""
SHORT = """Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    model.fit(
    ^^^^^^^^^^
  File "/job/train.py", line 6, in on_epoch_end
    raise OSError("full")
OSError: full
"""


def test_frames_of_libraries_are_left_out():
    folders = ["/site/keras", "/site/tfdist"]
    assert exit_report.without_libraries(TRACEBACK, folders) == SHORT
    assert exit_report.without_libraries(SHORT, folders) == SHORT
    assert exit_report.without_libraries(TRACEBACK, []) == TRACEBACK
    assert exit_report.without_libraries(TRACEBACK, ["/site/ker"]) == TRACEBACK
    graph = (
        "Detected at node f defined at (most recent call last):\n"
        '  File "/site/keras/a.py", line 1, in fit\n\n'
        '  File "/site/keras/b.py", line 2, in step\n\n'
        '  File "/job/train.py", line 15, in loss\n\nValueError: 11\n'
    )
    assert exit_report.without_libraries("a\n\n\nb\n\nc", []) == "a\n\nb\n\nc"
    assert exit_report.without_libraries(graph, folders) == (
        "Detected at node f defined at (most recent call last):\n"
        '  File "/job/train.py", line 15, in loss\n\nValueError: 11\n'
    )


def test_the_place_is_where_the_program_was():
    error = raised(again)
    assert exit_report.location(error, []).startswith(", at test_exit_report.py:")
    assert exit_report.location(error, [""]) == ""  # all is a library's
    assert exit_report.location(ValueError("never raised"), []) == ""


@pytest.mark.parametrize(("uncaught", "finalizes"), [(False, True), (True, False)])
def test_an_error_that_the_program_caught_does_not_keep_mpi_from_ending(
    monkeypatch, uncaught, finalizes
):
    """Otherwise rank 0, which raised another error, would wait in MPI_Finalize."""
    found = []
    monkeypatch.setattr(failed_rank, "last", lambda: (0, "RankFailedError: refused"))
    monkeypatch.setattr(failure_report, "send", lambda *words: 0)
    monkeypatch.setattr(world, "shutdown", lambda: None)
    monkeypatch.setattr(mpi, "finish", lambda: found.append(mpi._state.may_finish))
    monkeypatch.setattr(mpi._state, "may_finish", True)
    monkeypatch.setattr(world._program, "reported", uncaught)
    world._leave()
    assert found == [finalizes]


def test_an_error_at_the_prompt_does_not_end_the_program():
    """Python calls `sys.excepthook` for each statement that raises, and goes on."""
    lines = [
        "from helpers import core_client",
        "core_client.world.start()",
        "1 / 0",
        "core_client.barrier('first')",
        "core_client.barrier('second')",
        "print('failure:', core_client.native.failure())",
    ]
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="\n".join([*lines, ""]),
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "failure: None" in done.stdout, done.stderr
    assert "ZeroDivisionError" in done.stderr
