"""Elastic jobs that grow and shrink with a discovery script: no step is lost."""

import itertools
import json
import sys
import time

import numpy as np
import pytest
from helpers import elastic_client
from helpers.deadline import deadline
from helpers.elastic_fit_program import check, ends_of_steps
from helpers.elastic_folder import finish_at, latest_size, lines
from helpers.elastic_program import expected
from helpers.launcher import finish, start, until
from helpers.slots import Slots

from tfdist.data import epoch_order

pytestmark = pytest.mark.faults


def follow(folder, slots, sequence, file="commits"):
    """Sets the slots one after another, each when the ranks have followed the last."""
    for number in sequence:
        slots.set(number)
        until(lambda number=number: latest_size(folder / file) == number, 60.0)


def sizes_of(rows, member):
    """The numbers of ranks that a member has seen, without repetitions."""
    own = [row["size"] for row in rows if row["member"] == member]
    return [size for size, _ in itertools.groupby(own)]


def tries_after_leaving(rows):
    """The numbers of tries of the first steps that members made with fewer ranks."""
    found = []
    for member in {row["member"] for row in rows}:
        own = [row for row in rows if row["member"] == member]
        pairs = itertools.pairwise(own)
        found += [new["tries"] for old, new in pairs if new["size"] < old["size"]]
    return found


def assert_grown(sizes):
    """Asserts that the sizes are 2, 4, 3, 1, 4.

    Newcomers that are not ready at the same time join one after another.
    """
    shrunk = sizes.index(1)
    assert sizes[0] == 2 and 4 in sizes[:shrunk] and sizes[shrunk - 1] == 3, sizes
    assert sizes[shrunk:] == sorted(sizes[shrunk:]) and sizes[-1] == 4, sizes


# ---- a loop without TensorFlow, which does not hand over ----


@deadline(60)
def test_ranks_join_and_leave_and_each_sample_is_used_as_often(tmp_path):
    slots = Slots(tmp_path, 2)
    (tmp_path / "hold").touch()
    program = ["-m", "helpers.elastic_client", str(tmp_path), "1"]
    process = start(tmp_path, *slots.options(np=2), sys.executable, *program)
    follow(tmp_path, slots, [2, 4, 3, 1, 4], file="generations")
    (tmp_path / "hold").unlink()
    done = finish(process, 30.0)
    assert done.code == 0, done.stdout + done.stderr
    result = np.load(tmp_path / "result.npz")
    uses, order = elastic_client.expected(int(result["steps"]))
    assert np.array_equal(result["uses"], uses) and result["order"] == order
    assert len({file.read_text() for file in tmp_path.glob("hash-*")}) == 1
    assert_grown(sizes_of(lines(tmp_path / "generations"), 0))
    assert "this host has 4 slots now: the job grows to 4 ranks" in done.report
    assert "this host has 1 slot now: the job shrinks to 1 rank" in done.report
    assert not any("was lost" in line for line in done.report)


# In `make test`: tests/single/test_launch_elastic.py.
@pytest.mark.slow
@deadline(60)
def test_the_job_starts_with_all_slots_and_keeps_them_if_the_script_fails(tmp_path):
    slots = Slots(tmp_path, 9)
    (tmp_path / "hold").touch()
    program = ["-m", "helpers.elastic_client", str(tmp_path), "1"]
    options = slots.options(np=1, most=3)
    process = start(tmp_path, *options, sys.executable, *program)
    until(lambda: latest_size(tmp_path / "generations") == 3, 30.0)
    slots.file.unlink()
    time.sleep(2.2)  # two further runs of the script, whose failure is reported once
    (tmp_path / "hold").unlink()
    done = finish(process, 30.0)
    assert done.code == 0, done.stdout + done.stderr
    assert done.report == ["this host has 9 slots: the job starts with 3 ranks"]
    warning = f"tfdistrun: warning: {slots.script} failed (exit code 1): cat: "
    assert done.stderr.count(warning) == 1
    assert "The job keeps its 3 ranks" in done.stderr


