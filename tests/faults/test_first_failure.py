"""Which rank is said to have failed first, when those that suffer end before it does.

The ranks need no TensorFlow: the errors are those of the core.
"""

import re
import sys
import textwrap

import pytest
from helpers.deadline import deadline
from helpers.launcher import run

from tfdist.core import native

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]
FULL = "OSError: [Errno 28] No space left on device"
# Rank 0 finds the disk full, tells the others, and takes its time. HOW is what the
# others do about it.
PROGRAM = """
import os, sys, time
from helpers import core_client as c
from tfdist.core import native
c.world.start()
rank = c.runtime.rank()

def lost():
    payload = {"kind": "rank_failed", "rank": 0, "cause": "FULL"}
    return native.CoreError(native.ABORTED, "save failed on rank 0: FULL", payload)

try:
    c.meet()
    if rank == 0:
        raise OSError(28, "No space left on device")
    raise lost()
except Exception as error:
    if rank == 0:
        time.sleep(0.4)
        raise
    how = sys.argv[rank]
    if how == "again":
        raise
    if how == "wrapped":
        raise RuntimeError("training failed") from error
    if how == "later":  # an error of its own, made while it handles the other
        {}["clean-up"]
    if how == "waits":
        c.barrier("more")
    if how == "exits":
        try:
            c.barrier("more")
        except native.CoreError:
            sys.exit(1)
    if how == "vanishes":
        time.sleep(0.2)  # the others have left the barrier by then
        os._exit(1)
    if how == "handles":
        sys.exit(0)
    raise AssertionError(how)
""".replace("FULL", FULL)
LINE = re.compile(r"^\[rank (\d)\] (?!\[tfdist\])", re.MULTILINE)


def python(code, *arguments):
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


@deadline(60)
@pytest.mark.parametrize(
    "others",
    [
        ("again", "wrapped", "later", "waits"),
        pytest.param(("again", "vanishes", "exits", "handles"), marks=pytest.mark.slow),
    ],
)
def test_the_rank_at_fault_is_named_whoever_ends_first(tmp_path, others):
    done = run(tmp_path, "-np", "5", *python(PROGRAM, *others))
    assert done.code == 1
    assert re.match(r"rank 0 on \S+ failed first: exit code 1", done.report[0])
    reason = f"reason: {FULL}"
    assert done.report[-2:] == [reason, "hint: a disk is full: see `df -h`"], done
    # Its traceback is printed once; of the others a line each, and no more.
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert set(LINE.findall(done.stderr)) == {"0"}, done.stderr
    assert len(done.stderr.splitlines()) <= 25
    said = re.findall(r"^\[rank (\d)\] \[tfdist\] (.*)", done.stderr, re.MULTILINE)
    assert len(said) == sum(
        how in ("again", "wrapped", "later", "waits") for how in others
    )
    for rank, text in said:
        assert re.fullmatch(
            rf"rank {rank} ends with \w+ because of rank 0, at \S+:\d+", text
        )
    # The log files hold the lines that were not shown.
    for rank, _ in said:
        log = next(tmp_path.glob(f"tfdist-logs/*/rank-{rank}.log")).read_text()
        assert "tfdistrun: the full traceback:\nTraceback" in log
        how = others[int(rank) - 1]
        # Who only waited heard of it from rank 1, which names rank 0 all the same.
        named = r"rank 0 \(host .*\) failed" if how == "waits" else "failed on rank 0"
        assert re.search(rf"CoreError: .*{named}.*{re.escape(FULL)}", log), log


@deadline(60)
def test_a_rank_that_does_not_end_is_named_by_those_that_wait_for_it(tmp_path):
    """Rank 0 hangs in a `finally` block: it is ended, and the others say why."""
    code = PROGRAM.replace("time.sleep(0.4)", "time.sleep(60)")
    done = run(
        tmp_path, "-np", "3", "--grace-s", "0.5", *python(code, "again", "again")
    )
    assert done.code == 1
    assert re.match(r"rank 0 on \S+ failed first: ended by tfdistrun", done.report[0])
    reason = (
        rf"reason \(as rank \d saw it\): CoreError: .* on rank 0: {re.escape(FULL)}"
    )
    assert [line for line in done.report if re.fullmatch(reason, line)], done


