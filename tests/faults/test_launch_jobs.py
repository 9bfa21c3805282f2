"""Jobs of real ranks under tfdistrun, without TensorFlow: good ends and bad ones."""

import os
import re
import signal
import sys
import textwrap
import time

import psutil
import pytest
from helpers.deadline import deadline
from helpers.launcher import finish, marked, run, start, until

from tfdist.core import native

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
    ),
]
CLIENT = [sys.executable, "-m", "helpers.core_client"]


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


def memory_files():
    """Links' memory that some process of this user holds."""
    found = []
    for pid in psutil.pids():
        try:
            maps = open(f"/proc/{pid}/maps").read()
        except OSError:
            continue
        if "memfd:tfdist-link" in maps:
            found.append(pid)
    return found


def last_words(tmp_path, text):
    """The ranks whose log files hold a traceback that ends with `text`."""
    pattern = rf"^\S*(RendezvousError|CoreError): .*{re.escape(text)}"
    logs = tmp_path.glob("tfdist-logs/*/rank-*.log")
    return {
        int(log.stem.removeprefix("rank-"))
        for log in logs
        if re.search(pattern, log.read_text(), re.MULTILINE)
    }


@deadline(60)
@pytest.mark.parametrize(
    ("size", "transport"),
    [
        (1, "auto"),
        (2, "tcp"),
        (4, "shm"),
        *(
            pytest.param(size, transport, marks=pytest.mark.slow)
            for size in (1, 2, 4)
            for transport in ("auto", "tcp", "shm")
            if (size, transport) not in ((1, "auto"), (2, "tcp"), (4, "shm"))
        ),
    ],
)
def test_sums_are_right(tmp_path, size, transport):
    done = run(
        tmp_path, "-np", str(size), *CLIENT, "steps", "30", TFDIST_TRANSPORT=transport
    )
    assert done.code == 0, done.stderr
    assert done.stdout.count("all sums are right") == size


# In `make test` with fewer ranks: descriptors, below.
@pytest.mark.slow
@deadline(60)
def test_shutdown_and_init_again_in_one_job(tmp_path):
    done = run(tmp_path, "-np", "3", *CLIENT, "again", "4")
    assert done.code == 0, done.stderr
    assert done.stdout.count("again and again") == 3


@deadline(60)
@pytest.mark.parametrize(
    ("action", "victim", "code", "says"),
    [
        pytest.param("kill", 2, 137, "killed by SIGKILL", marks=pytest.mark.slow),
        ("kill", 0, 137, "killed by SIGKILL"),
        ("raise", 1, 1, "exit code 1"),
        pytest.param("exit", 0, 9, "exit code 9", marks=pytest.mark.slow),
    ],
)
def test_the_rank_at_fault_is_named_first_and_by_all_others(
    tmp_path, action, victim, code, says, marker
):
    done = run(tmp_path, "-np", "4", *CLIENT, action, str(victim), MARK=marker)
    assert done.code == code
    assert re.match(rf"rank {victim} on \S+ failed first: {says}", done.report[0])
    others = {0, 1, 2, 3} - {victim}
    assert last_words(tmp_path, f"rank {victim} (host") == others
    line = (
        rf"^\[rank (\d)\] \[tfdist\] rank \1 ends with \w+ because of rank {victim}, at"
    )
    assert set(map(int, re.findall(line, done.stderr, re.MULTILINE))) == others
    if action == "raise":
        assert last_words(tmp_path, "ValueError: the user's own mistake") == others
    assert done.seconds < 5.0
    assert marked(marker) == []


# In `make test`: test_first_failure.py.
@pytest.mark.slow
@deadline(60)
def test_the_reason_of_an_exception_is_in_the_report(tmp_path):
    done = run(tmp_path, "-np", "2", *CLIENT, "raise", "0")
    assert done.report[-1] == "reason: ValueError: the user's own mistake"


@deadline(60)
def test_a_rank_that_leaves_without_an_error_is_the_hint(tmp_path):
    done = run(
        tmp_path,
        "-np",
        "2",
        *python(
            """
            from helpers import core_client as c
            c.world.start()
            c.steps(20 if c.runtime.rank() == 0 else 40)
            """
        ),
    )
    assert done.code == 1
    assert done.report[0].startswith("rank 1 ")
    assert any("rank 0 had ended without an error" in line for line in done.report)


# In `make test`: tests/single/test_environment_import.py.
@pytest.mark.slow
@deadline(60)
def test_a_rank_that_never_calls_init_is_named_by_the_others(tmp_path):
    done = run(
        tmp_path,
        "-np",
        "3",
        "--grace-s",
        "0.5",
        *python(
            """
            import time
            from tfdist.core import runtime, world
            import os
            if os.environ["TFDIST_RANK"] == "1": time.sleep(60)
            world.start()
            """
        ),
        TFDIST_START_TIMEOUT_S="3",
    )
    assert done.code == 1
    text = "rank 1 of 3 did not call tfdist.init() within 3 s"
    assert last_words(tmp_path, text) == {0, 2}
    assert text in done.report[-1]


@deadline(60)
def test_a_rank_that_dies_before_init_ends_the_job_at_once(tmp_path):
    done = run(
        tmp_path,
        "-np",
        "3",
        "--grace-s",
        "0.5",
        *python(
            """
            from tfdist.core import runtime, world
            import os
            if os.environ["TFDIST_RANK"] == "1": raise SystemExit(4)
            world.start()
            """
        ),
    )
    assert done.code == 4
    assert done.report[0].startswith("rank 1 ")
    assert done.seconds < 5.0


