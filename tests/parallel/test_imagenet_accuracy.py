"""Two ranks learn as well as one process, with the same global batch."""

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
