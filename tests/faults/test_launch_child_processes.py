"""Processes that a rank starts: they are no ranks, and may begin a job of their own."""

import sys

import pytest
from helpers.deadline import deadline
from helpers.launcher import marked, run, shell

pytestmark = pytest.mark.faults

POOL = """
import multiprocessing, sys
from tfdist.core import runtime, world
world.start()
def work(number): return number * number
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print("never", pool.map(work, range(4)))
"""


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)]
)
@deadline(40)
def test_a_pool_whose_workers_would_be_ranks_ends_with_the_reason(
    tmp_path, marker, method
):
    (tmp_path / "pool.py").write_text(POOL)
    done = run(tmp_path, "-np", "2", sys.executable, "pool.py", method, MARK=marker)
    assert done.code == 143
    assert "never" not in done.stdout
    assert done.report[-1].startswith("reason: process ")
    assert 'under `if __name__ == "__main__":`' in done.report[-1]
    # At most the two workers of each rank: none was started again.
    assert 1 <= done.stderr.count("] [tfdist] process ") <= 4
    assert "Traceback" not in done.stderr
    assert marked(marker) == []


CHILDREN = """
import multiprocessing, os, subprocess, sys
from tfdist.core import native, runtime, world
START = "from tfdist.core import runtime, world; world.start(); "
SAYS = START + "print('size', runtime.size(), flush=True)"

def refused():
    try:
        world.start()
    except native.CoreError as error:
        return error.message

def said(*command, **variables):
    ended = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True
    )
    return f"{ended.returncode} {ended.stdout}{ended.stderr}"

if __name__ == "__main__":
    world.start()
    world.shutdown()
    world.start()  # the same process is a rank again
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("in a worker:", pool.apply(refused), flush=True)
    print("a program:", said(sys.executable, "-c", START).splitlines()[-1], flush=True)
    place = dict(TFDIST_RANK="0", TFDIST_SIZE="1", TFDIST_LOCAL_RANK="0",
                 TFDIST_LOCAL_SIZE="1", TFDIST_CROSS_RANK="0", TFDIST_CROSS_SIZE="1")
    given = said(sys.executable, "-c", SAYS, **place)
    print("with another place:", given.strip(), flush=True)
    inner = said(sys.executable, "-m", "tfdist.launch", "-np", "2", "--log-dir",
                 "inner" + os.environ["TFDIST_RANK"], sys.executable, "-c", SAYS)
    print("a job:", inner.strip().replace(chr(10), " "), flush=True)
"""


@deadline(60)
def test_only_the_process_that_connects_is_a_rank(tmp_path):
    """It is started by a shell and env, as by wrappers. One job, for its time."""
    (tmp_path / "children.py").write_text(CHILDREN)
    script = f"env A=b {sys.executable} children.py; true"
    done = run(tmp_path, "-np", "2", *shell(script), timeout_s=50.0)
    assert done.code == 0, done.stderr
    for rank in range(2):
        lines = [
            line.removeprefix(f"[rank {rank}] ")
            for line in done.stdout.splitlines()
            if line.startswith(f"[rank {rank}]")
        ]
        worker, program, given, job = lines
        assert f"is a child of rank {rank} (process " in worker
        assert 'under `if __name__ == "__main__":`' in worker
        assert program.startswith("a program: ") and "is a child of rank" in program
        assert (
            "To start a separate tfdist program from a rank, run `tfdistrun -np 1"
            in program
        )
        assert given == "with another place: 0 size 1"
        assert job.startswith("a job: 0 ") and job.count("] size 2") == 2
