"""TFDIST_ENGINE=mpi under the mpirun of MPICH and of Open MPI; docs/engines.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hosts import networked_hosts, why_no_networks
from helpers.launcher import clean_environment, marked, until
from helpers.mpi import AS_ROOT, KEEP_HOST_NAMES, KINDS, command, library, over_hosts
from helpers.mpi import run as run_plain

from tfdist.core import mpi, native

ROOT = Path(__file__).resolve().parents[2]
CLIENT = [sys.executable, "-m", "helpers.core_client"]
CONFORMANCE = [
    *("ops_values", "ops_rows", "ops_send_recv", "tape", "objects"),
    *("process_sets", "sparse", "adasum", "fit_equality", "uneven_data"),
]
# The sums of 100,000 numbers that round, as bytes; and what carried them.
SUMS = """
import hashlib
import numpy as np
from helpers.core_client import allreduce
from tfdist.core import native, runtime, world
world.start()
random = np.random.default_rng(runtime.rank())
x = random.standard_normal(100_000, dtype=np.float32)
total = b"".join(allreduce(x[:n], name=f"n{n}").tobytes() for n in (1, 1000, 100_000))
links = native.counters()["links"]
used = sorted({link["transport"] for link in links if link["data_bytes_sent"] > 0})
print(f"sums {hashlib.sha256(total).hexdigest()} by {used}", flush=True)
"""

pytestmark = pytest.mark.skipif(
    not native.LIBRARY_PATH.is_file(), reason="the core library is not built"
)
WHY_NOT = why_no_networks()
# Tests that `make test` runs with MPICH alone, as Open MPI takes twice as long.
OPEN_MPI_IS_SLOW = pytest.mark.parametrize(
    "kind", ["mpich", pytest.param("openmpi", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def run(words, cwd, *, of, **environ):
    """With all data by the library that is compiled for `of`."""
    by = {"TFDIST_ENGINE": "mpi", "TFDIST_MPI_LIBRARY": str(library(of))}
    return run_plain(words, cwd, **{"TFDIST_TRANSPORT": "tcp", **by, **environ})


def sums(done):
    assert done.returncode == 0, done.stderr
    return re.findall(r"sums ([0-9a-f]{64}) by (\[[^]]*\])", done.stdout)


def test_sums_have_the_bits_of_the_native_engine(kind, tmp_path):
    code = [*command(kind), "3", sys.executable, "-c", SUMS]
    by_mpi = sums(run(code, tmp_path, of=kind))
    by_tcp = sums(run_plain(code, tmp_path, TFDIST_TRANSPORT="tcp"))
    assert {links for _, links in by_mpi} == {"['mpi']"}
    assert {links for _, links in by_tcp} == {"['tcp']"}
    assert len(by_mpi) == len(by_tcp) == 3
    assert len({total for total, _ in by_mpi + by_tcp}) == 1


@OPEN_MPI_IS_SLOW
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_hosts_send_by_mpi_and_find_each_other_without_variables(kind, tmp_path):
    with networked_hosts(tmp_path, 2) as hosts:
        words = [*over_hosts(hosts, command(kind), tmp_path)]
        passed_on = ["TFDIST_ENGINE", "TFDIST_TRANSPORT", "TFDIST_MPI_LIBRARY"]
        words += [w for name in passed_on for w in ("-x", name)] * (kind == "openmpi")
        environ = {**KEEP_HOST_NAMES, "TFDIST_TRANSPORT": "auto"}
        code = [sys.executable, "-c", SUMS]
        found = sums(run([*words, *code], tmp_path, of=kind, **environ))
        again = run([*words, *CLIENT, "again", "2"], tmp_path, of=kind, **environ)
    assert len(found) == 4
    assert len({total for total, _ in found}) == 1
    by = "".join(links for _, links in found)  # a rank may send on one way only
    assert "mpi" in by and "shm" in by and "tcp" not in by
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("again and again") == 4


@OPEN_MPI_IS_SLOW
def test_ranks_can_leave_and_meet_again(kind, tmp_path):
    done = run([*command(kind), "3", *CLIENT, "again", "3"], tmp_path, of=kind)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("again and again") == 3


def test_the_standard_interface_of_mpi_is_enough(tmp_path):
    by = {"TFDIST_ENGINE": "mpi", "TFDIST_TRANSPORT": "tcp"}
    made = str(library("mpich", "mpicc_abi"))
    words = [*command("mpich"), "2", *CLIENT, "steps", "20"]
    done = run_plain(words, tmp_path, TFDIST_MPI_LIBRARY=made, **by)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all sums are right") == 2


# ---- what fails ----


# On a busy machine, a job of MPICH took over 60 s to end in 2 of about 20 runs.
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "raise", "exit"])
def test_a_rank_that_fails_ends_the_job(kind, fault, tmp_path):
    mark = f"mark-{os.getpid()}-{kind}-{fault}"
    words = [*command(kind), "3", *CLIENT, fault, "1"]
    done = run(words, tmp_path, of=kind, MARK=mark)
    assert done.returncode != 0
    if fault == "raise":
        assert "the user's own mistake" in done.stderr
    until(lambda: marked(mark) == [])  # mpirun may end a moment before its ranks


def test_an_mpi_whose_mpirun_did_not_start_the_ranks_is_named(kind, tmp_path):
    (other,) = set(KINDS) - {kind}
    words = [*command(kind), "2", *CLIENT, "steps", "5"]
    done = run(words, tmp_path, of=other, TFDIST_START_TIMEOUT_S="20")
    assert done.returncode != 0
    assert "these ranks were started by the mpirun of another MPI" in done.stderr
    assert "Start the ranks with the mpirun or srun that belongs to" in done.stderr


@pytest.mark.parametrize(
    ("version", "source", "is_other"),
    [
        ("Open MPI v5.0.11,", "mpich", True),
        ("MPICH Version: 5.0.2", "openmpi", True),
        ("Intel(R) MPI Library", "openmpi", True),
        ("Open MPI v5.0.11,", "openmpi", False),
        ("MVAPICH2 Version :", "mpich", False),
        ("Open MPI v5.0.11,", "slurm", False),  # srun starts both
        ("an MPI that nobody knows", "openmpi", False),
    ],
)
def test_which_mpi_certainly_belongs_to_another_mpirun(version, source, is_other):
    assert mpi._is_other_mpi(version, source) == is_other


def test_tfdistrun_is_told_to_be_mpirun(tmp_path):
    words = [sys.executable, "-m", "tfdist.launch", "-np", "2", *CLIENT, "steps", "5"]
    done = run(words, tmp_path, of="mpich")
    assert done.returncode != 0
    assert "is rank 0 of 1 in MPI" in done.stderr
    assert "but rank 1 of 2 according to TFDIST_RANK=1 and TFDIST_SIZE=2" in done.stderr


def test_a_library_that_is_missing_or_no_library_is_named(tmp_path):
    missing, text = tmp_path / "missing.so", tmp_path / "text.so"
    text.write_text("not a library")
    for file, expected in (
        (missing, "which does not exist: run `make mpi`"),
        (text, "cannot be loaded"),
    ):
        words = [*command("mpich"), "2", *CLIENT, "steps", "5"]
        environ = {"TFDIST_ENGINE": "mpi", "TFDIST_MPI_LIBRARY": str(file)}
        done = run_plain(words, tmp_path, **environ)
        assert done.returncode != 0
        assert str(file) in done.stderr
        assert expected in done.stderr


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("mpich", "MPICH Version: 5"),
        ("openmpi", "started by the mpirun of another MPI"),
        (None, "which does not exist: run `make mpi`"),
    ],
)
def test_doctor_looks_for_the_library(of, expected, tmp_path):
    file = library(of) if of else tmp_path / "missing.so"
    environ = {"TFDIST_ENGINE": "mpi", "TFDIST_MPI_LIBRARY": str(file)}
    code = (
        "import os; from tfdist.tools.doctor import checks; "
        "print([finding.text for finding in checks.engine(os.environ)])"
    )
    words = [*command("mpich"), "1", sys.executable, "-c", code]
    done = run_plain(words, tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@OPEN_MPI_IS_SLOW
def test_a_rank_that_does_not_come_is_an_error_at_the_deadline(kind, tmp_path):
    late = "import os, sys, time; from tfdist.core import world; " + (
        "rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']; "
        "time.sleep(60 if rank == '1' else 0); world.start()"
    )
    words = [*command(kind), "2", sys.executable, "-c", late]
    done = run(words, tmp_path, of=kind, TFDIST_START_TIMEOUT_S="3")
    assert done.returncode != 0
    assert "not all ranks called tfdist.init() within the deadline" in done.stderr


def test_make_mpi_names_a_compiler_that_is_not_there():
    done = subprocess.run(
        ["make", "-s", "mpi", "MPICC=no-such-mpicc"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "no-such-mpicc not found: install an MPI" in done.stderr


# ---- whole products ----


@pytest.mark.slow
def test_the_example_of_the_readme_trains(kind, tmp_path):
    words = [*command(kind), "2", sys.executable, str(ROOT / "recipes/mnist_fit.py")]
    done = run(words, tmp_path, of=kind, timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"same weights on all ranks: [0-9a-f]{12}", done.stdout)) == 1


@pytest.mark.slow
@pytest.mark.deadline(1200)
def test_the_tests_of_the_operations_pass(kind, tmp_path):
    files = [f"tests/parallel/test_{name}.py" for name in CONFORMANCE]
    environ = clean_environment(
        **AS_ROOT,
        TFDIST_ENGINE="mpi",
        TFDIST_MPI_LIBRARY=str(library(kind)),
        TEST_MPIRUN=" ".join(command(kind)),
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *files],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"[0-9]{2,} passed", done.stdout)
