"""Elastic scripts written for Horovod: ranks are lost and replaced while they train.

The scripts are in tests/integration/horovod_scripts. Each process of a job leaves
member-<number>.json, unless it was killed.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.deadline import deadline
from helpers.launcher import clean_environment, run

from tfdist.horovod import runner

pytestmark = pytest.mark.faults
SCRIPTS = Path(__file__).parents[1] / "integration" / "horovod_scripts"


def train(folder, script, *arguments, wishes=(), options=(), code=0):
    """Runs a script on two ranks; returns its outcome, and what each member has left.

    Args:
        folder: working folder of the job.
        script: name of the script.
        *arguments: arguments of the script.
        wishes: files that make a member kill itself or raise; see elastic_report.py.
        options: options of tfdistrun.
        code: expected exit code.
    """
    for wish in wishes:
        (folder / wish).touch()
    done = run(
        folder,
        *("--horovod", "-np", "2", "--min-np", "1", *options),
        *(str(SCRIPTS / f"{script}.py"), *arguments),
        timeout_s=280.0,
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    assert done.code == code, done.stdout + done.stderr
    left = {
        int(path.stem.removeprefix("member-")): json.loads(path.read_text())
        for path in folder.glob("member-*.json")
    }
    return done, left


def check_joined(done, survivor, newcomer, first_rank):
    """Checks that a newcomer took part until the end, and ended with equal weights."""
    assert survivor["places"] == [[first_rank, 2], [0, 1], [0, 2]]
    assert newcomer["places"] == [[1, 2]]
    assert survivor["hash"] == newcomer["hash"]
    assert done.stdout.count("finished with 2 ranks") == 1
    assert sum(line.startswith("the job goes on") for line in done.report) >= 2


def weights_after(batches):
    """Final weights of elastic_variables.py, if each batch counts once."""
    rows = np.random.default_rng(1).integers(-8, 8, (32, 4)).astype(float)
    targets = rows @ np.array([1.0, 2.0, 3.0, 4.0])
    weights = np.zeros(4)
    for batch in range(batches):
        part = slice(batch % 4 * 8, batch % 4 * 8 + 8)
        errors = rows[part] @ weights - targets[part]
        weights -= 2.0**-17 * 2 * errors @ rows[part]
    return weights


# In `make test` with simulated losses: tests/single/test_horovod_elastic.py.
@pytest.mark.slow
@deadline(300)
def test_variables_and_attributes_survive_the_loss_of_rank_0(tmp_path):
    done, left = train(
        *(tmp_path, "elastic_variables"), wishes=["kill-0-27", "raise-1-155"]
    )
    check_joined(done, left[1], left[2], first_rank=1)
    for own in left.values():
        assert own["history"] == list(range(10, 201, 10)) and own["batch"] == 200
        np.testing.assert_allclose(own["found"], weights_after(200), rtol=1e-5)
        assert own["rate"] == 2.0**-16
    first = left[2]["batches"][0]
    assert first % 10 == 1 and left[1]["batches"].count(first) == 1
    # From batch 41 on, the second function is used.
    assert left[1]["traces"] == 2 and left[2]["traces"] == (1 if first > 40 else 2)
    # Alone, with the newcomer, and after the error that the script has raised.
    assert left[1]["resets"] == [1, 2, 2] and left[2]["resets"] == [2, 2]
    # Batch 27 may have been undone; 151 to 155 were, on both ranks. The other rank may
    # not have had the sums of batch 155 when the script raised its error.
    assert left[1]["batches"].count(155) == 2
    assert left[1]["batches"].count(154) == left[2]["batches"].count(154) == 2
    assert left[1]["batches"].count(20) == left[1]["batches"].count(200) == 1


@pytest.mark.slow
@deadline(300)
def test_a_loop_with_a_wrapped_tape_goes_on(tmp_path):
    wishes = ["kill-1-57"]
    done, left = train(tmp_path, "elastic_tape", "--batches", "400", wishes=wishes)
    check_joined(done, left[0], left[2], first_rank=0)
    for own in left.values():
        # One more: the step before the broadcast, without a reduction.
        assert own["iterations"] == 401 and own["epoch"] == 2
        assert own["traces"] == left[0]["traces"]
        assert own["rate"] == pytest.approx(0.002)
    assert max(left[0]["loss"], left[2]["loss"]) < 1.0
    # The other rank may not have had the sums of batch 57.
    assert left[0]["batches"].count(56) == 2 and left[0]["batches"].count(50) == 1
    lines = [line for line in done.stdout.splitlines() if " batch " in line]
    assert [line.partition(":")[0] for line in lines] == [
        f"[rank 0] epoch {epoch} batch {batch}"
        for epoch in (0, 1)
        for batch in (100, 200)
    ]


@pytest.mark.slow
@deadline(300)
def test_fit_goes_on_with_the_epochs_that_are_left(tmp_path):
    done, left = train(tmp_path, "elastic_fit", wishes=["kill-1-57"])
    check_joined(done, left[0], left[2], first_rank=0)
    for own in left.values():
        assert own["epoch"] == 6 and own["loss"] < 1.0
        assert own["traces"] == left[0]["traces"] <= 2
        assert own["rate"] == pytest.approx(0.002)
    assert left[0]["iterations"] == left[2]["iterations"] >= 6 * 40
    assert left[0]["loss"] == left[2]["loss"]  # MetricAverageCallback
    assert "[rank 0] Epoch 1/5" in done.stdout and "[rank 1] Epoch" not in done.stdout


@pytest.mark.slow
@deadline(300)
def test_the_state_is_that_of_the_last_commit_if_the_job_cannot_go_on(tmp_path):
    done, left = train(
        *(tmp_path, "elastic_variables"),
        wishes=["kill-1-27"],
        options=["--min-np", "2", "--max-restarts", "0"],
        code=137,
    )
    assert left[0]["batch"] == 20 and left[0]["history"] == [10, 20]
    np.testing.assert_allclose(left[0]["found"], weights_after(20), rtol=1e-5)
    [seen] = [line for line in done.report if "as rank 0 saw it" in line]
    assert "RankFailedError: rank 1 " in seen and "--max-restarts" in seen


@pytest.mark.slow
@deadline(300)
def test_a_rank_that_has_returned_goes_back_if_another_is_lost_before(tmp_path):
    _, left = train(
        *(tmp_path, "elastic_variables", "--batches", "205"), wishes=["kill-1-205"]
    )
    assert left[0]["batches"].count(205) == 2 and left[0]["batches"].count(200) == 1
    np.testing.assert_allclose(left[0]["found"], weights_after(205), rtol=1e-5)


@pytest.mark.slow
@deadline(300)
def test_a_job_grows_and_shrinks_and_calls_the_reset_callbacks(tmp_path):
    script = tmp_path / "find.sh"
    script.write_text('#!/bin/sh\necho "localhost:$(cat slots)"\n')
    script.chmod(0o755)
    for name, slots in (("slots", 1), ("slots-10", 2), ("slots-160", 1)):
        (tmp_path / name).write_text(str(slots))
    options = ("-np", "1", "--max-np", "2", "--host-discovery-script", str(script))
    done, left = train(tmp_path, "elastic_variables", options=options)
    assert left[2]["places"] == [[1, 2]] and left[2]["batch"] < 200  # it has left
    assert left[0]["places"] == [[0, 1], [0, 2], [0, 1]]
    assert left[0]["resets"] == [2, 1]
    assert left[0]["batches"] == list(range(1, 201))  # none was undone
    np.testing.assert_allclose(left[0]["found"], weights_after(200), rtol=1e-5)
    assert any("newcomer 2" in line for line in done.report)
    assert not any("was lost" in line for line in done.report)


@pytest.mark.slow
@deadline(300)
def test_a_function_returns_the_results_of_the_ranks_at_the_end(tmp_path, monkeypatch):
    (tmp_path / "loses_rank_0.py").write_text(
        "def train():\n"
        "    import os, horovod.tensorflow as hvd\n"
        "    hvd.init()\n"
        "    @hvd.elastic.run\n"
        "    def steps(state):\n"
        "        while state.batch < 200 or hvd.size() < 2:\n"
        "            state.batch += 1\n"
        "            state.commit()\n"
        "            if os.environ['TFDIST_MEMBER'] == '0' and state.batch == 3:\n"
        "                os.kill(os.getpid(), 9)\n"
        "    steps(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0))\n"
        "    return hvd.rank(), int(os.environ['TFDIST_MEMBER'])\n"
    )
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TFDIST_OBJECTS", "pickle")
    import loses_rank_0

    found = runner.run(loses_rank_0.train, num_proc=2, min_num_proc=1)
    assert found == [(0, 1), (1, 2)]
