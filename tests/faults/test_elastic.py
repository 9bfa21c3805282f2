"""Elastic training with TensorFlow: ranks are lost and replaced, no step is lost."""

import itertools
import re
import sys

import numpy as np
import pytest
from helpers.deadline import deadline
from helpers.elastic_folder import finish_at, has_joined, lines
from helpers.elastic_program import expected
from helpers.launcher import run, start, until

pytestmark = pytest.mark.faults


def command(folder, steps):
    return [sys.executable, "-m", "helpers.elastic_program", str(folder), str(steps)]


def train(folder, *options, steps, kills=(), code=0, timeout_s=120.0):
    """Runs the program; checks its result, and what each rank has committed."""
    for kill in kills:
        (folder / f"kill-{kill}").touch()
    done = run(folder, *options, *command(folder, steps), timeout_s=timeout_s)
    assert done.code == code, done.stdout + done.stderr
    if code == 0:
        check_result(folder, steps)
    return done, checked_commits(folder)


def checked_commits(folder):
    """Returns the commits of each rank: each step once, in order."""
    by_member = itertools.groupby(
        sorted(lines(folder / "commits"), key=lambda x: x["member"]),
        lambda x: x["member"],
    )
    commits = {member: list(rows) for member, rows in by_member}
    for rows in commits.values():
        first = rows[0]["step"]
        assert [row["step"] for row in rows] == list(range(first, first + len(rows)))
    return commits


def check_result(folder, steps):
    result = np.load(folder / "result.npz")
    uses, order = expected(steps)
    assert np.array_equal(result["uses"], uses)
    assert result["order"] == order


def sizes(rows):
    """The numbers of ranks of the steps, without repetitions."""
    return [size for size, _ in itertools.groupby(row["size"] for row in rows)]


# In `make test` with `fit`: test_elastic_fit.py.
@pytest.mark.slow
@deadline(150)
def test_a_lost_rank_is_replaced_and_no_step_or_sample_is_lost(tmp_path):
    (tmp_path / "slow").touch()
    (tmp_path / "kill-0-20-after").touch()
    options = ("-np", "2", "--min-np", "1")
    process = start(tmp_path, *options, *command(tmp_path, 100_000))
    until(lambda: has_joined(tmp_path, 2), 90.0)
    steps = lines(tmp_path / "commits")[-1]["step"] + 50
    done = finish_at(tmp_path, process, steps)
    check_result(tmp_path, steps)
    commits = checked_commits(tmp_path)
    assert sizes(commits[1]) == [2, 1, 2]
    assert commits[0][-1]["step"] == 19
    assert len(commits[1]) == steps and commits[2][-1]["step"] == steps - 1
    assert "killed by SIGKILL" in done.report[0] and done.report[0].startswith("rank 0")
    # Rank 1 may have had the sums of step 20 when rank 0 was lost. On a busy machine,
    # it goes on before the start of the replacement is reported.
    goes_on = r"the job goes on with {} after commit \d+"
    start_line, shrink_line = sorted(done.report[1:3])
    assert re.fullmatch(r"replacement 2 \(process \d+\) is started", start_line)
    assert re.fullmatch(goes_on.format("1 rank"), shrink_line)
    assert re.fullmatch(goes_on.format("2 ranks"), done.report[3])
    assert len(done.report) == 4


@pytest.mark.slow
@deadline(300)
def test_a_spare_takes_the_place_of_a_lost_rank_at_once(tmp_path):
    (tmp_path / "slow").touch()  # so that the spare is ready by then
    _, commits = train(
        *(tmp_path, "-np", "2", "--min-np", "1", "--spares", "1"),
        steps=1000,
        kills=["1-900-before"],
    )
    assert sizes(commits[0]) == [2]
    assert commits[2][0]["step"] == 900


@pytest.mark.slow
@deadline(150)
def test_a_lost_rank_does_not_end_a_job_with_an_embedding_table(tmp_path):
    (tmp_path / "table").touch()
    options = ("-np", "2", "--min-np", "1")
    _, commits = train(tmp_path, *options, steps=60, kills=["1-20-before"])
    assert sizes(commits[0])[:2] == [2, 1]


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("place", ["before", "after", "commit"])
def test_two_ranks_of_four_are_lost_in_one_step(tmp_path, place):
    kills = [f"1-20-{place}", f"3-20-{place}"]
    _, commits = train(
        *(tmp_path, "-np", "4", "--min-np", "2"),
        steps=1500,
        kills=kills,
        timeout_s=250.0,
    )
    assert sizes(commits[0])[:2] == [4, 2] and sizes(commits[0])[-1] == 4
    last = [rows[-1]["step"] for rows in commits.values()]
    assert last.count(1499) == 4


@pytest.mark.slow
@deadline(300)
def test_a_rank_is_lost_in_the_last_step(tmp_path):
    _, commits = train(
        *(tmp_path, "-np", "3", "--min-np", "2"), steps=50, kills=["2-49-before"]
    )
    assert len(commits[0]) == len(commits[1]) == 50


@pytest.mark.slow
@deadline(300)
def test_the_job_waits_for_a_replacement_if_too_few_ranks_are_left(tmp_path):
    _, commits = train(
        *(tmp_path, "-np", "2", "--min-np", "2"), steps=60, kills=["1-20-before"]
    )
    assert sizes(commits[0]) == [2]
    assert commits[2][0]["step"] == 20


@pytest.mark.slow
@deadline(300)
def test_the_job_ends_if_too_few_ranks_are_left_and_none_may_be_started(tmp_path):
    done, commits = train(
        *(tmp_path, "-np", "2", "--min-np", "2", "--max-restarts", "0"),
        steps=60,
        kills=["1-20-before"],
        code=137,
    )
    assert len(commits[0]) == 20
    [reason] = [line for line in done.report if line.startswith("the job ends: ")]
    assert "--min-np" in reason and "--max-restarts" in reason
    assert reason.removeprefix("the job ends: ") in done.stderr
