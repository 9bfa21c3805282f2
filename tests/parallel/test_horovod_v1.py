"""A script of TensorFlow 1 with Horovod: no eager mode, reference variables."""

import json
import sys

import pytest
from helpers import launcher

SCRIPT = """
import json
import numpy as np
import tensorflow.compat.v1 as tf
import tfdist.horovod.tensorflow as hvd

tf.disable_v2_behavior()
hvd.init()
rank = hvd.rank()
x = tf.placeholder(tf.float32, [None, 2])
w = tf.get_variable("w", [2, 1], initializer=tf.ones_initializer())
b = tf.Variable(float(rank), name="b")
table = tf.get_variable("table", [4, 1], initializer=tf.zeros_initializer())
used = tf.nn.embedding_lookup(table, [rank, 2])
loss = tf.reduce_mean(tf.matmul(x, w) + b) + tf.reduce_sum(used)
sgd = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.5))
step = tf.train.get_or_create_global_step()
train = sgd.minimize(loss, global_step=step)
several = hvd.DistributedOptimizer(
    tf.train.GradientDescentOptimizer(0.5), backward_passes_per_step=2
)
twice = several.minimize(loss, global_step=step, var_list=[w, b])
start = hvd.broadcast_global_variables(1)
mean = hvd.allreduce(loss)
seen = hvd.allgather_object({"rank": rank})
data = np.full([3, 2], rank + 1.0)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(tf.local_variables_initializer())
    session.run(start)
    session.run(train, {x: data})
    for _ in range(2):
        session.run(twice, {x: data})
    ends = session.run([w, b, table, step, mean], {x: data})
print(json.dumps([seen, [np.asarray(end).tolist() for end in ends]]))
"""


@pytest.mark.slow
def test_a_script_without_eager_mode(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    program = [sys.executable, "script.py"]
    done = launcher.run(tmp_path, "-np", "2", *program, timeout_s=120)
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "[[{" in line]
    results = [json.loads(line[line.index("[[{") :]) for line in lines]
    assert len(results) == 2
    # One step of 0.5 times 1.5, then one of twice that; b begins with that of rank 1.
    w, b, table = [[-1.25]] * 2, -0.5, [[-0.25], [-0.25], [-0.5], [0.0]]
    loss = [sum((-1.25 * 2 * (r + 1), b, table[r][0], table[2][0])) for r in (0, 1)]
    mean = sum(loss) / 2
    for seen, ends in results:
        assert seen == [{"rank": 0}, {"rank": 1}]
        assert ends == [w, b, table, 3, mean]
