"""MetricAverage behind callbacks that use the same metrics at the end of an epoch."""

import keras
import numpy as np
import pytest
from helpers.ranks import run_ranks

import tfdist

ONES = np.ones((16, 1), "float32")
TRAIN, VALIDATION, TEST = (
    (ONES, scale * ONES) for scale in (1, 2, 10)
)  # losses 1 4 100


class Evaluates(keras.callbacks.Callback):
    """Looks at data of its own at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(*TEST, verbose=0)


class EvaluatesTogether(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        tfdist.evaluate(self.model, *TEST, batch_size=16, verbose=0)


class OfSteps(keras.Sequential):
    """Its training step returns numbers of the step, not of the epoch."""

    def train_step(self, data):
        loss = super().train_step(data)["loss"]
        return {"loss": 0.0 * loss, "other": 7.0 * loss}


EVALUATES = {
    "alone": Evaluates,
    "together": EvaluatesTogether,
    "rank 0": lambda: tfdist.callbacks.RankZeroOnly(Evaluates()),
}


def zero_model(kind=keras.Sequential, **options):
    """It gives 0 whatever it is trained on."""
    keras.utils.clear_session()
    model = kind([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", jit_compile=False, **options)
    return model


def history_behind(who, validates, steps_per_execution=1):
    model = zero_model(steps_per_execution=steps_per_execution)
    share = tfdist.data.shard(VALIDATION, batch_size=4) if validates else None
    return model.fit(
        tfdist.data.shard(TRAIN, batch_size=4),
        validation_data=share,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[EVALUATES[who](), tfdist.callbacks.MetricAverage()],
    ).history


@pytest.mark.parametrize(
    ("who", "validates", "steps_per_execution"),
    [
        pytest.param("alone", False, 1, marks=pytest.mark.slow),
        ("alone", True, 1),
        ("together", True, 1),
        ("rank 0", False, 3),  # the last execution has one step
        pytest.param("rank 0", True, 1, marks=pytest.mark.slow),
    ],
)
def test_metrics_are_those_of_the_epoch_also_behind_an_evaluation(
    who, validates, steps_per_execution
):
    expected = {"loss": [1.0, 1.0]}
    if validates:
        expected["val_loss"] = [4.0, 4.0]
    found = run_ranks(history_behind, 2, who, validates, steps_per_execution)
    assert found == [expected] * 2


def unknown_number_of_steps(validates):
    model = zero_model()
    data = tfdist.data.shard(TRAIN, batch_size=4).filter(lambda x, y: True)
    try:
        return model.fit(
            data,
            validation_data=VALIDATION if validates else None,
            verbose=0,
            callbacks=[EVALUATES["rank 0"](), tfdist.callbacks.MetricAverage()],
        ).history
    except ValueError as error:
        return str(error)


def test_metrics_that_are_lost_are_an_error_on_all_ranks():
    for message in run_ranks(unknown_number_of_steps, 2, False):
        assert "['loss'] on rank 0" in message
        assert "Put MetricAverage before it" in message
    expected = {"loss": [1.0], "val_loss": [4.0]}
    assert run_ranks(unknown_number_of_steps, 2, True) == [expected] * 2


def histories_of_unknown_steps():
    average = tfdist.callbacks.MetricAverage
    of_metrics = zero_model().fit(
        tfdist.data.shard(TRAIN, batch_size=4).filter(lambda x, y: True),
        verbose=0,
        callbacks=[average()],
    )
    # A loss of the last step alone is no sign of an evaluation.
    of_steps = zero_model(OfSteps).fit(
        tfdist.data.shard(TRAIN, batch_size=4).filter(lambda x, y: True),
        verbose=0,
        callbacks=[average()],
    )
    return of_metrics.history, of_steps.history


def test_an_epoch_of_unknown_length_needs_no_other_callbacks():
    for of_metrics, of_steps in run_ranks(histories_of_unknown_steps, 2):
        assert of_metrics == {"loss": [1.0]}
        assert of_steps == {"loss": [1.0], "other": [7.0]}
