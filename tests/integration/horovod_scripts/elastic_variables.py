"""Variables without a model in an elastic job: the state's attributes, reset callbacks.

The gradients of all ranks are added, so that the weights do not depend on the number of
ranks.
"""

import argparse

import elastic_report
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=200)
parser.add_argument("--batches-per-commit", type=int, default=10)
parser.add_argument("--second-function-from", type=int, default=40)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()
report = elastic_report.Report()

BASE_RATE = 2.0**-17
rows = tf.constant(np.random.default_rng(1).integers(-8, 8, (32, 4)), tf.float32)
targets = tf.linalg.matvec(rows, tf.constant([1.0, 2.0, 3.0, 4.0]))
weights = tf.Variable(tf.fill([4], float(hvd.rank())), name="weights")
rate = tf.Variable(BASE_RATE * hvd.size(), trainable=False, name="rate")


def make_training_step():
    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ]
    )
    def training_step(data, target):
        report.traced()
        with tf.GradientTape() as tape:
            errors = tf.linalg.matvec(data, weights) - target
            loss = tf.reduce_sum(errors**2)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradient = tape.gradient(loss, weights)
        # The rate grows with the number of ranks, and the sum does not.
        weights.assign_sub(rate / tf.cast(hvd.size_op(), tf.float32) * gradient)
        return loss

    return training_step


training_steps = [make_training_step(), make_training_step()]


@hvd.elastic.run
def train(state, batches):
    while state.batch < batches:
        first = (state.batch % 4) * 8
        own = slice(first + hvd.rank(), first + 8, hvd.size())
        step = training_steps[state.batch >= args.second_function_from]
        step(rows[own], targets[own])
        state.batch += 1
        report.batch(hvd, state.batch)
        if state.batch % args.batches_per_commit == 0:
            state.history = [*state.history, state.batch]
            # Horovod: commit the state; newcomers join here.
            state.commit()
    return weights.numpy().tolist()


def on_state_reset():
    # Horovod: adjust the learning rate to the new number of ranks.
    rate.assign(BASE_RATE * hvd.size())
    report.reset(hvd)


state = hvd.elastic.TensorFlowState([weights, rate], batch=0, history=[])
state.register_reset_callbacks([on_state_reset])
try:
    found = train(state, args.batches)
finally:
    report.write(
        hvd,
        [weights.numpy()],
        found=weights.numpy().tolist(),
        rate=float(rate.numpy()),
        batch=state.batch,
        history=state.history,
    )
