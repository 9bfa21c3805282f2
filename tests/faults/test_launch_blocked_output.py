"""What tfdistrun does when its output cannot be written: it loses and stops nothing."""

import contextlib
import os
import select
import signal
import subprocess

import psutil
import pytest
from helpers.deadline import deadline
from helpers.launcher import (
    TFDISTRUN,
    clean_environment,
    marked,
    python,
    run,
    shell,
    start,
    until,
)

pytestmark = pytest.mark.faults

LINES = 60_000  # more than pipes and tfdistrun hold
MUCH = f"for i in range({LINES}): print(i, 'x' * 60)\n"


# ---- a reader that pauses ----


@deadline(60)
def test_a_reader_that_pauses_gets_everything_afterwards(tmp_path):
    code = MUCH + "open(f'done-{__import__(\"os\").environ[\"TFDIST_RANK\"]}', 'w')"
    process = start(tmp_path, "-np", "2", *python(code))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.0)
    assert not (tmp_path / "done-0").exists()  # the ranks wait, too
    stdout, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    lines = stdout.splitlines()
    for rank in range(2):
        mine = [x.split()[2] for x in lines if x.startswith(f"[rank {rank}]")]
        assert mine == [str(i) for i in range(LINES)]


@deadline(60)
@pytest.mark.parametrize(
    "prints",
    ["the ranks wait", pytest.param("the ranks have ended", marks=pytest.mark.slow)],
)
def test_signals_reach_a_job_whose_reader_pauses(tmp_path, marker, prints):
    few = "print('x' * 100_000)\n"  # which tfdistrun holds, but no pipe
    code = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    open('saved', 'w')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('ready', 'w')\n"
        f"{MUCH if prints == 'the ranks wait' else few}"
        "open('printed', 'w')\n"
    )
    process = start(tmp_path, "-np", "1", *python(code), M=marker)
    if prints == "the ranks wait":
        until((tmp_path / "ready").exists, 20)
    else:
        until((tmp_path / "printed").exists, 20)
        until(lambda: len(marked(marker)) == 2, 10)  # tfdistrun and its guard
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    process.wait(10)  # nobody has read a byte
    assert (tmp_path / "saved").exists() == (prints == "the ranks wait")
    process.stdout.close()
    process.stderr.close()
    assert marked(marker) == []


@deadline(60)
@pytest.mark.parametrize("elastic", [(), ("--min-np", "1", "--max-restarts", "0")])
def test_messages_that_nobody_reads_hold_up_neither_signals_nor_kills(
    tmp_path, marker, elastic
):
    script = (
        'echo $$ >"pid-$TFDIST_RANK"; '
        "trap 'touch \"term-$TFDIST_RANK\"' TERM; "
        "while :; do sleep 0.1; done"
    )
    reading, writing = os.pipe()
    fill(writing)
    command = [*TFDISTRUN, "-np", "2", "--signal-grace-s", "1", *elastic]
    process = subprocess.Popen(
        [*command, *shell(script)],
        cwd=tmp_path,
        env=clean_environment(M=marker),
        stdout=writing,
        stderr=writing,
    )
    try:
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        until(lambda: all(one.exists() and one.read_text() for one in pids), 20)
        if elastic:
            os.kill(int(pids[1].read_text()), signal.SIGKILL)
            until(lambda: not running(pids[1]), 10)
        process.send_signal(signal.SIGTERM)
        until((tmp_path / "term-0").exists, 10)
        until(lambda: not running(pids[0]) and not running(pids[1]), 10)
        until(lambda: marked(marker) == [process.pid], 10)
    finally:
        os.close(reading)
        os.close(writing)
        process.kill()
        process.wait(10)


def fill(pipe):
    """Fills a pipe, which stays blocking for others."""
    own = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    for size in (select.PIPE_BUF, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"x" * size)
    os.close(own)


def running(pid_file):
    pid = int(pid_file.read_text())
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


# ---- a reader that leaves ----


@deadline(40)
def test_a_reader_that_leaves_with_ctrl_c_takes_no_time_from_those_who_save(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    for _ in range(10): print('saving', flush=True); time.sleep(0.1)\n"
        "    open('saved-' + os.environ['TFDIST_RANK'], 'w')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGINT, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    process = start(tmp_path, "-np", "2", *python(code))
    assert "ready" in process.stdout.readline() + process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 0
    process.stderr.close()
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == [
        "saved-0",
        "saved-1",
    ]


# ---- what cannot be written ----


@deadline(40)
def test_a_full_disk_costs_a_log_file_not_the_job(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    script = "for i in 1 2 3; do echo $i; sleep 0.1; done"
    done = run(tmp_path, "-np", "2", "--log-dir", "logs", *shell(script))
    assert done.code == 0
    assert done.stdout.count("[rank 0]") == 3
    warnings = [x for x in done.stdout.splitlines() + done.stderr.splitlines()]
    warnings = [x for x in warnings if "rank-0.log: No space left" in x]
    assert len(warnings) == 1
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "1\n2\n3\n"


@deadline(40)
def test_standard_output_that_takes_nothing_ends_the_job_and_says_so(tmp_path, marker):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*TFDISTRUN, "-np", "2", *shell("echo x; sleep 60")],
            cwd=tmp_path,
            env=clean_environment(M=marker),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert done.returncode != 0
    assert "its output cannot be written: [Errno 28] No space left" in done.stderr
    assert marked(marker) == []


@deadline(60)
def test_a_pipe_that_does_not_block_gets_everything(tmp_path):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = subprocess.Popen(
        [*TFDISTRUN, "-np", "1", *python(MUCH)],
        cwd=tmp_path,
        env=clean_environment(PYTHONUNBUFFERED="1"),
        stdout=writing,
    )
    os.close(writing)
    with open(reading) as pipe:
        numbers = [line.split()[0] for line in pipe]
    assert process.wait(10) == 0
    assert numbers == [str(i) for i in range(LINES)]


@deadline(40)
def test_without_standard_output_the_job_runs(tmp_path):
    command = " ".join([*TFDISTRUN, "-np", "2", "touch", "ran"])
    done = subprocess.run(
        ["sh", "-c", f"exec {command} >&-"],
        cwd=tmp_path,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "ran").exists()
