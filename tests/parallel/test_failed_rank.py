"""Ranks that raise because of another one know which, however they raise."""

import keras
from helpers.ranks import run_ranks

import tfdist
from tfdist.core import exit_report, failed_rank


class Full(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise OSError("No space left on device")


def save():
    """Who is to blame by the exception, and by what was noted when it was made."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = keras.ops.ones((8, 2))
    saving = tfdist.callbacks.RankZeroOnly(Full())
    try:
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[saving])
    except Exception as error:
        blamed = exit_report.culprit_rank(error, tfdist.rank())
        noted = failed_rank.last()
        return [blamed, noted[0] if noted else None]


def test_what_fails_on_one_rank_is_blamed_on_it_by_the_others():
    assert run_ranks(save, 3) == [[None, None], [0, 0], [0, 0]]