@deadline(60)
def test_settings_that_differ_are_named_on_every_rank(tmp_path):
    done = run(
        tmp_path,
        "-np",
        "3",
        *python(
            """
            import os
            if os.environ["TFDIST_RANK"] == "2":
                os.environ["TFDIST_SEGMENT_BYTES"] = "8192"
            from tfdist.core import runtime, world
            world.start()
            """
        ),
        TFDIST_SEGMENT_BYTES="4096",
    )
    text = "TFDIST_SEGMENT_BYTES: 4096 on ranks 0 and 1; 8192 on rank 2"
    assert last_words(tmp_path, text) == {0, 1, 2}
    assert text in done.report[-1] and done.stderr.count("Traceback") == 1


@deadline(60)
def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path):
    done = run(tmp_path, "-np", "2", "true", TFDIST_BUCKET_BITES="1")
    assert done.code == 2
    assert "did you mean TFDIST_BUCKET_BYTES" in done.stderr


@deadline(60)
def test_a_fork_after_init_is_told_so(tmp_path):
    done = run(
        tmp_path,
        "-np",
        "2",
        *python(
            """
            import os, sys
            from tfdist.core import native, runtime, world
            from helpers import core_client
            world.start()
            core_client.barrier("one")
            pid = os.fork()
            if pid == 0:
                assert not runtime.is_initialized()
                try:
                    world.start()
                except native.CoreError as error:
                    print(error.payload["kind"], error.message)
                sys.exit(0)  # and atexit leaves the parent's engine alone
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            core_client.barrier("two")
            """
        ),
    )
    assert done.code == 0, done.stderr
    message = r"not_initialized process \d+ cannot use tfdist: it is a fork"
    assert len(re.findall(message, done.stdout)) == 2


WRAPPED = (  # what pybind11 makes of a Ctrl-C in the middle of a call of TensorFlow
    "RuntimeError('pybind11::error_already_set: MISMATCH of original and normalized "
    "active exception types: ORIGINAL KeyboardInterrupt REPLACED BY X')"
)


@deadline(60)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("KeyboardInterrupt", 130),
        pytest.param(WRAPPED, 1, marks=pytest.mark.slow),
    ],
    ids=["it", "wrapped"],
)
def test_an_interrupted_rank_is_a_failure_of_that_rank(tmp_path, error, code):
    """Ctrl-C on one rank alone is a failure that the others are told about."""
    done = run(
        tmp_path,
        "-np",
        "2",
        *python(
            f"""
            from helpers import core_client as c
            c.world.start()
            if c.runtime.rank() == 1:
                c.steps(3)
                raise {error}
            c.steps(10_000)
            """
        ),
    )
    assert done.code == code
    assert done.report[0].startswith("rank 1 ")
    assert "KeyboardInterrupt" in done.report[-1]
    told = [x for x in done.stderr.splitlines() if x.startswith("[rank ")]
    assert sorted(told) == [
        "[rank 0] [tfdist] rank 0 ends: rank 1 was interrupted",
        "[rank 1] [tfdist] rank 1 was interrupted",
    ]


@deadline(60)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_end_of_the_launcher_is_the_end_of_all(tmp_path, number, marker):
    process = start(tmp_path, "-np", "3", *CLIENT, "wait", "99", MARK=marker)
    for _ in range(3):
        assert "init took" in process.stdout.readline()
    holders = set(memory_files()) & set(marked(marker))
    assert len(holders) == 3
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait(5)
        process.stdout.close()
        process.stderr.close()
    else:
        assert finish(process).code == 143
    until(lambda: not marked(marker), 5.0)
    assert not set(memory_files()) & holders


# In `make test` with a killed rank beside it: test_first_failure.py.
@pytest.mark.slow
@deadline(60)
def test_a_stopped_rank_cannot_hold_up_the_end(tmp_path, marker):
    code = """
        import os, signal
        from helpers import core_client as c
        c.world.start()
        c.steps(3)
        rank = c.runtime.rank()
        if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1: raise ValueError("mine")
        c.steps(10_000)
        """
    done = run(tmp_path, "-np", "3", "--grace-s", "1", *python(code), MARK=marker)
    assert done.code == 1
    assert done.report[0].startswith("rank 1 ")
    assert done.seconds < 20.0
    assert marked(marker) == []


@deadline(60)
def test_descriptors_do_not_pile_up_over_generations(tmp_path):
    code = """
        import os
        from helpers import core_client as c
        count = lambda: len(os.listdir("/proc/self/fd"))
        found = []
        for _ in range(6):
            c.world.start()
            c.steps(1)
            c.barrier()
            c.world.shutdown()
            found.append(count())
        assert found[-1] <= found[1], found
        print("flat")
        """
    done = run(tmp_path, "-np", "2", *python(code))
    assert done.code == 0, done.stderr
    assert done.stdout.count("flat") == 2


# In `make test`: tests/integration/test_mpirun.py.
@pytest.mark.slow
@deadline(60)
def test_jobs_at_the_same_time_do_not_meet(tmp_path):
    """Ports and names are free ones: no two jobs collide."""
    before = time.monotonic()
    for _ in range(2):
        jobs = [start(tmp_path, "-np", "2", *CLIENT, "steps", "2") for _ in range(3)]
        for done in [finish(job, 40.0) for job in jobs]:
            assert done.code == 0, done.stderr
    assert time.monotonic() - before < 55.0
    assert os.listdir(tmp_path / "tfdist-logs")
