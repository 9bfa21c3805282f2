"""The event loop that runs the ranks of one host."""

import os
import signal
import sys
import time

import psutil
import pytest

from tfdist.launch import processes
from tfdist.launch.rank_loop import RankLoop


class Kept:
    """A stream that keeps what a rank prints."""

    def __init__(self):
        self.text, self.ended = b"", False

    def feed(self, data):
        self.text += data

    def end(self):
        self.ended = True


class Loop:
    """A loop with a guard; `paused` and `writers` are what the test says."""

    def __init__(self):
        self.exits, self.paused, self.writers = [], False, {}
        self.own = RankLoop(
            on_exit=lambda *end: self.exits.append(end),
            writers=lambda: self.writers,
            must_pause=lambda: self.paused,
        )
        self.guard = processes.Guard(f"test-{os.getpid()}")
        self.own.guard_with(self.guard)

    def start(self, rank, code):
        kept = Kept(), Kept()
        environ = {**os.environ, processes.JOB_TAG_VARIABLE: self.guard.job_tag}
        self.own.start(
            rank,
            *kept,
            command=[sys.executable, "-I", "-S", "-c", code],
            environ=environ,
            terminal_columns=None,
            processors=None,
            is_elastic=False,
        )
        return kept

    def until(self, done, limit_s=20.0):
        self.own.run_while(lambda: not done(), limit_s, self.own.step)
        assert done()


@pytest.fixture
def loop(monkeypatch):
    # Children of other tests are not of the job.
    monkeypatch.setattr(processes, "_strangers", set(psutil.Process().children()))
    made = Loop()
    yield made
    for started in made.own.running.values():
        started.process.kill()
        started.process.wait(5)
    made.own.close_streams()
    made.own.close()
    made.guard.dismiss()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_output_and_exit_codes_arrive(loop):
    out, err = loop.start(0, "import sys; print(1); print(2, file=sys.stderr)")
    other, _ = loop.start(1, "import os; os._exit(7)")
    loop.until(lambda: len(loop.exits) == 2 and not loop.own.streams)
    assert sorted(loop.exits) == [(0, 0), (1, 7)] and not loop.own.running
    assert (out.text, err.text) == (b"1\n", b"2\n")
    assert out.ended and err.ended and other.ended


def test_while_paused_nothing_is_read_but_ends_are_noticed(loop):
    loop.paused = True
    out, _ = loop.start(0, "print(1)")
    loop.until(lambda: loop.exits)
    loop.own.step(0.0)
    assert loop.own.paused and out.text == b""
    loop.paused = False
    loop.until(lambda: not loop.own.streams)
    assert out.text == b"1\n"


def test_a_pause_does_not_count_where_it_should_not(loop):
    loop.paused, steps = True, []

    def step(until_s):
        loop.own.step(until_s)
        steps.append(time.monotonic())
        loop.paused = len(steps) < 6

    began_s = time.monotonic()
    loop.own.run_while(lambda: True, 0.1, step, extended_by_pauses=True)
    assert len(steps) > 6 and steps[-1] - began_s > 0.3


def test_a_source_that_is_closed_can_be_forgotten(loop):
    read, write = os.pipe()
    came = []
    loop.own.watch_source(read, lambda: came.append(os.read(read, 9)))
    os.write(write, b"a")
    loop.own.step(time.monotonic() + 5)
    os.close(read)
    loop.own.forget(read)
    os.close(write)
    for loop.paused in (True, False):  # which touches all sources
        loop.own.step(0.0)
    assert came == [b"a"]


def test_what_waits_to_be_written_is_written_when_there_is_room(loop, pipe):
    read, write = pipe
    loop.writers = {write: lambda: os.write(write, b"x")}
    loop.own.step(time.monotonic() + 5)
    loop.writers = {}
    loop.own.step(0.0)
    assert os.read(read, 9) == b"x"


# Ignores SIGTERM, and not SIGINT, which a job in a script's background would inherit.
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
IGNORES += "signal.signal(signal.SIGINT, signal.SIG_DFL); "
IGNORES += "print('ready', flush=True); time.sleep(600)"


def test_leftovers_are_asked_then_killed_and_keep_their_exit_codes(loop):
    ignores, _ = loop.start(0, IGNORES)
    obeys, _ = loop.start(1, "print('ready', flush=True); import time; time.sleep(600)")
    loop.until(lambda: ignores.text and obeys.text)
    began_s = time.monotonic()
    loop.own.end_leftovers(loop.own.step)
    loop.until(lambda: len(loop.exits) == 2)
    assert loop.exits == [(1, -signal.SIGTERM), (0, -signal.SIGKILL)]
    assert time.monotonic() - began_s > 0.9


def test_the_first_ending_signal_opens_a_moment_for_others_like_it(loop):
    assert not loop.own.is_repeated()
    out, _ = loop.start(0, IGNORES)
    loop.until(lambda: out.text)
    loop.own.ask_to_end(signal.SIGTERM)
    first_s = loop.own.asked_s
    assert loop.own.is_repeated()
    loop.own.ask_to_end(signal.SIGINT)
    assert loop.own.asked_s == first_s
    loop.until(lambda: loop.exits)
    assert loop.exits == [(0, -signal.SIGINT)]
    assert not loop.own.children.are_left()
