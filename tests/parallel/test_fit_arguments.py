"""Arguments of `compile`, `fit` and `evaluate`: two ranks do what one process does."""

import contextlib
import io
import logging

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist

BATCH, ROWS = 8, 64
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype("float32")
CLASSES = RNG.integers(0, 3, ROWS)
TARGETS = RNG.normal(size=(ROWS, 1)).astype("float32")
WEIGHTS = RNG.uniform(0.2, 2, ROWS).astype("float32")


def own(rows):
    """This rank's rows, so that the batches of a step are one of all."""
    return rows[tfdist.rank() :: tfdist.size()]


def classifier(**options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5,)), keras.layers.Dense(3, activation="softmax")]
    model = keras.Sequential(layers)
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))
    options = {"loss": "sparse_categorical_crossentropy", **options}
    model.compile(optimizer, **options)
    return model


def fitted(model, x, y, **options):
    """The weights after `fit`, the history and its epochs."""
    options.setdefault("batch_size", BATCH // tfdist.size())
    callbacks = [
        tfdist.callbacks.BroadcastInitialState(),
        tfdist.callbacks.MetricAverage(),
    ]
    history = model.fit(x, y, callbacks=callbacks, verbose=0, **options)
    return {
        "weights": [w.numpy() for w in model.weights],
        "epochs": history.epoch,
        **{name: np.array(values) for name, values in history.history.items()},
    }


def weighted():
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    return fitted(
        classifier(**metrics, jit_compile="auto"),
        own(X),
        own(CLASSES),
        sample_weight=own(WEIGHTS),
        shuffle=False,
    )


def class_weighted():
    """And a part of the epochs, each with a part of the steps, and of validation."""
    return fitted(
        classifier(metrics=["accuracy"], run_eagerly=True),
        own(X),
        own(CLASSES),
        class_weight={0: 1.0, 1: 3.0, 2: 0.5},
        shuffle=False,
        initial_epoch=1,
        epochs=5,
        steps_per_epoch=3,
        validation_data=(own(X), own(CLASSES)),
        validation_batch_size=4 // tfdist.size(),
        validation_steps=3,
        validation_freq=2,
    )


def two_losses():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    outputs = {
        "classes": keras.layers.Dense(3, activation="softmax", name="classes")(inputs),
        "values": keras.layers.Dense(1, name="values")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        {"classes": "sparse_categorical_crossentropy", "values": "mse"},
        loss_weights={"classes": 0.3, "values": 2.0},
        steps_per_execution=3,
        jit_compile=False,
    )
    return fitted(
        model,
        own(X),
        {"classes": own(CLASSES), "values": own(TARGETS)},
        validation_split=0.25,
        epochs=2,
        shuffle=False,
    )


def batches_have_their_size():
    """Keras takes no notice of the batch size of `fit` where the data are a dataset."""
    shard = tfdist.data.shard((X, CLASSES), batch_size=BATCH // tfdist.size())
    return fitted(classifier(), shard, None, batch_size=3)


def evaluated():
    model = classifier(metrics=["accuracy"], weighted_metrics=["accuracy"])
    results = model.evaluate(
        own(X),
        own(CLASSES),
        batch_size=BATCH // tfdist.size(),
        sample_weight=own(WEIGHTS),
        steps=3,
        callbacks=[tfdist.callbacks.MetricAverage()],
        return_dict=True,
        verbose=0,
    )
    return {"weights": [], "epochs": [], **results}


CASES = (weighted, class_weighted, two_losses, batches_have_their_size, evaluated)
ALL = [case.__name__ for case in CASES]
SOME = ["class_weighted", "two_losses", "evaluated"]


def results_of(names):
    return {case.__name__: case() for case in CASES if case.__name__ in names}


def as_arrays(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_two_ranks_end_where_one_process_ends(names):
    [expected] = run_ranks(results_of, 1, names, timeout_s=110)
    first, second = run_ranks(results_of, 2, names, timeout_s=110)
    assert list(expected) == names
    for name, of_case in expected.items():
        assert set(first[name]) == set(second[name]) == set(of_case)
        for key, value in of_case.items():
            ranks = [as_arrays(found[name][key]) for found in (first, second)]
            for one, other, whole in zip(*ranks, as_arrays(value), strict=True):
                np.testing.assert_array_equal(one, other)
                np.testing.assert_allclose(
                    one, whole, rtol=2e-5, atol=1e-6, err_msg=f"{name}, {key}"
                )
    lengths = {key: len(value) for key, value in expected["class_weighted"].items()}
    assert lengths["epochs"] == 4 and lengths["val_loss"] == 2


def shuffled():
    """The rows of all batches, as the model sees them in an epoch."""
    seen = []

    class Watched(keras.Sequential):
        def train_step(self, data):
            seen.extend(data[0].numpy()[:, 0].astype(int).tolist())
            return super().train_step(data)

    model = Watched([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", run_eagerly=True)
    rows = own(np.arange(16.0).reshape(16, 1))
    fitted(model, rows, rows, batch_size=4, shuffle=True)
    return seen


def test_each_rank_shuffles_its_own_rows():
    for rank, seen in enumerate(run_ranks(shuffled, 2)):
        assert seen != sorted(seen) == list(range(rank, 16, 2))


SHORT = ["fit", "Checkpoint", "evaluate", "predict"]
CALLS = [*SHORT, "silent", "warmup", "model.evaluate", "evaluate 2"]


def printed(folder, names):
    """Which of some calls print something on this rank."""
    callbacks = tfdist.callbacks

    def fit(verbose, *callbacks):
        listed = [tfdist.callbacks.BroadcastInitialState(), *callbacks]
        classifier().fit(X, CLASSES, callbacks=listed, verbose=verbose)

    path = f"{folder}/m.keras"
    calls = {
        "fit": lambda: fit(2),
        "silent": lambda: fit(0, callbacks.Checkpoint(path)),
        "Checkpoint": lambda: fit(0, callbacks.Checkpoint(path, verbose=1)),
        "warmup": lambda: fit(0, callbacks.LearningRateWarmup(0.5, verbose=1)),
        "model.evaluate": lambda: classifier().evaluate(X, CLASSES, verbose=2),
        "evaluate": lambda: tfdist.evaluate(classifier(), X, CLASSES),
        "evaluate 2": lambda: tfdist.evaluate(classifier(), X, CLASSES, verbose=2),
        "predict": lambda: tfdist.predict(classifier(), X),
    }
    found = []
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            calls[name]()
        if output.getvalue().strip():
            found.append(name)
    return found


@pytest.mark.parametrize(
    "names", [SHORT, pytest.param(CALLS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_one_rank_prints_unless_told_otherwise(names, tmp_path):
    first, second = run_ranks(printed, 2, str(tmp_path), names)
    on_all = {"fit", "model.evaluate", "evaluate 2"}
    assert set(second) == on_all & {*names}
    assert set(first) == {*names} - {"silent"}


def told_of_losses(reduction, op):
    """The warnings of the first rank."""
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    model = classifier(loss=loss, jit_compile=False)
    if op == "sum":
        optimizer = tfdist.DistributedOptimizer(
            keras.optimizers.SGD(0.001), op=tfdist.ReduceOp.SUM
        )
        model.compile(optimizer, loss, jit_compile=False)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tfdist").addHandler(handler)
    try:
        fitted(model, own(X), own(CLASSES), steps_per_epoch=1)
    finally:
        logging.getLogger("tfdist").removeHandler(handler)
    return [text for text in told if "reduction=" in text]


@pytest.mark.parametrize(
    ("reduction", "op", "words"),
    [
        ("sum", "average", "op=tfdist.ReduceOp.SUM"),
        ("sum", "sum", None),
        pytest.param(
            *("mean_with_sample_weight", "average", "class_weight"),
            marks=pytest.mark.slow,
        ),
        pytest.param("sum_over_batch_size", "average", None, marks=pytest.mark.slow),
    ],
)
def test_losses_that_an_average_does_not_fit_are_told_of(reduction, op, words):
    first, second = run_ranks(told_of_losses, 2, reduction, op)
    assert second == []
    if words is None:
        assert first == []
    else:
        [text] = first
        assert words in text