# ---- a training loop ----


def start_loop(folder, slots, **options):
    (folder / "slow").touch()
    program = ["-m", "helpers.elastic_program", str(folder), "100000"]
    return start(folder, *slots.options(**options), sys.executable, *program)


def finish_loop(folder, process):
    """Ends the loop; checks that each sample was used as often as it should be."""
    steps = lines(folder / "commits")[-1]["step"] + 50
    done = finish_at(folder, process, steps)
    result = np.load(folder / "result.npz")
    assert result["steps"] == steps
    uses, order = expected(steps)
    assert np.array_equal(result["uses"], uses) and result["order"] == order
    return done


@pytest.mark.slow
@deadline(300)
def test_a_loop_grows_and_shrinks_and_uses_each_sample_as_often(tmp_path):
    slots = Slots(tmp_path, 2)
    process = start_loop(tmp_path, slots, np=2)
    follow(tmp_path, slots, [2, 4])
    undone = len(lines(tmp_path / "undone"))
    follow(tmp_path, slots, [3, 1])
    assert len(lines(tmp_path / "undone")) == undone  # who leaves costs no step
    follow(tmp_path, slots, [4])
    done = finish_loop(tmp_path, process)
    rows = lines(tmp_path / "commits")
    assert_grown(sizes_of(rows, 0))
    assert {row["member"] for row in rows if row["size"] == 1} == {0}
    assert len(list(tmp_path.glob("end-*"))) == 4
    assert "this host has 4 slots now: the job grows to 4 ranks" in done.report
    assert "this host has 1 slot now: the job shrinks to 1 rank" in done.report
    assert not any("was lost" in line for line in done.report)


_BATCHES = """
import json, os, signal, sys, time
from pathlib import Path
import tensorflow as tf, tfdist
tfdist.init()
epochs, kill = int(sys.argv[1]), Path("kill")
uses = tf.Variable(tf.zeros([53]))
state = tfdist.elastic.State(uses)
commits = os.open("commits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for rows in state.batches(53, per_rank_batch=5, epochs=epochs, seed=4):
    rank, size = tfdist.rank(), tfdist.size()
    if rank == 1 and kill.exists():
        kill.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    with tfdist.DistributedGradientTape(op=tfdist.ReduceOp.SUM) as tape:
        loss = -tf.reduce_sum(tf.gather(uses, rows))
    uses.assign_sub(tape.gradient(loss, uses))
    time.sleep(0.02)
    if state.commit():
        line = {"step": state.committed, "rank": rank, "size": size,
                "rows": rows.tolist(), "position": state.position}
        os.write(commits, (json.dumps(line) + "\\n").encode())
print("uses", json.dumps(uses.numpy().tolist()))
"""


@pytest.mark.slow
@deadline(120)
def test_with_batches_per_rank_each_sample_is_used_at_most_once_in_an_epoch(tmp_path):
    slots = Slots(tmp_path, 1)
    (tmp_path / "batches.py").write_text(_BATCHES)
    options = slots.options(np=1, most=3)
    process = start(tmp_path, *options, sys.executable, "batches.py", "60")
    follow(tmp_path, slots, [1, 3])
    (tmp_path / "kill").touch()
    done = finish(process, 90.0)
    assert done.code == 0, done.stdout + done.stderr
    rows = lines(tmp_path / "commits")
    steps = {step: [] for step in range(1, rows[-1]["step"] + 1)}
    for row in sorted(rows, key=lambda row: row["rank"]):
        steps[row["step"]].append(row)
    assert all(len(own) == own[0]["size"] for own in steps.values())
    epoch, used, uses = 0, 0, np.zeros(53)
    for own in steps.values():
        batch = np.concatenate([row["rows"] for row in own])
        if used + len(batch) > 53:  # the ranks have become more
            epoch, used = epoch + 1, 0
        order = epoch_order(53, seed=4, epoch=epoch)
        assert np.array_equal(batch, order[used : used + len(batch)])
        uses[batch] += 1
        used += len(batch)
        if used + len(batch) > 53:
            epoch, used = epoch + 1, 0
        assert {row["position"] for row in own} == {epoch * 53 + used}
    assert epoch == 60 and json.dumps(uses.tolist()) in done.stdout
    assert {2, 3} <= {row["size"] for row in rows}


