"""`Elastic` in a job that is not elastic: `fit` runs as one process would."""

from os.path import exists

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.ranks import run_ranks

import tfdist
from tfdist.core.rendezvous import renewal

ROWS, GLOBAL_BATCH = 22, 5


def _fit(
    *,
    global_batch=GLOBAL_BATCH,
    epochs=3,
    start=0,
    restored=None,
    callbacks=(),
    compiled=None,
    **options,
):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    y = x.sum(1, keepdims=True)
    train = tfdist.data.global_batches((x, y), global_batch=global_batch, seed=2)
    valid = tfdist.data.global_batches(
        (x, y), global_batch=5, shuffle=False, drop_remainder=False
    )
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, dtype="float64")]
    )
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, "mse", **(compiled or {}))
    if restored is not None:
        assert tfdist.restore(model, restored) == start
    history = model.fit(
        train,
        epochs=epochs,
        verbose=0,
        validation_data=valid,
        callbacks=[
            tfdist.callbacks.Elastic(start=start),
            tfdist.callbacks.MetricAverage(),
            *callbacks,
        ],
        **options,
    )
    return [w.tolist() for w in model.get_weights()], history.history


def _fit_default():
    return _fit()


def _replaced_by_elastic():
    """Whether a fit in a job that is not elastic replaces methods of the optimizer."""
    kept = []

    class Keeps(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            kept.append("assign_add" in vars(self.model.optimizer))

    _fit(epochs=1, callbacks=[Keeps()])
    return kept


def _by_hand(global_batch=GLOBAL_BATCH, steps=3 * (ROWS // GLOBAL_BATCH)):
    """One process, with the batches of `samples_of_step`."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, dtype="float64")]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    for step in range(steps):
        rows = tfdist.data.samples_of_step(
            ROWS, global_batch=global_batch, seed=2, step=step, rank=0, size=1
        )
        model.train_on_batch(x[rows], y[rows])
    loss = model.evaluate(x, y, verbose=0)
    return [w.tolist() for w in model.get_weights()], loss


def test_the_optimizer_stays_as_it_is_where_no_rank_is_replaced():
    assert run_ranks(_replaced_by_elastic, 1) == [[False]]


def test_unequal_parts_of_a_batch_count_by_their_samples():
    first, second = run_ranks(_fit_default, 2)
    assert first == second
    weights, history = first
    [[expected, loss]] = run_ranks(_by_hand, 1)
    for own, other in zip(weights, expected, strict=True):
        assert np.allclose(own, other, rtol=1e-12, atol=1e-14)
    assert np.isclose(history["val_loss"][-1], loss, rtol=1e-6)


class _Records(keras.callbacks.Callback):
    """Records the hooks of steps and epochs."""

    def __init__(self):
        super().__init__()
        self.hooks = []

    def on_epoch_begin(self, epoch, logs=None):
        self.hooks.append(["epoch", epoch])

    def on_train_batch_begin(self, batch, logs=None):
        self.hooks.append(["step", batch])


def _continued(folder, start):
    """Trains 3 epochs of 4 steps, and again from a checkpoint of step `start`."""
    path = f"{folder}/{{step}}.keras"
    checkpoint = tfdist.callbacks.Checkpoint(path, save_freq=start)
    whole, _ = _fit(callbacks=[checkpoint])
    records = _Records()
    later = tfdist.callbacks.Checkpoint(f"{folder}/later-{{step}}.keras", save_freq=3)
    part, history = _fit(
        callbacks=[records, later], restored=f"{folder}/{start}.keras", start=start
    )
    saved = [step for step in range(13) if exists(f"{folder}/later-{step}.keras")]
    return whole, part, records.hooks, len(history["loss"]), saved


@pytest.mark.parametrize("start", [6, pytest.param(8, marks=pytest.mark.slow)])
def test_a_later_job_continues_after_the_same_step(tmp_path, start):
    for whole, part, hooks, epochs, saved in run_ranks(
        _continued, 2, str(tmp_path), start
    ):
        assert part == whole
        assert saved == list(range(start + 3, 13, 3))
        places = [
            place
            for epoch in range(3)
            for place in [["epoch", epoch], *(["step", step] for step in range(4))]
        ]
        epoch, step = divmod(start, 4)
        begin = places.index(["epoch", epoch])
        assert hooks == places[begin : begin + 1] + places[begin + 1 + step :]
        assert epochs == 3 - epoch


GROWING = {0: 5, 1: 8, 3: 11}


def _grown(*, epochs=4, **options):
    """Trains with a batch that grows; returns also the steps that callbacks saw."""
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen[-1].append(batch)
    )
    watch.on_epoch_begin = lambda epoch, logs=None: seen.append([watch.params["steps"]])
    schedule = tfdist.data.BatchSchedule(GROWING)
    result = _fit(global_batch=schedule, epochs=epochs, callbacks=[watch], **options)
    return *result, seen


def _grown_by_hand():
    """One process, with the samples of `samples_of_step`."""
    schedule = tfdist.data.BatchSchedule(GROWING)
    steps = schedule.steps_before(4, total=ROWS)
    return _by_hand(schedule, steps)


def test_a_batch_that_grows_trains_as_one_process_does():
    [[expected, _]] = run_ranks(_grown_by_hand, 1)
    for size in (1, 2):
        for weights, history, seen in run_ranks(_grown, size):
            # Each epoch has its own number of steps, which the callbacks know.
            assert seen == [[4, 0, 1, 2, 3], *[[2, 0, 1]] * 3]
            assert len(history["loss"]) == 4
            for a, b in zip(weights, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def _grown_and_continued(folder):
    whole = _grown()
    path = f"{folder}/step-{{step:03d}}.keras"
    saves = tfdist.callbacks.Checkpoint(path, save_freq=7)
    _fit(global_batch=tfdist.data.BatchSchedule(GROWING), epochs=4, callbacks=[saves])
    weights, history, seen = _grown(start=7, restored=path.format(step=7))
    return whole, weights, history, seen


def test_a_batch_that_grows_is_continued_at_the_exact_step(tmp_path):
    """Step 7 is the second of epoch 2: epochs have 4, 2, 2 and 2 steps."""
    for whole, weights, history, seen in run_ranks(
        _grown_and_continued, 2, str(tmp_path)
    ):
        assert weights == whole[0]
        assert seen == [[2, 1], [2, 0, 1]]
        assert history["loss"][-1] == whole[1]["loss"][-1]


def _warmed_and_continued(folder):
    """The rates of 6 steps, and those after steps 2 and 4, from checkpoints."""
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates[-1].append(
            float(watch.model.optimizer.learning_rate)
        )
    )
    path = f"{folder}/step-{{step}}.keras"
    for start in (0, 2, 4):
        rates.append([])
        saves = tfdist.callbacks.Checkpoint(path, save_freq=2)
        _fit(
            global_batch=tfdist.data.BatchSchedule(GROWING),
            epochs=2,
            callbacks=[tfdist.callbacks.LearningRateWarmup(1), watch, saves],
            start=start,
            restored=path.format(step=start) if start else None,
        )
    return rates


def test_a_warm_up_that_ends_where_the_batch_grows_is_continued(tmp_path):
    for whole, within, after in run_ranks(_warmed_and_continued, 2, str(tmp_path)):
        assert len(whole) == 6 and len(set(whole)) == 5
        assert within == whole[2:] and after == whole[4:]


def _grown_in_parts():
    """Several steps in an execution; and epochs 2 and 3 alone."""
    whole, _, seen = _grown(compiled={"steps_per_execution": 3})
    _, history, late = _grown(initial_epoch=2)
    return whole, seen, late, len(history["loss"])


@pytest.mark.slow
def test_executions_and_first_epochs_fit_a_batch_that_grows():
    [[expected, _]] = run_ranks(_grown_by_hand, 1)
    for weights, seen, late, epochs in run_ranks(_grown_in_parts, 2):
        # Keras counts the last execution of an epoch as a whole one.
        assert seen == [[4, 2, 5], *[[2, 2]] * 3]
        assert late == [[2, 0, 1]] * 2 and epochs == 2
        for a, b in zip(weights, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


class _InterruptedError(Exception):
    pass


def _interrupted():
    """A `fit` ends in its second epoch; two others follow, with the same model."""
    x = np.arange(24.0).reshape(-1, 1)
    growing = tfdist.data.BatchSchedule({0: 4, 1: 8})
    train = tfdist.data.global_batches((x, x), global_batch=growing, seed=1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")

    def stop(batch, logs):
        if steps[-1][0] == 1 and batch == 1:
            raise _InterruptedError

    def fit(*callbacks):
        steps.clear()
        watch = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: steps.append([epoch]),
            on_train_batch_begin=lambda batch, logs: steps[-1].append(batch),
        )
        history = model.fit(train, epochs=2, verbose=0, callbacks=[watch, *callbacks])
        return steps, history.history["loss"]

    steps = []
    _, losses = fit(tfdist.callbacks.Elastic())
    stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    with pytest.raises(_InterruptedError):
        fit(tfdist.callbacks.Elastic(), stops)
    again, same = fit(tfdist.callbacks.Elastic())
    assert again == [[0, *range(6)], [1, *range(3)]] and same == losses
    with pytest.raises(_InterruptedError):
        fit(tfdist.callbacks.Elastic(), stops)
    plain = model.fit(x, x, epochs=1, batch_size=8, verbose=0)
    assert len(plain.history["loss"]) == 1 and model.evaluate(x, x, verbose=0) > 0
    with pytest.raises(Exception, match="BatchSchedule need"):
        next(iter(train))  # the position is forgotten
    return True


def test_after_an_error_the_next_fit_is_right():
    assert run_ranks(_interrupted, 2) == [True, True]


def _interrupted_with_equal_steps():
    """A `fit` without any special steps ends in its second epoch."""
    x = np.arange(1.0, 13.0).reshape(-1, 1)
    train = tfdist.data.global_batches((x, x), global_batch=5, seed=1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    own_function = model.evaluate

    def stop(epoch, logs):
        if epoch == 1:
            raise _InterruptedError

    for hook in ("on_epoch_begin", "on_epoch_end"):
        stops = keras.callbacks.LambdaCallback(**{hook: stop})
        with pytest.raises(_InterruptedError):
            model.fit(
                train,
                epochs=3,
                verbose=0,
                callbacks=[tfdist.callbacks.Elastic(), stops],
            )
        assert model.evaluate == own_function and "compute_loss" not in vars(model)
        passes = [[y.numpy().ravel().tolist() for _, y in train] for _ in range(2)]
        for epoch, batches in enumerate(passes):
            order = tfdist.data.epoch_order(12, seed=1, epoch=epoch)
            steps = x[order[:10], 0].reshape(2, 5)
            own = [np.array_split(one, 2)[tfdist.rank()].tolist() for one in steps]
            assert batches == own
    return True


def test_after_an_error_each_pass_is_the_next_epoch():
    assert run_ranks(_interrupted_with_equal_steps, 2) == [True, True]


def _validated():
    """The ranks have read different numbers of passes of the validation data."""
    x = np.zeros((22, 1))
    y = np.arange(22.0).reshape(-1, 1)
    train = tfdist.data.global_batches((x, y), global_batch=4)
    whole = {"drop_remainder": False}
    losses = []
    for options in (whole, {}):
        valid = tfdist.data.global_batches((x, y), global_batch=4, **options)
        for _ in range(tfdist.rank()):
            list(valid)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
        called = [tfdist.callbacks.Elastic(), tfdist.callbacks.MetricAverage()]
        history = model.fit(
            train, epochs=3, verbose=0, validation_data=valid, callbacks=called
        )
        losses.append(history.history["val_loss"])
        order = tfdist.data.epoch_order(22, seed=0, epoch=0)
        rows = y[order[: 22 if options else 20]]
        np.testing.assert_allclose(losses[-1], [np.mean(rows**2)] * 3, rtol=1e-6)
        first = np.array_split(order[:4], 2)[tfdist.rank()]  # of the next pass
        assert next(iter(valid))[1].numpy().tolist() == y[first].tolist()
    return losses


def test_each_shuffled_sample_is_validated_once_after_any_number_of_passes():
    first, second = run_ranks(_validated, 2)
    assert first == second


def _validated_in_small_batches():
    x = np.ones((12, 1))
    train, valid = (
        tfdist.data.global_batches((x, x), global_batch=size) for size in (4, 1)
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    called = [tfdist.callbacks.Elastic()]
    with pytest.raises(ValueError, match="a global_batch of at least 2, the number"):
        model.fit(train, verbose=0, validation_data=valid, callbacks=called)
    return int(model.optimizer.iterations)


def test_validation_batches_that_are_too_small_are_refused_at_the_start():
    assert run_ranks(_validated_in_small_batches, 2) == [0, 0]


def _of_some_ranks():
    keras.utils.clear_session()
    some = tfdist.add_process_set([0])
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(tfdist.DistributedOptimizer(optimizer, process_set=some), "mse")
    x = np.ones((12, 1))
    train = tfdist.data.global_batches((x, x), global_batch=4)
    if tfdist.rank() == 0:
        with pytest.raises(NotImplementedError, match="process_set"):
            model.fit(train, verbose=0, callbacks=[tfdist.callbacks.Elastic()])
    return True


def test_a_process_set_of_some_ranks_is_refused():
    assert run_ranks(_of_some_ranks, 2) == [True, True]


def _state_of_each_rank():
    """Fits twice; returns the local weights, the slots and the accumulators of both."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    own = keras.layers.Dense(2)
    layers = [keras.Input((4,)), own, keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    inner = keras.optimizers.SGD(0.125, momentum=0.5, gradient_accumulation_steps=2)
    model.compile(
        tfdist.DistributedOptimizer(inner, local_variables=[own.kernel]), "mse"
    )
    train = tfdist.data.global_batches((x, x[:, :1]), global_batch=4)
    states = []
    for epochs in (1, 0):
        model.fit(
            train, epochs=epochs, verbose=0, callbacks=[tfdist.callbacks.Elastic()]
        )
        variables = [own.kernel, *model.optimizer.variables]
        states.append([v.numpy().tolist() for v in variables])
    return states


def test_what_differs_between_ranks_is_kept_in_the_next_fit():
    first, second = run_ranks(_state_of_each_rank, 2)
    for before, after in (first, second):
        assert before == after
    assert first[0][0] != second[0][0]


def _with_equal_seeds(seed_generators):
    keras.utils.clear_session()
    dropout = keras.layers.Dropout(0.5, seed=3 + tfdist.rank())
    model = keras.Sequential([keras.Input((4,)), dropout, keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((8, 4))
    train = tfdist.data.global_batches((x, x[:, :1]), global_batch=4)
    start = tfdist.callbacks.BroadcastInitialState(seed_generators=seed_generators)
    model.fit(train, verbose=0, callbacks=[start, tfdist.callbacks.Elastic()])
    return dropout.seed_generator.state.numpy().tolist()


def test_seed_generators_stay_equal_on_request():
    first, second = run_ranks(_with_equal_seeds, 2, "equal")
    assert first == second and first[0] == 3
    first, second = run_ranks(_with_equal_seeds, 2, "distinct")
    assert first != second


def _with_a_tape(calls_compute_loss, loss="mse"):
    """Trains with a tape, which reduces; the model has no wrapped optimizer."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tfdist.DistributedGradientTape() as tape:
                predicted = self(x)
                if calls_compute_loss:
                    loss = self.compute_loss(x, y, predicted)
                else:
                    loss = tf.reduce_mean((y - predicted) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
            self.own.apply(grads, self.trainable_variables)
            return {"loss": loss}

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    y = x.sum(1, keepdims=True)
    model = Model([keras.Input((4,)), keras.layers.Dense(1, dtype="float64")])
    model.compile(None, loss)
    model.own = keras.optimizers.SGD(0.05, momentum=0.9)
    model.own.build(model.trainable_variables)
    train = tfdist.data.global_batches((x, y), global_batch=GLOBAL_BATCH, seed=2)
    try:
        model.fit(train, epochs=3, verbose=0, callbacks=[tfdist.callbacks.Elastic()])
    except RuntimeError as error:
        return str(error)
    return [w.tolist() for w in model.get_weights()]


def test_unequal_parts_are_weighted_with_a_tape_too():
    [[expected, _]] = run_ranks(_by_hand, 1)
    for weights in run_ranks(_with_a_tape, 2, True):
        for own, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-14)


def test_a_step_with_a_tape_that_cannot_be_weighted_is_refused():
    for message in run_ranks(_with_a_tape, 2, False):
        assert "does not call. Call self.compute_loss" in message


def _other_data():
    with pytest.raises(tfdist.MismatchError, match="Elastic"):
        _fit(global_batch=5 + tfdist.rank())
    return True


def test_sizes_that_differ_between_the_ranks_are_refused():
    assert run_ranks(_other_data, 2) == [True, True]


def _wrong_starts():
    with pytest.raises(ValueError, match=r"multiple of steps_per_execution=2.*got 5"):
        _fit(start=5, compiled={"steps_per_execution": 2})
    with pytest.raises(ValueError, match="without initial_epoch"):
        _fit(start=4, initial_epoch=1)
    with pytest.raises(ValueError, match="start"):
        tfdist.callbacks.Elastic(start=-1)


def test_a_start_that_cannot_be_continued_is_refused():
    run_ranks(_wrong_starts, 2)


def _refusals():
    for options, text in (
        ({"steps_per_epoch": 2}, "An epoch is one pass"),
        ({"class_weight": {0: 1.0}}, "third component"),
    ):
        with pytest.raises(ValueError, match=text):
            _fit(**options)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.zeros((8, 4))
    uneven = tfdist.data.global_batches(
        (x, x[:, :1]), global_batch=4, drop_remainder=False
    )
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    good = tfdist.data.global_batches((x, x[:, :1]), global_batch=4)
    for own, data, text in (
        (model, tfdist.data.shard((x, x[:, :1]), batch_size=2), "global_batches"),
        (model, uneven, "drop_remainder=False"),
        (unbuilt, good, "built before fit"),
        (model, x, "from tfdist.data.global_batches. Pass"),
    ):
        with pytest.raises(ValueError, match=text):
            own.fit(data, verbose=0, callbacks=[tfdist.callbacks.Elastic()])
    fixed = tfdist.data.global_batches((x, x[:, :1]), per_rank_batch=2)
    with pytest.raises(ValueError, match="validation data with a global_batch"):
        model.fit(
            good,
            validation_data=fixed,
            verbose=0,
            callbacks=[tfdist.callbacks.Elastic()],
        )
    odd = tfdist.data.global_batches((x, x[:, :1]), global_batch=3)
    both = [tfdist.callbacks.UnevenData(), tfdist.callbacks.Elastic()]
    with pytest.raises(NotImplementedError, match="remove UnevenData"):
        model.fit(odd, verbose=0, callbacks=both)
    model.compile(
        tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        keras.losses.MeanSquaredError(reduction="sum"),
    )
    with pytest.raises(ValueError, match="reduction='sum'"):
        model.fit(odd, verbose=0, callbacks=[tfdist.callbacks.Elastic()])


def test_what_would_depend_on_the_number_of_ranks_is_refused():
    run_ranks(_refusals, 2)


def _batches(total, global_batch, **options):
    data = tfdist.data.global_batches(
        np.arange(total), global_batch=global_batch, seed=2, **options
    )
    return [b.tolist() for b in data.as_numpy_iterator()]


def test_the_parts_of_all_ranks_are_the_samples_of_each_step():
    parts = run_ranks(_batches, 3, 11, 4)
    for step in range(2):
        own = [part[step] for part in parts]
        assert sorted(map(len, own)) == [1, 1, 2]
        rows = tfdist.data.samples_of_step(
            11, global_batch=4, seed=2, step=step, rank=0, size=1
        )
        assert [row for part in own for row in part] == rows.tolist()


def _all_batches():
    kept = _batches(11, 4, shuffle=False, drop_remainder=False)
    mapped = _batches(5, 2, shuffle=False, map_fn=lambda row: row * 10)
    return kept, mapped


def test_remaining_samples_are_kept_on_request_and_samples_are_mapped():
    [[kept, mapped]] = run_ranks(_all_batches, 1)
    assert kept == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    assert mapped == [[0, 10], [20, 30]]


def _per_rank_batches(shuffle):
    data = tfdist.data.global_batches(
        np.arange(11), per_rank_batch=2, seed=2, shuffle=shuffle
    )
    return [b.tolist() for b in data.as_numpy_iterator()], len(data)


def test_each_rank_keeps_the_size_of_its_batch():
    (first, steps), (second, _) = run_ranks(_per_rank_batches, 2, False)
    assert first == [[0, 1], [4, 5]] and second == [[2, 3], [6, 7]] and steps == 2
    (first, _), (second, _) = run_ranks(_per_rank_batches, 2, True)
    order = tfdist.data.epoch_order(11, seed=2, epoch=0).tolist()
    assert first[0] + second[0] + first[1] + second[1] == order[:8]


def _fit_per_rank(start):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((11, 1))
    data = tfdist.data.global_batches((x, x), per_rank_batch=2)
    own = _Records()
    model.fit(
        data,
        epochs=2,
        verbose=0,
        callbacks=[tfdist.callbacks.Elastic(start=start), own],
    )
    return own.hooks


def test_fit_with_a_batch_per_rank_has_as_many_steps_as_the_ranks_need():
    steps = [["epoch", 0], ["step", 0], ["step", 1], ["epoch", 1]]
    assert run_ranks(_fit_per_rank, 2, 0) == [[*steps, ["step", 0], ["step", 1]]] * 2


def _fit_per_rank_from_a_step():
    with pytest.raises(ValueError, match="start=3 and a per_rank_batch.*initial_epoch"):
        _fit_per_rank(3)


def test_a_step_of_an_earlier_job_says_nothing_about_a_batch_per_rank():
    run_ranks(_fit_per_rank_from_a_step, 2)


def test_a_batch_per_rank_in_an_elastic_job_needs_the_callback(monkeypatch):
    monkeypatch.setattr(renewal, "is_elastic", lambda environ: True)
    data = tfdist.data.global_batches(np.arange(8), per_rank_batch=2)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"and Elastic\(\) in callbacks"
    ):
        next(iter(data))


def test_bad_arguments_say_what_was_expected():
    tfdist.init()
    with pytest.raises(ValueError, match="for a global_batch of 9"):
        tfdist.data.global_batches(np.arange(8), global_batch=9)
    with pytest.raises(ValueError, match="for a per_rank_batch of 9 and up to 1 ranks"):
        tfdist.data.global_batches(np.arange(8), per_rank_batch=9)
    for sizes in ({}, {"global_batch": 2, "per_rank_batch": 2}):
        with pytest.raises(ValueError, match="either global_batch or per_rank_batch"):
            tfdist.data.global_batches(np.arange(8), **sizes)
    with pytest.raises(ValueError, match="For validation, use a global_batch"):
        tfdist.data.global_batches(np.arange(8), per_rank_batch=2, drop_remainder=False)
    with pytest.raises(TypeError, match="arrays, or tfdist.data.Records"):
        tfdist.data.global_batches(range(3), global_batch=1)
    with pytest.raises(ValueError, match=r"lengths \[3, 4\]"):
        tfdist.data.global_batches((np.arange(3), np.arange(4)), global_batch=1)
