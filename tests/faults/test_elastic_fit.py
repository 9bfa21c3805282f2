"""Elastic `model.fit`: ranks are lost and replaced, no step and no metric is lost."""

import itertools
import json
import sys

import numpy as np
import pytest
from helpers.deadline import deadline
from helpers.elastic_fit_program import STEPS, expected_metrics, expected_uses
from helpers.launcher import run

pytestmark = pytest.mark.faults


def train(folder, *options, epochs, kills=(), timeout_s=120.0):
    """Runs the program; checks its result, its history and each rank's steps."""
    for kill in kills:
        (folder / f"kill-{kill}").touch()
    program = "helpers.elastic_fit_program"
    command = [sys.executable, "-m", program, str(folder), str(epochs)]
    done = run(folder, *options, *command, timeout_s=timeout_s)
    assert done.code == 0, done.stdout + done.stderr
    result = np.load(folder / "result.npz")["uses"]
    assert np.array_equal(result.round(), expected_uses(epochs))
    lines = [json.loads(line) for line in (folder / "commits").read_text().splitlines()]
    steps = {}
    for line in lines:
        steps.setdefault(line["member"], []).append(line)
    for rows in steps.values():
        numbers = [row["epoch"] * STEPS + row["step"] for row in rows]
        assert numbers == list(range(numbers[0], numbers[0] + len(rows)))
    histories = [json.loads(f.read_text()) for f in folder.glob("history-*.json")]
    assert len(histories) >= 2 and all(one == histories[0] for one in histories)
    metrics = expected_metrics(epochs)
    assert np.allclose(histories[0]["mae"], metrics, rtol=1e-5, atol=0.0)
    assert len((folder / "log.csv").read_text().splitlines()) == epochs + 1
    return steps, histories[0]


def sizes(rows):
    """The numbers of ranks of the steps, without repetitions."""
    return [size for size, _ in itertools.groupby(row["size"] for row in rows)]


@deadline(150)
def test_a_lost_rank_is_replaced_and_the_history_is_that_of_an_unfailed_run(tmp_path):
    steps, _ = train(
        *(tmp_path, "-np", "2", "--min-np", "1"), epochs=200, kills=["0-3-2-before"]
    )
    assert sizes(steps[1]) == [2, 1, 2]
    assert len(steps[1]) == 200 * STEPS
    assert steps[2][-1]["epoch"] == 199


@pytest.mark.slow
@deadline(300)
def test_ranks_are_lost_at_the_end_of_an_epoch_and_after_a_step(tmp_path):
    steps, _ = train(
        *(tmp_path, "-np", "3", "--min-np", "1"),
        epochs=300,
        kills=["0-3-4-end", "2-10-2-after"],
    )
    assert sizes(steps[1])[:3] == [3, 2, 1] and sizes(steps[1])[-1] == 3


@pytest.mark.slow
@deadline(300)
def test_with_a_spare_all_results_have_the_bits_of_an_unfailed_run(tmp_path):
    (tmp_path / "failed").mkdir()
    (tmp_path / "unfailed").mkdir()
    for folder in ("failed", "unfailed"):
        (tmp_path / folder / "slow").touch()  # so that the spare is ready by then
    options = ("-np", "2", "--min-np", "1", "--spares", "1")
    steps, history = train(
        *(tmp_path / "failed", *options), epochs=200, kills=["1-180-2-before"]
    )
    assert sizes(steps[0]) == [2]
    _, unfailed = train(tmp_path / "unfailed", *options, epochs=200)
    assert history == unfailed
