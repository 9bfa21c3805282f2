"""A slow rank of an elastic job is replaced, and no step is lost."""

import sys

import pytest
from faults.test_elastic_fit import train as fit
from helpers.deadline import deadline
from helpers.json_lines import lines
from helpers.launcher import run

pytestmark = pytest.mark.faults


def train(folder, *options):
    program = [sys.executable, "-m", "helpers.straggler_program", str(folder)]
    done = run(folder, *options, *program, timeout_s=100.0)
    assert done.code == 0, done.stdout + done.stderr
    return done, lines(folder / "commits")


@pytest.mark.slow
@deadline(120)
def test_a_slow_rank_is_replaced_when_another_process_is_ready(tmp_path):
    done, commits = train(tmp_path, "-np", "2", "--min-np", "1")
    assert {line["size"] for line in commits} == {2}  # never fewer ranks
    assert {line["member"] for line in commits} == {0, 1, 2}
    assert {line["rank"] for line in commits if line["member"] == 2} == {1}
    assert sorted(path.name for path in tmp_path.glob("end-*")) == ["end-0", "end-2"]
    report = "\n".join(done.report)
    assert (
        "rank 1" in done.report[0]
        and "is slow, and is to be replaced" in done.report[0]
    )
    assert "replacement 2" in done.report[1] and "is started" in done.report[1]
    assert "the job goes on with 2 ranks" in done.report[2]
    assert len(done.report) == 3, report
    assert "times slower than the median" in done.stdout + done.stderr


@pytest.mark.slow
@deadline(150)
def test_a_slow_rank_is_replaced_in_fit(tmp_path):
    steps, _ = fit(
        *(tmp_path, "-np", "2", "--min-np", "1", "--spares", "1"),
        epochs=250,
        compiled={"slow_member": 1},
    )
    assert steps.keys() == {0, 1, 2}
    assert steps[2][0]["rank"] == 1 and {row["size"] for row in steps[0]} == {2}
    assert len(steps[0]) == len(steps[1]) + len(steps[2])
