"""recipes/mixup.py: means of images and labels, the same for a resumed training."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def mixed(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import mixup

    yield mixup.mixed
    sys.modules.pop("mixup")


def batches(count):
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (count, 4, 5, 5, 3)).astype("uint8")
    labels = np.tile(np.eye(4, dtype="float32"), (count, 1, 1))
    weights = np.tile(np.float32([1, 0, 1, 1]), (count, 1))
    return images, labels, weights


def values(dataset):
    return [[part.numpy() for part in batch] for batch in dataset]


def test_images_and_labels_are_the_same_means(mixed):
    data = batches(40)
    dataset = tf.data.Dataset.from_tensor_slices(data)
    found = values(mixed(dataset, alpha=0.5, seed=3, rank=0, first_batch=0))
    shares = set()
    for (images, labels, weights), old, old_labels, old_weights in zip(
        found, *data, strict=True
    ):
        share = labels[0, 0]  # of the first image; the rest is from the last one
        shares.add(float(share))
        share = np.where(old_weights[::-1] == 0, 1, share)[:, None]
        of_images = share[:, :, None, None]
        wanted = of_images * old + (1 - of_images) * old[::-1].astype("float32")
        np.testing.assert_allclose(images, wanted, atol=0.51)
        assert images.dtype == np.uint8
        np.testing.assert_allclose(
            labels, share * old_labels + (1 - share) * old_labels[::-1], atol=1e-6
        )
        assert weights.tolist() == old_weights.tolist()
        assert images[2].tobytes() == old[2].tobytes()  # its counterpart is corrupt
    assert len(shares) == 40
    # Beta(0.5, 0.5) has mean 0.5 and variance 1/8.
    assert abs(np.mean([*shares]) - 0.5) < 0.2
    assert 0.06 < np.var([*shares]) < 0.19


def test_shares_follow_from_seed_rank_and_batch(mixed):
    dataset = tf.data.Dataset.from_tensor_slices(batches(6))
    options = {"alpha": 0.2, "seed": 3, "rank": 1}
    whole = values(mixed(dataset, first_batch=10, **options))
    rest = values(mixed(dataset.skip(2), first_batch=12, **options))
    for one, again in zip(whole[2:], rest, strict=True):
        for part, same in zip(one, again, strict=True):
            assert part.tobytes() == same.tobytes()
    for changed in ({"seed": 4}, {"rank": 0}):
        other = values(mixed(dataset, first_batch=10, **(options | changed)))
        assert any((a[1] != b[1]).any() for a, b in zip(whole, other, strict=True))
