"""Which thread may use which name: two threads without a known order are refused."""

import _thread
import os
import threading

import pytest

import tfdist
from tfdist.collectives.tf_ops.op_names import NameOwners, key_of
from tfdist.core import exit_report, runtime, world

X, Y = key_of("x"), key_of("y")


class Stepwise:
    """A thread that uses names when it is told to, and ends when it is told to."""

    def __init__(self, owners, name):
        self._owners = owners
        self._asked, self._answered = threading.Event(), threading.Event()
        self._keys = []
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self):
        while self._asked.wait(timeout=20) and self._keys:
            self._asked.clear()
            self.found = self._owners.use(self._keys)
            self._answered.set()

    def use(self, *keys):
        self._keys = list(keys)
        self._asked.set()
        assert self._answered.wait(timeout=20)
        self._answered.clear()
        return self.found

    def end(self):
        self._keys = []
        self._asked.set()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()


@pytest.fixture
def owners():
    return NameOwners()


@pytest.fixture
def make(owners):
    made = []

    def make_one(name):
        made.append(Stepwise(owners, name))
        return made[-1]

    yield make_one
    for one in made:
        one.end()


def test_one_thread_may_use_any_name_again(owners):
    assert [owners.use([X]), owners.use([X, Y]), owners.use([Y])] == [None] * 3


def test_of_two_threads_that_run_side_by_side_the_second_is_refused(make):
    a, b = make("a"), make("b")
    assert a.use(X) is None
    assert b.use(X) == (X, "a")
    assert a.use(X) is None


def test_the_second_is_refused_also_when_the_first_has_ended(make):
    a, b = make("a"), make("b")
    assert a.use(X) is None
    a.end()
    assert b.use(X)[0] == X


def test_threads_may_use_different_names_and_process_sets(make):
    a, b = make("a"), make("b")
    of_set = key_of("x", process_set=3)
    assert [a.use(X), b.use(Y), b.use(of_set), a.use(X), b.use(of_set)] == [None] * 5
    assert b.use(of_set, X) == (X, "a")


def test_sends_to_different_ranks_are_different_names():
    keys = {key_of("s", dst=1), key_of("s", dst=2), key_of("s", src=1), key_of("s")}
    assert len(keys) == 4


def test_a_thread_that_was_started_after_the_last_use_may_follow(make):
    a = make("a")
    assert a.use(X) is None
    b = make("b")
    assert b.use(X) is None
    assert a.use(X) == (X, "b")  # which may be first on another rank


def test_a_thread_that_was_started_before_the_last_use_may_not_follow(make):
    a = make("a")
    assert a.use(X) is None
    b = make("b")
    assert a.use(X) is None
    assert b.use(X) == (X, "a")


def test_the_main_thread_may_follow_a_thread_that_has_ended(owners, make):
    assert owners.use([X]) is None
    a = make("a")
    assert a.use(X) is None
    assert owners.use([X]) == (X, "a")
    a.end()
    assert owners.use([X]) is None


def test_threads_that_python_did_not_start_count_as_one(owners):
    found = []

    def use_in_new_thread():
        ended = threading.Event()

        def work():
            found.append(owners.use([X]))
            ended.set()

        _thread.start_new_thread(work, ())
        assert ended.wait(timeout=20)

    use_in_new_thread()
    use_in_new_thread()
    assert found == [None, None]
    assert owners.use([Y]) is None
    assert owners.use([X]) is not None


def test_no_more_names_are_remembered_than_have_room(owners):
    for n in range(5000):
        assert owners.use([key_of(f"loss {n}")]) is None
    assert len(owners._uses) == 4096


def test_an_error_that_a_thread_does_not_catch_makes_the_process_fail(monkeypatch):
    told, codes = [], []
    monkeypatch.setattr(
        exit_report, "report_end", lambda error, _rank: told.append(error)
    )
    monkeypatch.setattr(runtime, "state", runtime.State())
    monkeypatch.setattr(world, "_program", world._Program())
    monkeypatch.setattr(world, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", codes.append)

    def end_with(error):
        arguments = (type(error), error, None, threading.current_thread())
        world._record_failed_thread(threading.ExceptHookArgs(arguments))
        world._leave()

    end_with(ValueError("of the user's own code"))
    assert (told, codes) == ([], [])
    error = tfdist.ThreadError("two threads")
    end_with(error)
    assert (told, codes) == ([error], [1])