# ---- model.fit ----


@pytest.mark.slow
@deadline(300)
def test_a_fit_grows_and_shrinks_and_uses_each_sample_as_often(tmp_path):
    (tmp_path / "slow").touch()
    slots = Slots(tmp_path, 2)
    program = ["-m", "helpers.elastic_fit_program", str(tmp_path), "100000", "{}"]
    options = slots.options(np=2)
    process = start(tmp_path, *options, sys.executable, *program)
    follow(tmp_path, slots, [2, 4, 3, 1, 4])
    epochs = lines(tmp_path / "commits")[-1]["epoch"] + 15
    done = finish_at(tmp_path, process, epochs)
    check(tmp_path, epochs)
    rows = lines(tmp_path / "commits")
    assert_grown(sizes_of(rows, 0))
    assert set(tries_after_leaving(rows)) == {1}  # who leaves costs no step
    assert not any("was lost" in line for line in done.report)


@pytest.mark.slow
@deadline(300)
def test_with_a_batch_per_rank_an_epoch_has_fewer_steps_on_more_ranks(tmp_path):
    (tmp_path / "slow").touch()
    slots = Slots(tmp_path, 2)
    compiled = json.dumps({"per_rank_batch": 5})
    program = ["-m", "helpers.elastic_fit_program", str(tmp_path), "100000", compiled]
    process = start(tmp_path, *slots.options(np=2), sys.executable, *program)
    follow(tmp_path, slots, [2, 4, 3, 1, 4])
    epochs = lines(tmp_path / "commits")[-1]["epoch"] + 15
    finish_at(tmp_path, process, epochs)
    check(tmp_path, epochs)
    steps = [len(ends) for ends in ends_of_steps(tmp_path, epochs)]
    # 53 samples in steps of 5 on each rank
    assert {2, 3, 5, 10} <= set(steps) and steps[0] == 5 and steps[-1] == 2


# In `make test`: the examples of `FitPosition`.
@pytest.mark.slow
@deadline(120)
def test_a_step_for_which_the_samples_do_not_suffice_any_more_is_left_out(tmp_path):
    """One rank has used 45 of 53 samples when a second one joins: a step needs 10."""
    hold = tmp_path / "hold-0-2-9-before"
    hold.touch()
    slots = Slots(tmp_path, 1)
    compiled = json.dumps({"per_rank_batch": 5})
    program = ["-m", "helpers.elastic_fit_program", str(tmp_path), "12", compiled]
    process = start(tmp_path, *slots.options(np=1, most=2), sys.executable, *program)
    until((tmp_path / "traced-0").exists, 60.0)
    slots.set(2)
    until(lambda: len(list(tmp_path.glob("traced-*"))) == 2, 60.0)
    time.sleep(1.0)  # until it waits for the other rank
    hold.unlink()
    done = finish(process, 60.0)
    assert done.code == 0, done.stdout + done.stderr
    check(tmp_path, 12)
    ends = ends_of_steps(tmp_path, 12)
    alone, together = list(range(5, 55, 5)), list(range(10, 60, 10))
    assert ends == [alone, alone, alone[:9], *[together] * 9]


# ---- ranks for which the batch has no sample ----

