"""Elastic `model.fit`: ranks are lost and replaced, no step and no metric is lost."""

import itertools
import json
import sys

import pytest
from helpers.deadline import deadline
from helpers.elastic_fit_program import STEPS, check, steps_of
from helpers.elastic_folder import finish_at, has_joined, lines
from helpers.launcher import python, run, start, until

pytestmark = pytest.mark.faults


def command(folder, epochs, compiled=None):
    program = ["-m", "helpers.elastic_fit_program", str(folder), str(epochs)]
    return [sys.executable, *program, json.dumps(compiled or {})]


def train(folder, *options, epochs, kills=(), compiled=None, timeout_s=120.0):
    """Runs the program; checks its result, its history and each rank's steps."""
    for kill in kills:
        (folder / f"kill-{kill}").touch()
    words = command(folder, epochs, compiled)
    done = run(folder, *options, *words, timeout_s=timeout_s)
    assert done.code == 0, done.stdout + done.stderr
    per_execution = (compiled or {}).get("steps_per_execution", 1)
    history = check(folder, epochs, every_step=per_execution == 1)
    return steps_of(folder), history


def train_until_joined(folder, *options, member, kills):
    """Trains until a newcomer has joined, and for 12 epochs more; checks the result.

    All ranks then validate once more: after every tenth epoch.
    """
    (folder / "slow").touch()
    for kill in kills:
        (folder / f"kill-{kill}").touch()
    process = start(folder, *options, *command(folder, 100_000))
    until(lambda: has_joined(folder, member), 90.0)
    epochs = lines(folder / "commits")[-1]["epoch"] + 12
    finish_at(folder, process, epochs)
    check(folder, epochs)
    return steps_of(folder), epochs


def sizes(rows):
    """The numbers of ranks of the steps, without repetitions."""
    return [size for size, _ in itertools.groupby(row["size"] for row in rows)]


@deadline(150)
def test_a_lost_rank_is_replaced_and_the_history_is_that_of_an_unfailed_run(tmp_path):
    options = ("-np", "2", "--min-np", "1")
    steps, epochs = train_until_joined(
        tmp_path, *options, member=2, kills=["0-3-2-before"]
    )
    assert sizes(steps[1]) == [2, 1, 2]
    assert len(steps[1]) == epochs * STEPS
    assert steps[2][-1]["epoch"] == epochs - 1


# Rank 2 is lost after step 3. Rank 1 believes that it has not completed the step, which
# rank 0 has completed, with its hooks.
HOOKS = """
import os, signal, time
import keras, numpy as np, tfdist
from tfdist.callbacks._elastic_fit import ElasticFit

def run_step(fit, place, iterator, tries=[]):
    original(fit, place, iterator)
    if member == 1 and place.step == 3 and not tries:
        tries.append(1)
        while not fit._generations.has_ended():
            time.sleep(0.05)
        record = tfdist.errors.ErrorRecord(kind="rank_failed", rank=2)
        raise tfdist.RankFailedError("rank 2 was lost", record)

class Halve(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) / 2

class Lose(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if member == 2 and batch == 3:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

original, ElasticFit._run_step = ElasticFit._run_step, run_step
tfdist.init()
member = int(os.environ["TFDIST_MEMBER"])
x = np.ones((60, 1), "float32")
train = tfdist.data.global_batches((x, x), global_batch=6)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
called = [tfdist.callbacks.Elastic(), Halve(), Lose()]
model.fit(train, verbose=0, callbacks=called)
print("RATE", float(model.optimizer.learning_rate) == 0.5**11, flush=True)
"""


@pytest.mark.slow
@deadline(90)
def test_a_rank_that_takes_a_step_of_another_runs_its_hooks_once(tmp_path):
    options = ("-np", "3", "--min-np", "2", "--max-restarts", "0")
    done = run(tmp_path, *options, *python(HOOKS), timeout_s=80.0)
    assert done.code == 0, done.stdout + done.stderr
    assert done.stdout.count("RATE True") == 2


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
@deadline(150)
def test_a_newcomer_may_become_rank_0_while_it_joins(tmp_path):
    """The rank 0 that it would join is lost while it shares its state."""
    options = ("-np", "3", "--min-np", "1", "--max-restarts", "1")
    kills = ["1-3-2-before", "0-0-0-share"]
    steps, _ = train_until_joined(tmp_path, *options, member=3, kills=kills)
    assert {step["rank"] for step in steps[3]} == {0}
    assert sizes(steps[2]) == [3, 2]


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("member", [0, 2])
def test_a_validation_includes_the_samples_of_a_lost_rank(tmp_path, member):
    """It is lost in the validation, and after it, before the metrics are averaged."""
    steps, history = train(
        *(tmp_path, "-np", "3", "--min-np", "1"),
        epochs=100,
        kills=[f"{member}-9-2-validation", "1-19-4-end"],
    )
    assert len(history["val_mae"]) == 10
    assert all(step["epoch"] < 20 for step in steps[1])


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("kill", ["1-180-2-before", "1-199-4-fit"])
def test_with_a_spare_all_results_have_the_bits_of_an_unfailed_run(tmp_path, kill):
    (tmp_path / "failed").mkdir()
    (tmp_path / "unfailed").mkdir()
    for folder in ("failed", "unfailed"):
        (tmp_path / folder / "slow").touch()  # so that the spare is ready by then
    options = ("-np", "2", "--min-np", "1", "--spares", "1")
    steps, history = train(*(tmp_path / "failed", *options), epochs=200, kills=[kill])
    assert sizes(steps[0]) == [2]
    _, unfailed = train(tmp_path / "unfailed", *options, epochs=200)
    assert history == unfailed


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("epoch", [179, 180])
def test_a_spare_joins_at_the_end_of_an_epoch_with_and_without_validation(
    tmp_path, epoch
):
    (tmp_path / "slow").touch()
    steps, history = train(
        *(tmp_path, "-np", "2", "--min-np", "1", "--spares", "1"),
        epochs=200,
        kills=[f"1-{epoch}-4-end"],
    )
    assert sizes(steps[0]) == [2]
    assert steps[2][0]["epoch"] == epoch + 1
    assert len(history["val_mae"]) == 20


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize(
    "compiled",
    [
        {"steps_per_execution": 2},
        {"run_eagerly": True},
        {"jit_compile": True},
        {"per_rank_batch": 5},
        {"per_rank_batch": 5, "steps_per_execution": 2},
        {"batches": {"0": 10, "2": 17, "40": 26}},
        {"batches": {"0": 17, "2": 7}, "steps_per_execution": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_all_ways_to_compile_go_on(tmp_path, compiled):
    steps, _ = train(
        *(tmp_path, "-np", "2", "--min-np", "1"),
        epochs=250,
        kills=["0-3-2-before"],
        compiled=compiled,
    )
    assert sizes(steps[1]) == [2, 1, 2]
