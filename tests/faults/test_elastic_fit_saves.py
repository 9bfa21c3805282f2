"""A rank of an elastic job is lost while rank 0 saves, or before it saves."""

import re

import pytest
from helpers.deadline import deadline
from helpers.launcher import python, run

from tfdist import newest_checkpoint

pytestmark = pytest.mark.faults
OPTIONS = ("-np", "2", "--min-np", "1", "--max-restarts", "0")

# Rank 0 kills member 1 after step 2, and waits until it has noticed the loss: before it
# saves, or when it has already written a part of the file.
FIT = """
import os, signal, time
import keras, numpy as np, tfdist
from tfdist.core import native

tfdist.init()
pids = [int(one) for one in tfdist.allgather([os.getpid()])]
steps = []

def lose(place):
    if place == {place!r} and len(steps) == 3 and tfdist.rank() == 0 and len(pids) == 2:
        os.kill(pids.pop(), signal.SIGKILL)
        while native.failure() is None:
            time.sleep(0.01)

class Lose(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        steps.append(batch)
        lose("before")

class Dense(keras.layers.Dense):
    def save_own_variables(self, store):
        lose("during")
        super().save_own_variables(store)

x = np.ones((60, 1), "float32")
train = tfdist.data.global_batches((x, x), global_batch=6)
model = keras.Sequential([keras.Input((1,)), Dense(1)])
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
if {saves_with_keras}:
    saves = tfdist.callbacks.RankZeroOnly(
        keras.callbacks.ModelCheckpoint("{{batch}}.keras", save_freq=1)
    )
else:
    saves = tfdist.callbacks.Checkpoint("{{batch}}.keras", save_freq=1)
model.fit(train, verbose=0, callbacks=[tfdist.callbacks.Elastic(), Lose(), saves])
print("ENDED with", tfdist.size())
"""


@pytest.mark.slow
@deadline(90)
@pytest.mark.parametrize("saves_with_keras", [False, True])
@pytest.mark.parametrize("place", ["before", "during"])
def test_a_fit_goes_on_if_a_rank_is_lost_at_a_save(tmp_path, place, saves_with_keras):
    program = FIT.format(place=place, saves_with_keras=saves_with_keras)
    done = run(tmp_path, *OPTIONS, *python(program), timeout_s=80.0)
    assert done.code == 0, done.stdout + done.stderr
    assert "ENDED with 1" in done.stdout
    saved = {file.name for file in tmp_path.glob("[0-9]*.keras")}
    assert saved == {f"{batch}.keras" for batch in range(1, 11)}


LOOP = """
import os, signal, time
import keras, numpy as np, tfdist
from tfdist.core import native

tfdist.init()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
model.optimizer.build(model.trainable_variables)
state = tfdist.elastic.State(model)
x = np.ones((6, 1), "float32")
for step in state.steps(6):
    model.train_on_batch(x, x)
    if state.commit() and step == 2 and tfdist.size() == 2:
        if tfdist.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while native.failure() is None:
            time.sleep(0.01)
        model.save("saved.keras")
print("ENDED with", tfdist.size())
"""


@pytest.mark.slow
@deadline(90)
def test_a_loop_may_save_after_a_commit_if_a_rank_is_lost_meanwhile(tmp_path):
    done = run(tmp_path, *OPTIONS, *python(LOOP), timeout_s=80.0)
    assert done.code == 0, done.stdout + done.stderr
    assert "ENDED with 1" in done.stdout
    assert (tmp_path / "saved.keras").exists()


# Rank 0 is lost, or leaves, before its thread has written the model of epoch 2, which
# is the best.
BEST = """
import os, signal, time
import keras, numpy as np, tfdist
from tfdist.callbacks import _atomic_file

tfdist.init()
member = int(os.environ["TFDIST_MEMBER"])

class Score(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = [3.0, 1.0, 2.0, 2.0][epoch]
        if member == 0 and epoch == 1:
            _atomic_file._sync = lambda path: time.sleep({sync_s})
        elif member == 0 and epoch == 2:
            os.kill(os.getpid(), signal.{sent})

x = np.ones((6, 1), "float32")
train = tfdist.data.global_batches((x, x), global_batch=6)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
best = tfdist.callbacks.Checkpoint(
    "best.keras", monitor="score", mode="min", save_best_only=True, background=True,
    verbose=1,
)
model.fit(
    train, epochs=4, verbose=0, callbacks=[tfdist.callbacks.Elastic(), Score(), best]
)
"""


@pytest.mark.slow
@deadline(90)
def test_a_model_that_a_lost_rank_has_not_written_is_not_the_best(tmp_path):
    program = BEST.format(sync_s=3600, sent="SIGKILL")
    done = run(tmp_path, *OPTIONS, *python(program), timeout_s=80.0)
    assert done.code == 0, done.stdout + done.stderr
    assert "best.keras was not saved, because rank 0 was lost" in done.stderr
    assert re.findall(r"Epoch (\d): saved best.keras", done.stdout) == ["1", "3"]


@pytest.mark.slow
@deadline(90)
def test_a_rank_0_that_leaves_completes_its_file(tmp_path):
    program = BEST.format(sync_s=1, sent="SIGTERM")
    done = run(tmp_path, *OPTIONS, *python(program), timeout_s=80.0)
    assert done.code == 0, done.stdout + done.stderr
    assert "was not saved" not in done.stderr
    assert re.findall(r"Epoch (\d): saved best.keras", done.stdout) == ["1", "2"]
    assert newest_checkpoint(tmp_path / "best.keras") == tmp_path / "best.keras"
