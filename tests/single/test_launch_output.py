"""How lines of several ranks become one stream, and how that is written."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.launch import output
from tfdist.launch.output import (
    RankOutput,
    Screen,
    Sink,
    StreamMerger,
    last_state,
    visible,
)


class Written:
    """A sink that keeps what it gets."""

    def __init__(self, *, is_terminal=False):
        self.is_terminal = is_terminal
        self.data = b""

    def write(self, data, *, keep=False):
        self.data += data


def merged(count, *, is_terminal=False, size=4, **more):
    """A sink, and a stream of each of some ranks that ends there."""
    sink = Written(is_terminal=is_terminal)
    screen = Screen(sink)
    streams = [
        StreamMerger(RankOutput(rank, size, **more), screen, color=False)
        for rank in range(count)
    ]
    return sink, streams


def test_lines_are_whole_whoever_comes_between():
    sink, (zero, one) = merged(2)
    zero.feed(b"a")
    one.feed(b"x\ny")
    zero.feed(b"b\nc")
    for stream in (zero, one):
        stream.end()
        stream.end()  # there is nothing left
    expected = b"[rank 1] x\n[rank 0] ab\n[rank 0] c\n[rank 1] y\n"
    assert sink.data == expected


@given(
    st.lists(st.text("ab\r\b\u00e9", max_size=9), min_size=1, max_size=9),
    st.integers(1, 5),
)
def test_however_it_is_cut_a_file_gets_the_same(lines, cut):
    data = "\n".join(lines).encode() + b"\n"
    sink, (stream,) = merged(1)
    for start in range(0, len(data), cut):
        stream.feed(data[start : start + cut])
    whole = [b"[rank 0] " + visible(line.encode()) + b"\n" for line in lines]
    assert sink.data == b"".join(whole)


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"1/3\r2/3\r3/3", b"3/3"),
        (b"1/3\r2/3\r", b"2/3\r"),  # whether it is rewritten comes next
        (b"\r1/3", b"1/3"),
        (b"1/3", b"1/3"),
        (b"1/3\r\b\b", b"1/3\r\b\b"),
        (b"", b""),
    ],
)
def test_a_rewritten_line_is_its_last_state(line, state):
    assert last_state(line) == state
    assert visible(line) == state.rstrip(b"\r\b")


def test_a_long_line_is_cut_between_characters(monkeypatch):
    monkeypatch.setattr(output, "_LONGEST_LINE", 4)
    for text in ("abcdefghij", "a\u00e9\u00e9\u00e9", "\u6f22\u6f22", "\U0001d11e" * 3):
        sink, (stream,) = merged(1)
        stream.feed(text.encode())
        stream.end()
        lines = sink.data.splitlines()
        parts = [line.removeprefix(b"[rank 0] ") for line in lines]
        assert max(map(len, parts)) <= 4
        assert "".join(part.decode() for part in parts) == text


def test_on_a_terminal_the_open_line_stays_at_the_bottom():
    erase = b"\r\x1b[K"
    sink, (zero, one) = merged(2, is_terminal=True)
    zero.feed(b"1/2")
    assert sink.data == b"[rank 0] 1/2"
    zero.feed(b"")  # nothing new
    one.feed(b"bar")  # the one open line is that of rank 0
    assert sink.data == b"[rank 0] 1/2"
    one.feed(b"!\n")
    assert sink.data == b"[rank 0] 1/2" + erase + b"[rank 1] bar!\n[rank 0] 1/2"
    sink.data = b""
    zero.feed(b"\r2/2")
    assert sink.data == erase + b"[rank 0] 2/2"
    sink.data = b""
    zero.feed(b" done\n")
    assert sink.data == erase + b"[rank 0] 2/2 done\n"
    sink.data = b""
    one.feed(b"next")  # now it is free
    assert sink.data == b"[rank 1] next"


def test_a_lone_rank_passes_unchanged_and_its_last_lines_are_known():
    sink, (stream,) = merged(1, size=1)
    data = b"".join(b"%d\n" % n for n in range(50)) + b"\x1b[1mhalf\rwhole"
    stream.feed(data)
    stream.end()
    assert sink.data == data
    tail = list(stream._output.tail)
    assert tail == [b"%d" % n for n in range(31, 50)] + [b"whole"]


class Full:
    name = "rank-0.log"

    def __init__(self, room):
        self.room, self.data = room, b""

    def write(self, data):
        taken = bytes(data[: min(3, self.room)])  # a part at a time
        if not taken:
            raise OSError(28, "No space left on device")
        self.room -= len(taken)
        self.data += taken
        return len(taken)


def test_a_log_gets_every_byte_until_it_takes_no_more():
    log = Full(10)
    sink, (stream,) = merged(1, log=log)
    stream.feed(b"1234567\n")
    assert log.data == b"1234567\n"
    assert sink.data == b"[rank 0] 1234567\n"
    stream.feed(b"89\n")
    stream.feed(b"on\n")
    assert log.data == b"1234567\n89"
    assert sink.data == (
        b"[rank 0] 1234567\n"
        b"tfdistrun: warning: cannot write to rank-0.log: No space left on device; "
        b"the log ends here\n[rank 0] 89\n[rank 0] on\n"
    )


# ---- what is written ----

LIMIT_S = 20.0  # in which a thread has got its turn


@pytest.fixture
def pipe():
    """Both ends, which a test may close."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