_SMALL_BATCH = """
import json, time
from pathlib import Path
import tensorflow as tf, tfdist
from helpers.elastic_program import stops_after
tfdist.init()
w = tf.Variable(0.0)
state = tfdist.elastic.State(w)
for step in state.steps(100_000):
    rows = tfdist.data.samples_of_step(8, global_batch=2, seed=1, step=step)
    with tfdist.DistributedGradientTape() as tape:
        loss = w * float(len(rows))
    w.assign_sub(tape.gradient(loss, w))
    time.sleep(0.02)
    if state.commit():
        with open("commits", "a") as file:
            print(json.dumps({"step": step, "size": tfdist.size()}), file=file)
        if stops_after(Path(), step + 1):
            break
print("ended with", tfdist.size(), "ranks")
"""


@pytest.mark.slow
@deadline(300)
def test_ranks_without_a_sample_end_with_an_error_and_the_job_goes_on(tmp_path):
    slots = Slots(tmp_path, 1)
    (tmp_path / "small.py").write_text(_SMALL_BATCH)
    options = ("--log-dir", "logs", *slots.options(np=1))
    process = start(tmp_path, *options, sys.executable, "small.py")
    follow(tmp_path, slots, [1])
    slots.set(4)  # newcomers 4, 5 and 6
    for newcomer, size in ((5, 3), (6, 4)):
        log = tmp_path / "logs" / f"newcomer-{newcomer}.log"
        message = f"Expected a global_batch of {size} (the number of ranks)"
        until(lambda log=log, m=message: log.exists() and m in log.read_text(), 60.0)
    until(lambda: latest_size(tmp_path / "commits") == 2, 60.0)
    done = finish_at(tmp_path, process, lines(tmp_path / "commits")[-1]["step"] + 50)
    assert done.stdout.count("ended with 2 ranks") == 2
    assert sum("was lost: exit code 1" in line for line in done.report) == 2


# ---- what the program does after the training ----

_EVALUATES_WITHOUT_TENSORFLOW = """
import time
import numpy as np
from pathlib import Path
from helpers.core_client import allreduce
from helpers.elastic_handover import Loop
from tfdist.core import runtime
Loop(Path(), 3).run()
Path(f"trained-{runtime.rank()}").touch()
while not Path("evaluate").exists():
    time.sleep(0.02)
print("sum", float(allreduce(np.array([2.0]), name="evaluation")[0]))
"""
_EVALUATES = """
import sys, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf, tfdist
tfdist.init()
if sys.argv[1] == "loop":
    state = tfdist.elastic.State(tf.Variable(0.0))
    for step in state.steps(3):
        state.commit()
else:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    x = np.zeros((8, 1), "float32")
    data = tfdist.data.global_batches((x, x), global_batch=4, seed=1)
    model.fit(data, verbose=0, callbacks=[tfdist.callbacks.Elastic()])
Path(f"trained-{tfdist.rank()}").touch()
while not Path("evaluate").exists():
    time.sleep(0.02)
print("sum", float(tfdist.allreduce(tf.constant(2.0), op=tfdist.ReduceOp.SUM)))
"""


@pytest.mark.parametrize(
    ("way", "program"),
    [
        ("without TensorFlow", _EVALUATES_WITHOUT_TENSORFLOW),
        pytest.param("loop", _EVALUATES, marks=pytest.mark.slow),
        pytest.param("fit", _EVALUATES, marks=pytest.mark.slow),
    ],
    ids=["without TensorFlow", "loop", "fit"],
)
@deadline(90)
def test_a_job_that_shrinks_after_the_training_lets_its_ranks_finish(
    tmp_path, way, program
):
    slots = Slots(tmp_path, 2)
    (tmp_path / "evaluates.py").write_text(program)
    process = start(tmp_path, *slots.options(np=2), sys.executable, "evaluates.py", way)
    until(lambda: len(list(tmp_path.glob("trained-*"))) == 2, 60.0)
    slots.set(1)
    time.sleep(2.2)  # the script runs once a second
    (tmp_path / "evaluate").touch()
    done = finish(process, 30.0)
    assert done.code == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 4.0") == 2
    assert "this host has 1 slot now: the job shrinks to 1 rank" in done.report
