"""Word vectors by skip-gram: the gradients of both tables are sparse."""

import argparse

import horovod.tensorflow as hvd
import initial
import numpy as np
import report
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=8.0)
args = parser.parse_args()

hvd.init()
VOCABULARY, SIZE, STEPS, NEGATIVES = 500, 16, 12, 4

# A text of two topics, whose words stand together.
rng = np.random.default_rng(5)
topics = rng.integers(2, size=4000).repeat(2)
# Cut off: the largest numbers of zipf are not the same in all versions of NumPy.
often = np.minimum(rng.zipf(1.5, size=8000), VOCABULARY // 2) - 1
words = often + topics * (VOCABULARY // 2)
pairs = np.stack([words[:-1], words[1:]], axis=1)
negatives = rng.integers(VOCABULARY, size=(len(pairs), NEGATIVES))
pairs, negatives = pairs[hvd.rank() :: hvd.size()], negatives[hvd.rank() :: hvd.size()]

start = initial.kernel(hvd.rank())([VOCABULARY, SIZE])
vectors = tf.Variable(start, name="vectors")
contexts = tf.Variable(tf.zeros([VOCABULARY, SIZE]), name="contexts")
opt = tf.keras.optimizers.SGD(args.lr)


@tf.function
def step(pairs, negatives):
    with tf.GradientTape() as tape:
        center = tf.nn.embedding_lookup(vectors, pairs[:, 0])
        context = tf.nn.embedding_lookup(contexts, pairs[:, 1])
        others = tf.nn.embedding_lookup(contexts, negatives)
        near = tf.reduce_sum(center * context, axis=1)
        far = tf.einsum("bd,bnd->bn", center, others)
        loss = tf.reduce_mean(
            tf.nn.softplus(-near) + tf.reduce_sum(tf.nn.softplus(far), axis=1)
        )
    tape = hvd.DistributedGradientTape(tape, device_sparse="/cpu:0")
    grads = tape.gradient(loss, [vectors, contexts])
    opt.apply_gradients(zip(grads, [vectors, contexts]))
    return loss


# Horovod: broadcast before the first step: nobody has created slots yet.
hvd.broadcast_variables([vectors, contexts], root_rank=0)
losses = []
for number in range(STEPS):
    part = slice(number * args.batch_size, (number + 1) * args.batch_size)
    loss = step(tf.constant(pairs[part]), tf.constant(negatives[part]))
    losses.append(float(hvd.allreduce(loss, name="loss")))
if hvd.rank() == 0:
    print("loss", losses[0], "->", losses[-1])
report.write(hvd, [vectors.numpy(), contexts.numpy()], loss=losses)