def read(fd, count):
    found = b""
    while len(found) < count:
        found += os.read(fd, count - len(found))
    return found


def test_a_reader_that_pauses_gets_everything_in_the_end(pipe):
    sink = Sink(pipe[1], is_terminal=False)
    data = os.urandom(3 * Sink.MOST_BYTES)
    for start in range(0, len(data), 1 << 18):
        sink.write(data[start : start + (1 << 18)])
    sink.flush(0.0)  # waits for nobody
    assert sink.full and not sink.empty
    assert read(pipe[0], len(data)) == data
    sink.flush(LIMIT_S)
    assert sink.empty and not sink.full


def test_what_is_too_much_is_dropped_if_so_told(pipe):
    sink = Sink(pipe[1], is_terminal=False)
    sink.drops = True
    sink.write(b"a" * (2 * Sink.MOST_BYTES))  # it was not full before
    assert sink.full
    sink.write(b"b")
    found = read(pipe[0], 2 * Sink.MOST_BYTES)
    sink.flush(LIMIT_S)
    assert sink.empty
    sink.write(b"c")
    assert found + os.read(pipe[0], 9) == b"a" * (2 * Sink.MOST_BYTES) + b"c"


def test_messages_wait_for_nobody_and_are_not_dropped(pipe):
    sink = Sink(pipe[1], is_terminal=False)
    screen = Screen(sink)
    sink.drops = True
    screen.print(b"a" * (2 * Sink.MOST_BYTES))
    screen.print(b"b")
    screen.complain("the job ends", "  [bold]\udcff")
    expected = b"a" * (2 * Sink.MOST_BYTES) + b"\n"
    expected += b"tfdistrun: the job ends\ntfdistrun:   [bold]\\udcff\n"
    assert read(pipe[0], len(expected)) == expected
    sink.flush(LIMIT_S)
    assert sink.empty


def test_a_message_on_a_terminal_is_red_and_above_the_open_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    sink, (stream,) = merged(1, is_terminal=True)
    stream.feed(b"1/2")
    sink.data = b""
    stream._screen.complain("x", "  y")
    lines = b"\x1b[1;31mtfdistrun: x\x1b[0m\ntfdistrun:   y\n"
    assert sink.data == b"\r\x1b[K" + lines + b"[rank 0] 1/2"


def test_a_reader_that_has_gone_is_an_error_and_holds_up_nothing(pipe):
    os.close(pipe[0])
    pipe[0] = None
    sink = Sink(pipe[1], is_terminal=False)
    sink.write(b"a" * (2 * Sink.MOST_BYTES))
    sink.flush(LIMIT_S)
    assert isinstance(sink.error, BrokenPipeError)
    assert sink.empty and not sink.full
    sink.write(b"b")
    assert len(sink._waiting) == 2 * Sink.MOST_BYTES


def test_a_stream_that_is_closed_takes_everything():
    sink = Sink(None, is_terminal=False)
    sink.write(b"a" * (2 * Sink.MOST_BYTES))
    assert sink.empty and sink.error is None
