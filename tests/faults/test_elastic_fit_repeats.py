"""Hooks and validations of an elastic `fit` that are repeated after a loss."""

import pytest
from helpers.deadline import deadline
from helpers.launcher import python, run

pytestmark = pytest.mark.faults

BEGIN = """
import os, signal, time
import keras, numpy as np, tfdist
from tfdist.core import native

def die():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)

def fail_after_loss():
    while native.failure() is None:
        time.sleep(0.01)
    record = tfdist.errors.ErrorRecord(kind="rank_failed", rank=0)
    raise tfdist.RankFailedError("a rank was lost", record)

tfdist.init()
member = int(os.environ["TFDIST_MEMBER"])
x = np.ones((12, 1), "float32")
train = tfdist.data.global_batches((x, x), global_batch=6)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
"""


def train(folder, size, program):
    options = ("-np", f"{size}", "--min-np", "1", "--max-restarts", "0")
    done = run(folder, *options, *python(BEGIN + program), timeout_s=80.0)
    assert done.code == 0, done.stdout + done.stderr
    return done.stdout


# The validation begins with averaged weights in the model, whose own weights are 1.
REPEATED_VALIDATION = """
class UsesCollective(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer._model_variables_moving_average[0].assign([[3.0]])

    def on_epoch_end(self, epoch, logs=None):
        print("WEIGHT", float(self.model.layers[0].kernel[0, 0]))

    def on_test_batch_end(self, batch, logs=None):
        if member == 1:
            die()
        tfdist.barrier()

optimizer = keras.optimizers.SGD(0.0, use_ema=True, ema_momentum=0.99)
model.compile(tfdist.DistributedOptimizer(optimizer), "mse")
model.optimizer.build(model.trainable_variables)
model.layers[0].kernel.assign([[1.0]])
called = [
    tfdist.callbacks.Elastic(), UsesCollective(), keras.callbacks.SwapEMAWeights()
]
history = model.fit(
    train, epochs=2, verbose=0, callbacks=called, validation_data=(x, x)
).history
print("VALIDATED", [round(loss) for loss in history["val_loss"]])
"""


@pytest.mark.slow
@deadline(90)
def test_a_repeated_validation_uses_averaged_weights_and_puts_the_others_back(tmp_path):
    printed = train(tmp_path, 2, REPEATED_VALIDATION)
    assert printed.count("WEIGHT 1.0") == 2
    assert "VALIDATED [4, 4]" in printed


# Members 0 and 1 have called a hook when member 2 is lost. Member 0 does not know that
# all ranks have done so.
LOST_AFTER_A_HOOK = """
from tfdist import collectives

called = []

def barrier(*arguments, name=None, **options):
    original(*arguments, name=name, **options)
    if name == "elastic.hook" and called == ["hook"]:
        called.append("barrier")
        if member == 2:
            die()
        elif member == 0:
            fail_after_loss()

class UsesCollective(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        tfdist.allreduce(1.0)
        called.append("hook")

original, collectives.barrier = collectives.barrier, barrier
x = np.arange(12, dtype="float32")[:, np.newaxis]
train = tfdist.data.global_batches((x, 0 * x), global_batch=6, shuffle=False)
optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
model.compile(optimizer, "mse", metrics=["mae"])
model.layers[0].kernel.assign([[1.0]])
callbacks = [
    tfdist.callbacks.Elastic(), UsesCollective(), tfdist.callbacks.MetricAverage()
]
history = model.fit(train, verbose=0, callbacks=callbacks).history
print("ERROR", history["mae"], "of", tfdist.size())
"""


@pytest.mark.slow
@deadline(90)
def test_samples_of_a_rank_lost_after_a_hook_are_counted(tmp_path):
    printed = train(tmp_path, 3, LOST_AFTER_A_HOOK)
    assert printed.count("ERROR [5.5] of 2") == 2


