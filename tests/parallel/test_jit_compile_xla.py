"""`jit_compile=True` with `libtfdist_xla.so` (`make xla`): XLA compiles whole training
steps, the reduction of the gradients and the update among them. `fit` on two ranks
equals `jit_compile=False`; each group of gradients is one custom call; what goes wrong
is the same error as elsewhere.
"""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks
from helpers.xla_library import needs_xla_library

import tfdist
from tfdist.core import native
from tfdist.gradients import xla

pytestmark = needs_xla_library

STEPS, BATCH, EPOCHS = 5, 6, 2
TOLERANCE = 1e-5
# Three buckets in a group: the first closes with the last layer.
BUCKETS = {
    "TFDIST_FIRST_BUCKET_BYTES": "8",
    "TFDIST_BUCKET_BYTES": "128",
    "TFDIST_FUSION_BYTES": "128",
}


def samples(count=STEPS * BATCH):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, (np.sin(x).sum(axis=1, keepdims=True) + x[:, :1] * x[:, 1:2])


def small_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dense(7, activation="softplus"),
            keras.layers.Dense(1),
        ]
    )


class TwoOptimizers(keras.Model):
    """Two groups in one step; looks at the weights after the update, too."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(5, activation="tanh")
        self.second = keras.layers.Dense(1)
        self.of_first = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05))

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        for optimizer, layer in (
            (self.of_first, self.first),
            (self.optimizer, self.second),
        ):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "norm": tf.norm(self.second.kernel)}


MODELS = {"functional": small_model, "two optimizers": TwoOptimizers}


def records():
    rows = native.take_records()
    return [r for r in rows if r["name"].startswith("gradients.")]


def trained(kind, jit_compile):
    """Weights and slots, losses, names and bytes of the reductions."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = MODELS[kind]()
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.02))
    several = 3 if kind == "two optimizers" else 1
    model.compile(
        optimizer, "mse", jit_compile=jit_compile, steps_per_execution=several
    )
    data = tfdist.data.shard(samples(), batch_size=BATCH // tfdist.size())
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    records()
    groups, emit = [], xla.emit_group

    def counted(tensors, **options):
        groups.append(len(options["sizes"]))
        return emit(tensors, **options)

    xla.emit_group = counted
    try:
        history = model.fit(data, verbose=0, epochs=EPOCHS, callbacks=callbacks).history
    finally:
        xla.emit_group = emit
    rows = records()
    return {
        "state": [v.numpy() for v in [*model.weights, *optimizer.variables]],
        "losses": history["loss"],
        "names": [r["name"].rpartition(".")[2] for r in rows],
        "bytes": sum(r["bytes"] for r in rows),
        "groups": groups,
    }


def train_both_ways(kind):
    return [trained(kind, jit_compile) for jit_compile in (False, True, True)]


@pytest.mark.parametrize("kind", MODELS)
def test_fit_equals_that_without_xla(kind):
    ranks = run_ranks(train_both_ways, 2, kind, timeout_s=110, env=BUCKETS)
    for plain, whole, again in ranks:
        for a, b in zip(plain["state"], whole["state"], strict=True):
            np.testing.assert_allclose(b, a, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(whole["losses"], plain["losses"], rtol=TOLERANCE)
        assert whole["losses"][-1] < whole["losses"][0]
        # As many reductions, of as many bytes, in the same buckets of a group.
        assert sorted(whole["names"]) == sorted(plain["names"])
        assert whole["bytes"] == plain["bytes"]
        traced = whole["groups"][: 2 if kind == "two optimizers" else 1]
        assert whole["groups"] == traced * (len(whole["groups"]) // len(traced))
        assert max(traced) > 1
        assert len(whole["names"]) == sum(traced) * STEPS * EPOCHS
        assert plain["groups"] == []
        assert whole["losses"] == again["losses"]
        for a, b in zip(whole["state"], again["state"], strict=True):
            assert a.tobytes() == b.tobytes(), "another run, other bits"
    (_, first, _), (_, second, _) = ranks
    for a, b in zip(first["state"], second["state"], strict=True):
        assert a.tobytes() == b.tobytes(), "the ranks differ"


SHAPES = ((3, 5), (), (0, 4), (7,))
CASES = {
    "average": ({}, ("float32", "float64", "float16", "bfloat16")),
    "sum": ({"op": tfdist.ReduceOp.SUM}, ("float64", "float32")),
    "bf16": ({"compression": "bf16"}, ("float32",)),
    "fp16": ({"compression": "fp16"}, ("float32",)),
}


def contributions(rank, dtypes):
    """Small integers: exact in every type."""
    return [
        np.asarray(np.arange(np.prod(shape)).reshape(shape) % 5 + 4 * i + 2 * rank)
        for i, _ in enumerate(dtypes)
        for shape in SHAPES
    ]


def gradients_by_tape():
    """What a tape in a compiled function gives for losses with known gradients."""
    found = {}
    mine = [tfdist.add_process_set([rank]) for rank in range(2)][tfdist.rank()]
    cases = {**CASES, "alone": ({"process_set": mine}, ("float32",))}
    for name, (options, dtypes) in cases.items():
        types = [dtype for dtype in dtypes for _ in SHAPES]
        own = contributions(tfdist.rank(), dtypes)
        constants = [tf.cast(c, t) for c, t in zip(own, types, strict=True)]
        variables = [tf.Variable(tf.zeros_like(c)) for c in constants]
        rank0, nobody = tf.Variable([1.0, 2.0]), tf.Variable(1.0)

        def step(options=options, v=variables, c=constants, x=rank0, y=nobody):
            with tfdist.DistributedGradientTape(**options) as tape:
                terms = [tf.reduce_sum(a * b) for a, b in zip(v, c, strict=True)]
                if tfdist.rank() == 0:  # the other rank has no gradient for it
                    terms.append(tf.reduce_sum(x))
                loss = tf.add_n([tf.cast(term, tf.float64) for term in terms])
            *gradients, of_nobody = tape.gradient(loss, [*v, x, y])
            assert of_nobody is None
            if gradients[-1] is None:  # of rank 1 alone
                gradients[-1] = tf.zeros(2)
            return gradients

        records()
        *reduced, of_rank0 = tf.function(step, jit_compile=True)()
        found[name] = {
            "values": [tf.cast(g, tf.float64).numpy() for g in reduced],
            "of_rank0": of_rank0.numpy(),
            "bytes": sum(r["bytes"] for r in records()),
        }
    return found


def test_a_tape_reduces_every_type_exactly_in_a_compiled_function():
    ranks = run_ranks(gradients_by_tape, 2, timeout_s=60, env=BUCKETS)
    for rank, found in enumerate(ranks):
        for name, (options, dtypes) in CASES.items():
            both = [contributions(r, dtypes) for r in range(2)]
            factor = 1.0 if "op" in options else 0.5
            for value, a, b in zip(found[name]["values"], *both, strict=True):
                np.testing.assert_array_equal(value, (a + b) * factor)
            assert found[name]["of_rank0"].tolist() == [factor, factor]
        own = contributions(rank, ("float32",))
        for value, expected in zip(found["alone"]["values"], own, strict=True):
            np.testing.assert_array_equal(value, expected)
        elements = sum(int(np.prod(shape)) for shape in SHAPES) + 2
        assert found["bf16"]["bytes"] == found["fp16"]["bytes"] == 2 * elements


def overflows_on_one_rank():
    """Scale and first weight after each step; in the third, rank 1 overflows."""
    model = compiled_model(policy="mixed_float16")
    x, y = samples()
    found = []
    for step in range(4):
        bad = step == 2 and tfdist.rank() == 1
        model.train_on_batch(x * (1e5 if bad else 1), y * (1e5 if bad else 1))
        scale = float(model.optimizer.dynamic_scale.numpy())
        found.append([scale, model.layers[0].kernel.numpy()])
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    first, second = run_ranks(overflows_on_one_rank, 2, timeout_s=60)
    for (scale, kernel), (other_scale, other_kernel) in zip(first, second, strict=True):
        assert scale == other_scale
        assert kernel.tobytes() == other_kernel.tobytes()
    scales = [scale for scale, _ in first]
    assert scales[2:] == [scales[1] / 2] * 2
    changed = [
        a.tobytes() != b.tobytes()
        for (_, a), (_, b) in zip(first, first[1:], strict=False)
    ]
    assert changed == [True, False, True]


def compiled_model(layers=1, policy="float32"):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    hidden = [keras.layers.Dense(9, activation="tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.02))
    model.compile(optimizer, "mse", jit_compile=True)
    keras.config.set_dtype_policy("float32")
    return model


def failure_of(step):
    """Class, text and rank of what `step` raises; and the seconds until then."""
    start = time.monotonic()
    try:
        step()
    except tf.errors.OpError as error:
        ours = tfdist.errors.from_tf(error)
        found = [type(ours).__name__, str(ours), ours.record.rank]
        return [*found, time.monotonic() - start]
    return ["none", "", None, time.monotonic() - start]


def one_rank_has_no_library():
    usable = xla.unusable
    if tfdist.rank() == 1:
        xla.unusable = lambda: xla.NOT_BUILT
    model = compiled_model()
    callbacks = [tfdist.callbacks.BroadcastInitialState()]
    try:
        found = failure_of(lambda: model.fit(*samples(), 6, 1, 0, callbacks))
    finally:
        xla.unusable = usable
    return [*found, int(model.optimizer.iterations)]


def another_trace_on_one_rank():
    model = compiled_model(layers=1 + tfdist.rank())
    found = failure_of(lambda: model.train_on_batch(*samples()))
    return [*found, int(model.optimizer.iterations)]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (one_rank_has_no_library, "make xla on all hosts"),
        (another_trace_on_one_rank, "kernel float32"),
    ],
)
def test_ranks_that_differ_are_told_before_the_first_step(program, words):
    for kind, text, _, seconds, steps in run_ranks(program, 2, timeout_s=60):
        assert kind == "MismatchError"
        assert words in text
        assert steps == 0
        assert seconds < 30  # nobody has waited for a deadline


def the_other_rank(how):
    """Rank 1 fails, or does not come, in the third step."""
    model = compiled_model()
    batch = samples()
    for _ in range(2):
        model.train_on_batch(*batch)
    before = [w.numpy() for w in model.weights]
    if tfdist.rank() == 1:
        if how == "fails":
            native.abort("a reason of its own")
        else:
            time.sleep(4.0)  # the other gives up
        return None
    found = failure_of(lambda: model.train_on_batch(*batch))
    same = all(
        np.array_equal(a, b.numpy()) for a, b in zip(before, model.weights, strict=True)
    )
    return [*found, same]


@pytest.mark.parametrize(
    ("how", "expected", "words"),
    [
        ("fails", "RankFailedError", "a reason of its own"),
        ("is late", "TimeoutError", "has waited 2.0 s for rank 1"),
    ],
)
def test_errors_of_the_core_come_out_of_the_compiled_step(how, expected, words):
    env = {"TFDIST_TIMEOUT_S": "2"}
    found, _ = run_ranks(the_other_rank, 2, how, timeout_s=60, env=env)
    kind, text, rank, seconds, same_weights = found
    assert kind == expected
    assert words in text
    assert "tfdist.error" not in text
    assert rank == 1
    assert seconds < 30
    assert same_weights
