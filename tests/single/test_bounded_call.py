"""Functions that may wait forever, and callers with a deadline."""

import signal
import threading
import time

import pytest

from tfdist.core.bounded_call import BoundedThread


def test_one_thread_runs_all_functions():
    thread = BoundedThread("bounded")
    names = {thread.call(lambda: threading.current_thread().name, None) for _ in "ab"}
    assert names == {"bounded"}
    assert not thread.is_stuck


def test_a_function_that_does_not_return_is_given_up_at_the_deadline():
    thread, release = BoundedThread("bounded"), threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        thread.call(release.wait, begin + 0.2)
    assert 0.2 <= time.monotonic() - begin < 5.0
    assert thread.is_stuck
    release.set()


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also in a job that a shell runs with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_wait_that_is_interrupted_leaves_the_thread_stuck():
    thread, release = BoundedThread("bounded"), threading.Event()
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        thread.call(release.wait, time.monotonic() + 30.0)
    assert thread.is_stuck
    release.set()
