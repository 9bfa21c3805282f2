"""Datasets of Keras's loaders of folders: each file once, over the ranks together."""

import wave

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import _dataset_checks

FILES = 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """File k of each kind says k, and is in the folder of class k mod 3."""
    root = tmp_path_factory.mktemp("loaders")
    for k in range(FILES):
        for kind in ("image", "text", "audio"):
            (root / kind / f"class {k % 3}").mkdir(parents=True, exist_ok=True)
        picture = np.full((8, 8, 3), 10 * k)
        keras.utils.save_img(
            root / f"image/class {k % 3}/{k}.png", picture, scale=False
        )
        (root / f"text/class {k % 3}/{k}.txt").write_text(f"text {k}")
        with wave.open(str(root / f"audio/class {k % 3}/{k}.wav"), "wb") as sound:
            sound.setparams((1, 2, 8000, 0, "NONE", ""))
            sound.writeframes(np.full(10 + k, 1000 * k, "int16").tobytes())
    return root


def loaded(folder, kind, **options):
    load = getattr(keras.utils, f"{kind}_dataset_from_directory")
    if kind == "image":
        options["image_size"] = (8, 8)
    return load(folder / kind, verbose=False, **options)


def numbers(kind, batch):
    """Which files are in a batch."""
    if kind == "image":
        return (batch[:, 0, 0, 0] // 10).astype(int).tolist()
    if kind == "text":
        return [int(text.split()[1]) for text in batch]
    return np.rint(batch[:, 0, 0] * 32768 / 1000).astype(int).tolist()


def epochs(kind, batches, count=1):
    """The files of each batch, in so many epochs; checks the labels."""
    found = []
    for _ in range(count):
        steps = []
        for x, labels in batches.as_numpy_iterator():
            steps.append(numbers(kind, x))
            assert [k % 3 for k in steps[-1]] == labels.tolist()
        found.append(steps)
    return found


@pytest.mark.parametrize("kind", ["image", "text", "audio"])
@pytest.mark.parametrize(
    ("size", "batch_size", "options"),
    [
        (2, 4, {}),
        (3, 1, {"batch_size": None}),  # a rank's last batch has two samples
        (2, 1, {}),
        (3, 5, {"validation_split": 0.3, "subset": "training", "seed": 3}),
    ],
)
def test_each_file_is_used_once_in_an_epoch(kind, size, batch_size, options, folder):
    ranks = []
    for rank in range(size):
        np.random.seed(rank)  # of which the order of the loader's files depends
        shard = data.shard(
            loaded(folder, kind, **options), batch_size=batch_size, rank=rank, size=size
        )
        [steps] = epochs(kind, shard)
        assert int(shard.cardinality()) == len(steps)
        ranks.append(steps)
    assert len({len(steps) for steps in ranks}) == 1
    seen = [k for steps in ranks for batch in steps for k in batch]
    assert len(seen) == len(set(seen)) == (17 if options.get("seed") else FILES)


def test_the_files_are_shuffled_as_the_loader_does_and_decoded_after_that(folder):
    def shard(shuffle=None):
        made = loaded(folder, "text", seed=1)
        return data.shard(made, batch_size=4, rank=1, size=2, shuffle=shuffle)

    first, second = epochs("text", shard(), 2)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, []))
    for batches in (
        shard(False),
        data.shard(loaded(folder, "text", shuffle=False), batch_size=4, rank=1, size=2),
    ):
        first, second = epochs("text", batches, 2)
        assert first == second
    # The buffer holds names of files, not what is in them.
    nodes = list(_dataset_checks._upstream(shard()))
    kinds = [type(node).__name__ for node in nodes]
    shuffle = kinds.index("_ShuffleDataset")
    assert kinds.index("_ParallelMapDataset") < shuffle
    assert not any("Shuffle" in kind for kind in kinds[shuffle + 1 :])


def test_a_mapped_loader_is_refused_with_what_to_write(folder):
    pictures = loaded(folder, "image").map(lambda x, y: (x / 255.0, y))
    with pytest.raises(ValueError, match=r"Keras loader.*add \.map\(\.\.\.\) .* after"):
        data.shard(pictures, batch_size=4, rank=0, size=2)
    pictures = loaded(folder, "image", shuffle=False).cache()
    with pytest.raises(ValueError, match="is batched before .*add .map"):
        data.shard(pictures, batch_size=4, rank=0, size=2)
    # The attribute by which a loader is known does not make this one.
    own = loaded(folder, "image").map(lambda x, y: (tf.image.flip_up_down(x), y))
    own.class_names = ["a", "b", "c"]
    with pytest.raises(ValueError, match="add .map"):
        data.shard(own, batch_size=4, rank=0, size=2)


def test_a_shuffled_loader_in_evaluate_is_told_what_to_write(folder):
    for function in ("tfdist.evaluate", "tfdist.predict"):
        with pytest.raises(ValueError, match="With validation_split, shuffle=False"):
            _dataset_checks.check_order(loaded(folder, "image"), function, 2)
    _dataset_checks.check_order(
        loaded(folder, "image", shuffle=False), "tfdist.evaluate", 2
    )


def test_a_sequence_of_batches_is_told_to_make_those_of_the_rank():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

    with pytest.raises(TypeError, match="Let its __getitem__ return this rank's"):
        data.shard(Batches(), batch_size=4, rank=0, size=2)


def test_shuffled_lists_of_files_and_batched_series_are_told_the_option(folder):
    files = tf.data.Dataset.list_files(str(folder / "text/*/*.txt"))
    with pytest.raises(ValueError, match="or pass shuffle=False to list_files or to"):
        data.shard(files, batch_size=4, rank=0, size=2)
    series = keras.utils.timeseries_dataset_from_array(np.arange(9.0), None, 3)
    with pytest.raises(ValueError, match="or pass batch_size=None to the Keras loader"):
        data.shard(series, batch_size=4, rank=0, size=2)
