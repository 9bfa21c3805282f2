"""tfdist.elastic.State without another rank: what it takes, copies and refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.core import native, runtime
from tfdist.core.generations import Generations
from tfdist.core.weights_state import check_not_torn
from tfdist.elastic import sharing
from tfdist.elastic import state as elastic_state
from tfdist.elastic.seeds import SeedsByRank
from tfdist.elastic.snapshot import Snapshot, variables_of


def compiled_model():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    return model


def values(variables):
    return [np.array(v) for v in variables]


def test_a_snapshot_has_all_that_a_training_step_changes():
    model = compiled_model()
    snapshot = Snapshot(variables_of([model]))
    before = values([*model.variables, *model.optimizer.variables])
    model.fit(np.ones((4, 3)), np.zeros((4, 2)), verbose=0)
    after = values([*model.variables, *model.optimizer.variables])
    changed = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert sum(changed) > 10
    snapshot.restore()
    restored = values([*model.variables, *model.optimizer.variables])
    for a, b in zip(before, restored, strict=True):
        np.testing.assert_array_equal(a, b)


def in_function(update, **options):
    """The update, in a `tf.function`."""

    def update_in_function(w):
        @tf.function(autograph=False, **options)
        def run():
            update(w)

        run()

    return update_in_function


UPDATES = {
    "assign": lambda w: w.assign(tf.zeros([4, 2])),
    "add": lambda w: w.assign_add(tf.ones([4, 2])),
    "slice": lambda w: w[1].assign([7.0, 7.0]),
    "scatter": lambda w: w.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), [2])),
    "function": in_function(lambda w: w.assign_sub(tf.ones([4, 2]))),
    "compiled": in_function(lambda w: w.assign_sub(w * w), jit_compile=True),
    "optimizer": lambda w: keras.optimizers.Adam(0.1).apply([tf.ones([4, 2])], [w]),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_no_kind_of_update_changes_what_was_saved_last(kind):
    w = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
    snapshot = Snapshot([w])
    w.assign_add(tf.ones([4, 2]))
    snapshot.save()
    for _ in range(2):  # the second time, what was restored is in use too
        before = w.numpy()
        UPDATES[kind](w)
        assert not np.array_equal(w, before)
        snapshot.restore()
        np.testing.assert_array_equal(w, before)


def test_variables_of_all_kinds_of_objects_are_found_once():
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(dense.trainable_variables)
    metric = keras.metrics.Mean()
    seeds = keras.random.SeedGenerator(1)
    own = tf.Variable(1.0)
    found = variables_of([dense, optimizer, metric, seeds, own, own, dense.kernel])
    expected = [*dense.variables, *optimizer.variables, *metric.variables]
    assert [id(v) for v in found] == [id(v) for v in [*expected, seeds.state, own]]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: [3], TypeError, "or variables, got int: 3"),
        (lambda: [], ValueError, "at least one object with variables, got none"),
        (lambda: [keras.optimizers.SGD()], ValueError, "Call optimizer.build"),
        (
            lambda: [keras.Sequential([keras.layers.Dense(1)])],
            ValueError,
            "Call model.build",
        ),
        (lambda: [keras.layers.Dense(1)], ValueError, "Call layer.build"),
        (lambda: [keras.metrics.AUC, 1], TypeError, "got type"),
    ],
)
def test_what_has_no_variables_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        tfdist.elastic.State(*make())


def test_an_elastic_loop_needs_a_program_that_has_not_called_shutdown(monkeypatch):
    monkeypatch.setattr(runtime.state, "shutdowns", 0)
    sharing.check_supported()
    monkeypatch.setattr(runtime.state, "shutdowns", 1)
    with pytest.raises(ValueError, match="tfdist.shutdown"):
        sharing.check_supported()


def test_without_an_elastic_job_all_steps_run_once():
    tfdist.init()
    w = tf.Variable(0)
    state = tfdist.elastic.State(w)
    seen = []
    for step in state.steps(3):
        seen.append((step, state.committed))
        w.assign_add(1)
        assert state.commit()
        with pytest.raises(RuntimeError, match="or a second time in a step"):
            state.commit()
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert state.committed == 3 and int(w) == 3


def test_steps_are_taken_once_and_committed_inside():
    tfdist.init()
    state = tfdist.elastic.State(tf.Variable(0))
    with pytest.raises(RuntimeError, match="outside of a loop over state.steps"):
        state.commit()
    with pytest.raises(ValueError, match="0 <= start <= total, got start 0, total -1"):
        list(state.steps(-1))
    assert list(state.steps(2)) == [0, 1]
    with pytest.raises(RuntimeError, match="has already run in this program"):
        list(state.steps(2))
    with pytest.raises(RuntimeError, match="outside of"):
        state.commit()


def test_steps_need_init():
    tfdist.shutdown()
    state = tfdist.elastic.State(tf.Variable(0))
    with pytest.raises(tfdist.NotInitializedError):
        list(state.steps(1))


def test_steps_go_on_where_an_earlier_job_has_ended():
    tfdist.init()
    state = tfdist.elastic.State(tf.Variable(0))
    seen = []
    for step in state.steps(5, start=3):
        seen.append(step)
        state.commit()
    assert seen == [3, 4] and state.committed == 5
    with pytest.raises(ValueError, match="got start 6, total 5"):
        list(tfdist.elastic.State(tf.Variable(0)).steps(5, start=6))


def test_the_streams_of_layers_belong_to_the_rank(monkeypatch):
    tfdist.init()
    model = compiled_model()
    [state] = [v for v in model.variables if v.name == "seed_generator_state"]
    seed, drawn = np.asarray(state)
    seeds = SeedsByRank(model.variables)
    for rank, of_rank in [(0, seed), (2, 1013904237 - 7 + seed), (0, seed)]:
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        seeds.set_for_rank()
        assert np.asarray(state).tolist() == [of_rank, drawn]


def test_the_weights_may_be_saved_if_the_job_cannot_go_on(monkeypatch):
    tfdist.shutdown()
    tfdist.init()
    generations = Generations()
    lost = native.CoreError(native.ABORTED, "rank 1 was lost", {"kind": "rank_failed"})

    def stop(*_):
        raise lost

    monkeypatch.setattr(generations, "enter_next", stop)
    monkeypatch.setattr(native, "failure", lambda: lost)
    with pytest.raises(RuntimeError, match="torn"):
        check_not_torn()
    with pytest.raises(tfdist.RankFailedError, match="rank 1 was lost"):
        sharing.enter_next(generations, 3, [], lambda newest: None)
    check_not_torn()
    tfdist.shutdown()
    tfdist.init()
    with pytest.raises(RuntimeError, match="torn"):  # in a later world
        check_not_torn()


def test_the_weights_may_be_saved_between_steps_when_a_rank_is_lost(monkeypatch):
    tfdist.shutdown()
    tfdist.init()
    monkeypatch.setenv("TFDIST_MEMBER", "0")
    monkeypatch.setattr(Generations, "begin", lambda self: None)
    monkeypatch.setattr(elastic_state, "check_supported", lambda: None)
    monkeypatch.setattr(elastic_state, "_program", elastic_state._Program())
    lost = native.CoreError(native.ABORTED, "rank 1 was lost", {"kind": "rank_failed"})

    def check_after_a_loss():
        with monkeypatch.context() as patched:
            patched.setattr(native, "failure", lambda: lost)
            check_not_torn()

    state = tfdist.elastic.State(tf.Variable(0))
    for _ in state.steps(2):
        with pytest.raises(RuntimeError, match="torn"):
            check_after_a_loss()
        assert state.commit()
        check_after_a_loss()
    with pytest.raises(RuntimeError, match="torn"):  # by steps after the loop
        check_after_a_loss()


def test_the_rows_of_a_batch_are_the_programs_own():
    tfdist.init()
    batches = []
    for _ in range(2):
        state = tfdist.elastic.State(tf.Variable(0.0))
        for rows in state.batches(9, per_rank_batch=4, epochs=1, seed=3):
            batches.append(rows.tolist())
            rows.sort()  # for files that are read in order, such as HDF5
            state.commit()
    assert batches[:2] == batches[2:]