@deadline(60)
def test_a_rank_that_catches_the_error_and_exits_still_reports_it(tmp_path):
    """The report is sent at exit, when Python starts no more threads."""
    code = """
        import sys, time
        from tfdist.core import failed_rank, runtime, world
        world.start()
        if runtime.rank() == 1:
            time.sleep(60)
        failed_rank.record(1, "RankFailedError: rank 1 cannot save")
        sys.exit(3)
        """
    done = run(tmp_path, "-np", "2", "--grace-s", "0.5", *python(code))
    assert done.code == 3
    assert re.match(r"rank 1 on \S+ failed first: ended by tfdistrun", done.report[0])
    reason = "reason (as rank 0 saw it): RankFailedError: rank 1 cannot save"
    assert reason in done.report, done


@deadline(60)
def test_the_same_error_of_all_ranks_is_printed_once(tmp_path):
    code = """
        from helpers import core_client as c
        c.world.start()
        c.meet()
        raise ValueError("the learning rate is negative")
        """
    done = run(tmp_path, "-np", "4", *python(code))
    assert done.code == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("the learning rate is negative") <= 3
    assert done.stderr.count("the same ValueError as another rank") == 3
    assert done.report[-1] == "reason: ValueError: the learning rate is negative"
    before = run(
        tmp_path, "-np", "2", *python("import tfdist; tfdist.init(timeout_s=-1)")
    )
    assert before.stderr.count("Traceback") == 1
    assert "reason: ValueError: Expected timeout_s" in before.report[-1]


@deadline(60)
def test_a_killed_and_a_stopped_rank_are_both_named_by_all_others(tmp_path):
    code = """
        import os, pathlib, signal, time
        from helpers import core_client as c
        pid = pathlib.Path(os.environ["PID_FILE"])

        def is_stopped():
            if not pid.exists() or not pid.read_text():
                return False
            stat = pathlib.Path("/proc", pid.read_text(), "stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"

        c.world.start()
        c.steps(3)
        rank = c.runtime.rank()
        if rank == 2:
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 0:  # dies when rank 2 can no longer take part in the verdict
            while not is_stopped():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            c.steps(10_000)
        except Exception as error:
            told = error.payload
            print("SAW", error, told["kind"], told["rank"], flush=True)
            raise
        """
    done = run(
        tmp_path, "-np", "4", "--grace-s", "4", *python(code),
        PID_FILE=str(tmp_path / "pid"),
    )  # fmt: skip
    assert done.code == 137
    saw = re.findall(r"^\[rank (\d)\] SAW (.*)", done.stdout, re.MULTILINE)
    assert {rank for rank, _ in saw} == {"1", "3"}, done
    assert len({text for _, text in saw}) == 1
    text = saw[0][1]
    assert re.search(r"rank 0 \(.*; also: rank 2 \(.*has been stopped", text), text
    assert text.endswith("rank_failed 0")
    assert done.report[0].startswith("rank 0 ")
    assert "also: rank 2" in next(x for x in done.report if x.startswith("reason"))


@deadline(60)
def test_a_cut_link_is_the_failure_of_the_rank_that_is_out(tmp_path):
    """Both ranks live: rank 0 goes on as the majority, and is not to be blamed."""
    code = """
        import os, socket, psutil
        from helpers import core_client as c
        c.world.start()
        c.steps(3)
        store = int(os.environ["TFDIST_RENDEZVOUS"].rpartition(":")[2])
        mine = psutil.Process().net_connections("tcp")
        for one in mine if c.runtime.rank() == 1 else ():
            if one.status == "ESTABLISHED" and one.raddr.port != store:
                link = socket.socket(fileno=os.dup(one.fd))
                link.shutdown(socket.SHUT_RDWR)
        c.steps(10_000)
        """
    done = run(tmp_path, "-np", "2", *python(code), TFDIST_TRANSPORT="tcp")
    assert done.code == 1
    assert re.match(r"rank 1 on \S+ failed first: exit code 1", done.report[0]), done
    # Rank 1 says so itself, unless it sees first that rank 0 has ended.
    reason = r"reason( \(as rank 0 saw it\))?: CoreError: rank \d \(host "
    assert re.match(reason, done.report[-2]), done
    assert (
        "the connection to it ended, although its process is there" in done.report[-2]
    )
    assert done.report[-1].startswith("hint: a connection between two ranks was cut")
    assert len(done.stderr.splitlines()) <= 25
