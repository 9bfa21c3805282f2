"""The recipe learns with several ranks, and at rates that need a warm-up or Adasum."""

import csv

import pytest
from helpers import pictures, recipe
from helpers.ranks import run_ranks

EPOCHS = 25


def trained(words):
    recipe.run(*words)
    return 0


def log_of(folder):
    return list(csv.DictReader((folder / "latest" / "log.csv").open()))


@pytest.mark.slow
def test_two_ranks_reach_the_accuracy_of_one_process(tmp_path):
    data = pictures.prepared(tmp_path, train=1200, validation=100, size=96)
    reached = {}
    for ranks in (1, 2):
        words = [
            f"--data_dir={data}",
            f"--output_dir={tmp_path / str(ranks)}",
            "--network=resnet8",
            "--image_size=64",
            "--notensorboard",
            "--label_smoothing=0",
            "--global_batch=32",
            f"--epochs={EPOCHS}",
            "--preset=cosine_2018",
            "--rate=3.2",
        ]
        run_ranks(trained, ranks, words, timeout_s=600)
        rows = log_of(tmp_path / str(ranks))
        assert len(rows) == EPOCHS
        reached[ranks] = [float(rows[-1][name]) for name in ("top_1", "val_top_1")]
    print(reached)
    assert reached[1][0] > 0.4  # of crops; by chance it would be 0.1
    assert reached[2][0] >= 0.9 * reached[1][0]
    assert reached[2][1] >= 0.9 * reached[1][1] > 0.5


def last_top_1(folder, data, ranks, *options):
    """The training accuracy of the last of 25 epochs, with a very high rate."""
    words = [
        f"--data_dir={data}",
        f"--output_dir={folder}",
        "--network=resnet8",
        "--image_size=32",
        "--notensorboard",
        "--label_smoothing=0",
        "--global_batch=64",
        f"--epochs={EPOCHS}",
        "--preset=cosine_2018",
        "--rate=6.4",
        *options,
    ]
    run_ranks(trained, ranks, words, timeout_s=600)
    return float(log_of(folder)[-1]["top_1"])


@pytest.mark.slow
def test_a_warmup_makes_a_high_rate_trainable(tmp_path):
    data = pictures.prepared(tmp_path, train=600, validation=100, size=64)
    without = last_top_1(tmp_path / "without", data, 1, "--warmup_epochs=0")
    with_it = last_top_1(tmp_path / "with", data, 1, "--warmup_epochs=5")
    print(without, with_it)
    assert without < 0.15  # by chance it would be 0.1
    assert with_it > 0.35


@pytest.mark.slow
def test_adasum_trains_where_a_scaled_rate_diverges(tmp_path):
    data = pictures.prepared(tmp_path, train=600, validation=100, size=64)
    reached = {
        reduction: last_top_1(
            tmp_path / reduction,
            data,
            2,
            "--warmup_epochs=0",
            f"--reduction={reduction}",
        )
        for reduction in ("average", "adasum")
    }
    print(reached)
    assert reached["average"] < 0.15
    assert reached["adasum"] > 0.2
