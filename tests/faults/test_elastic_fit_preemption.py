"""SIGTERM to ranks of an elastic `fit`, and to tfdistrun: no step is lost."""

import itertools
import signal
import time

import pytest
from faults.test_elastic_fit import command, sizes, train
from helpers.deadline import deadline
from helpers.elastic_fit_program import STEPS, check_uses, steps_of
from helpers.launcher import finish, run, start, until

pytestmark = pytest.mark.faults

EPOCHS = 30  # the errors become smaller for 26 epochs
SAVES = {"checkpoint": True}


def has_trained(folder, steps):
    file = folder / "commits"
    return file.exists() and len(file.read_text().splitlines()) >= steps


def saved_step(folder):
    return max(int(file.stem) for file in folder.glob("saved/*.keras"))


def last_steps(folder):
    """The number of steps after which each member has ended."""
    last = {member: rows[-1] for member, rows in steps_of(folder).items()}
    return {m: row["epoch"] * STEPS + row["step"] + 1 for m, row in last.items()}


def continue_job(folder, done, *options, epochs=EPOCHS):
    """Starts a preempted job again, with any number of ranks, and checks its result."""
    (folder / "commits").unlink()
    again = run(folder, *options, *command(folder, epochs, SAVES), timeout_s=120.0)
    assert again.code == 0, again.stdout + again.stderr
    first = steps_of(folder)[0][0]
    assert first["epoch"] * STEPS + first["step"] == done
    check_uses(folder, epochs)


@deadline(150)
def test_a_rank_that_gets_sigterm_leaves_and_no_step_is_repeated(tmp_path):
    (tmp_path / "term-0-3-2-after").touch()
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "0")
    steps, history = train(tmp_path, *options, epochs=EPOCHS, compiled=dict(SAVES))
    assert sizes(steps[1]) == [2, 1]
    last = steps[0][-1]  # the first step that all ranks could finish
    assert last["epoch"] < 10 and steps[1][len(steps[0])]["size"] == 1
    assert sorted(file.stem for file in tmp_path.glob("saved/*.keras")) == [
        *(f"{EPOCHS * STEPS - 50:07d}", f"{EPOCHS * STEPS:07d}")
    ]
    best = list(itertools.accumulate(history["mae"], min))
    improved = [best.index(value) + 1 for value in dict.fromkeys(best)]
    saved = {file.stem for file in tmp_path.glob("best-*.keras")}
    assert saved == {f"best-{epoch * STEPS}" for epoch in improved}


# In `make test` in a loop: test_elastic_preemption.py.
@pytest.mark.slow
@deadline(200)
def test_a_preempted_job_continues_at_the_same_step_with_other_ranks(tmp_path):
    process = start(
        tmp_path, "-np", "2", "--min-np", "1", *command(tmp_path, EPOCHS, SAVES)
    )
    until(lambda: has_trained(tmp_path, 53), 60.0)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143, done.stderr
    assert "the job is preempted" in done.report[0]
    assert set(last_steps(tmp_path).values()) == {saved_step(tmp_path)}
    assert not (tmp_path / "result.npz").exists()
    continue_job(tmp_path, saved_step(tmp_path), "-np", "1")


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("place", ["3-2-before", "3-4-after", "3-4-end"])
def test_too_few_ranks_would_be_left(tmp_path, place):
    """Before and after a step, and between the last step of an epoch and the next."""
    (tmp_path / f"term-1-{place}").touch()
    options = ("-np", "2", "--min-np", "2", "--max-restarts", "0")
    done = run(tmp_path, *options, *command(tmp_path, EPOCHS, SAVES), timeout_s=120.0)
    assert done.code == 143, done.stderr
    assert set(last_steps(tmp_path).values()) == {saved_step(tmp_path)}
    continue_job(tmp_path, saved_step(tmp_path), *("-np", "3", "--min-np", "1"))


@pytest.mark.slow
@deadline(150)
@pytest.mark.parametrize(
    ("epochs", "place"), [(EPOCHS, "9-2-validation"), (EPOCHS - 1, "28-4-before")]
)
def test_sigterm_in_a_validation_or_in_the_last_step(tmp_path, epochs, place):
    """SIGTERM in a validation, and in the very last step, which member 0 delays."""
    (tmp_path / f"term-1-{place}").touch()
    hold = tmp_path / f"hold-0-{place}"
    hold.touch()
    options = ("-np", "2", "--min-np", "2", "--max-restarts", "0")
    process = start(tmp_path, *options, *command(tmp_path, epochs, SAVES))
    until(lambda: not (tmp_path / f"term-1-{place}").exists(), 90.0)
    time.sleep(2.0)
    hold.unlink()
    done = finish(process, 60.0)
    assert done.code == 143, done.stderr
    epoch = int(place.partition("-")[0])
    assert saved_step(tmp_path) == (epoch + 1) * STEPS
    assert set(last_steps(tmp_path).values()) == {saved_step(tmp_path)}


@pytest.mark.slow
@deadline(300)
def test_a_rank_is_lost_and_then_the_job_is_preempted(tmp_path):
    epochs = 120
    (tmp_path / "kill-0-3-2-before").touch()
    (tmp_path / "slow").touch()
    options = ("-np", "3", "--min-np", "1")
    process = start(tmp_path, *options, *command(tmp_path, epochs, SAVES))
    until(lambda: has_trained(tmp_path, 300), 90.0)
    process.send_signal(signal.SIGTERM)
    done = finish(process, 30.0)
    assert done.code == 143, done.stderr
    (tmp_path / "kill-1-80-2-before").touch()  # and again in the job that continues
    options = ("-np", "2", "--min-np", "1")
    continue_job(tmp_path, saved_step(tmp_path), *options, epochs=epochs)


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("place", [f"{EPOCHS - 1}-4-before", f"{EPOCHS - 1}-4-fit"])
def test_sigterm_in_the_last_epoch(tmp_path, place):
    (tmp_path / f"term-1-{place}").touch()
    options = ("-np", "2", "--min-np", "1")
    done = run(tmp_path, *options, *command(tmp_path, EPOCHS, SAVES), timeout_s=150.0)
    assert done.code in (0, 143), done.stderr
    check_uses(tmp_path, EPOCHS)


@pytest.mark.slow
@deadline(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_on_other_signals_all_ranks_save_and_end(tmp_path, number):
    """StopOnSignal keeps its other signals."""
    process = start(
        tmp_path, "-np", "2", "--min-np", "1", *command(tmp_path, EPOCHS, SAVES)
    )
    until(lambda: has_trained(tmp_path, 53), 60.0)
    process.send_signal(number)
    done = finish(process, 30.0)
    assert done.code == 128 + number, done.stderr
    continue_job(tmp_path, saved_step(tmp_path), "-np", "2")