# Member 2 is lost after the last step. Member 1 believes that it has not completed the
# step, and takes it from member 0.
STEP_OF_ANOTHER_RANK = """
from tfdist.callbacks._elastic_fit import ElasticFit

def run_step(fit, place, iterator, tries=[]):
    original(fit, place, iterator)
    if place.step == 1 and not tries:
        tries.append(1)
        if member == 2:
            die()
        elif member == 1:
            fail_after_loss()

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 1))
        self.built = True

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return {**super().train_step(data), "extra": 1.0}

original, ElasticFit._run_step = ElasticFit._run_step, run_step
model = Model()
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
called = [tfdist.callbacks.Elastic(), tfdist.callbacks.MetricAverage()]
history = model.fit(train, verbose=0, callbacks=called).history
print("LOGGED", sorted(history), "of", tfdist.size())
"""


@pytest.mark.slow
@deadline(90)
def test_a_step_of_another_rank_keeps_the_entries_of_a_custom_train_step(tmp_path):
    printed = train(tmp_path, 3, STEP_OF_ANOTHER_RANK)
    assert printed.count("LOGGED ['extra', 'loss'] of 2") == 2


# Member 2 is lost when all ranks have got the changes of a RankZeroOnly.
REPEATED_RANK_ZERO_ONLY = """
from tfdist import collectives
from tfdist.callbacks import rank_zero_only

shared = []

def share(*arguments):
    original_share(*arguments)
    shared.append("changes")

def barrier(*arguments, name=None, **options):
    if name == "elastic.hook" and shared == ["changes"]:
        shared.append("barrier")
        if member == 2:
            die()
        fail_after_loss()
    original_barrier(*arguments, name=name, **options)

class Counts(keras.callbacks.Callback):
    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        print("EPOCHS", epoch + 1, self.epochs)

original_share, rank_zero_only.share = rank_zero_only.share, share
original_barrier, collectives.barrier = collectives.barrier, barrier
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
called = [tfdist.callbacks.Elastic(), tfdist.callbacks.RankZeroOnly(Counts())]
model.fit(train, epochs=2, verbose=0, callbacks=called)
"""


@pytest.mark.slow
@deadline(90)
def test_rank_0_does_not_call_a_callback_again_if_another_rank_is_lost(tmp_path):
    printed = train(tmp_path, 3, REPEATED_RANK_ZERO_ONLY)
    assert printed.count("EPOCHS 1 1") == printed.count("EPOCHS 2 2") == 1
    assert printed.count("EPOCHS") == 2


# Rank 0 is lost when its changes have reached member 2, which becomes rank 0, but not
# member 1.
STOP_SENT_TO_SOME_RANKS = """
from tfdist.callbacks import rank_zero_only

def run_on_rank(*arguments, tries=[], **options):
    found = original(*arguments, **options)
    if not tries:
        tries.append(1)
        if member == 0:
            die()
        elif member == 1:
            fail_after_loss()
    return found

class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True

original, rank_zero_only.run_on_rank = rank_zero_only.run_on_rank, run_on_rank
model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
called = [tfdist.callbacks.Elastic(), tfdist.callbacks.RankZeroOnly(Stops())]
history = model.fit(train, epochs=3, verbose=0, callbacks=called).history
print("EPOCHS", len(history["loss"]), "of", tfdist.size())
"""


@pytest.mark.slow
@deadline(90)
def test_a_stop_that_has_reached_some_ranks_reaches_all(tmp_path):
    printed = train(tmp_path, 3, STOP_SENT_TO_SOME_RANKS)
    assert printed.count("EPOCHS 1 of 2") == 2


# The callback of rank 0 sets weights at the beginning; rank 0 is lost later.
CALLBACK_MOVED_TO_A_RANK = """
class Pretrained(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.layers[0].kernel.assign([[3.0]])

class Lose(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].kernel.assign([[5.0]])

    def on_train_batch_end(self, batch, logs=None):
        if member == 0:
            die()

model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
callbacks = [
    tfdist.callbacks.Elastic(), tfdist.callbacks.RankZeroOnly(Pretrained()), Lose()
]
model.fit(train, verbose=0, callbacks=callbacks)
print("WEIGHT", float(model.layers[0].kernel[0, 0]), "of", tfdist.size())
"""


@pytest.mark.slow
@deadline(90)
def test_a_callback_that_moves_to_another_rank_does_not_change_its_weights(tmp_path):
    printed = train(tmp_path, 3, CALLBACK_MOVED_TO_A_RANK)
    assert printed.count("WEIGHT 5.0 of 2") == 2
