"""The ImageNet recipe's batches on several ranks; few of them may read for all."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import pictures, recipe
from helpers.ranks import run_ranks

import tfdist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import imagenet_data  # noqa: E402
import imagenet_examples  # noqa: E402

SMALL = {"image_size": 32, "threads": 1}


def arrays(batches):
    columns = zip(*batches.as_numpy_iterator(), strict=True)
    return [np.concatenate(column) for column in columns]


def training(split, **options):
    options = {"first_step": 6, "last_step": 10, "seed": 3, **SMALL, **options}
    return split.training_batches(global_batch=24, **options)


def validation(split, **options):
    return split.validation_batches(batch=7, **SMALL, **options)


@pytest.fixture(scope="module")
def classic(tiny_imagenet, tmp_path_factory):
    """Not as prepared: importing tensorflow-datasets takes each rank seconds."""
    folder = tmp_path_factory.mktemp("classic") / "files"
    return pictures.as_classic_tfrecords(tiny_imagenet, folder)


def opened(folder, name="train"):
    return imagenet_data.open_split("tfrecord", folder, name, label_offset=1)


def read_in_both_ways(folder, readers):
    found = []
    for name, batches in (("train", training), ("validation", validation)):
        split = opened(folder, name)
        own, sent = batches(split), batches(split, readers=readers)
        assert own.element_spec == sent.element_spec
        assert own.cardinality() == sent.cardinality()
        read = arrays(own)
        for expected, received in zip(read, arrays(sent), strict=True):
            np.testing.assert_array_equal(received, expected)
        found.append(read[1].argmax(axis=1))
    tfdist.barrier()  # a reader ends last
    return found


@pytest.mark.parametrize(
    ("size", "readers"),
    [
        (2, 1),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_records_that_others_read_give_the_same_batches(
    classic, tiny_imagenet, size, readers
):
    ranks = run_ranks(read_in_both_ways, size, str(classic), readers)
    held_out = np.concatenate([labels for _, labels in ranks])
    expected = [one.label for one in pictures.examples(tiny_imagenet, "validation")]
    assert held_out.tolist() == expected


def read_damaged(folder, skip_corrupt):
    split = opened(folder)
    batches = training(
        split, first_step=0, last_step=8, readers=1, skip_corrupt=skip_corrupt
    )
    try:
        weights = float(arrays(batches)[-1].sum())
    except tf.errors.OpError as error:
        weights = str(error)
    tfdist.barrier()  # a reader ends last
    return [weights, split.failure, sorted(split.skipped)]


def test_a_damaged_record_that_others_read_is_named_or_left_out(
    classic, tiny_imagenet, tmp_path
):
    folder = shutil.copytree(classic, tmp_path / "copy")
    order = tfdist.data.epoch_order(200, seed=3, epoch=0)
    position = int(order[12])  # in step 0 of rank 1, whose records rank 0 reads
    shard, record = divmod(position, 50)
    file = folder / f"train-{shard:05d}-of-00004"
    content = bytearray(file.read_bytes())
    jpeg = pictures.examples(tiny_imagenet, "train")[position].jpeg
    content[content.index(jpeg) + len(jpeg) // 2] ^= 1
    file.write_bytes(content)
    (whole, *_), (named, failure, _) = run_ranks(read_damaged, 2, str(folder), False)
    assert f"{file}, record {record}" in named and failure in named
    ranks = run_ranks(read_damaged, 2, str(folder), True)
    assert ranks == [[96.0, None, []], [95.0, None, [position]]]


def refused(folder):
    split = opened(folder)
    messages = []
    other = 1 - tfdist.rank()
    for options in ({"readers": 0}, {"readers": 1, "rank": other}):
        with pytest.raises(ValueError) as caught:
            training(split, **options)
        messages.append(str(caught.value))
    split = imagenet_data.open_split("synthetic", None, "train", examples=48)
    with pytest.raises(ValueError, match="nothing to read"):
        training(split, readers=1)
    return messages


def test_readers_that_cannot_be_are_refused_on_all_ranks(classic):
    for of_readers, of_rank in run_ranks(refused, 2, str(classic)):
        assert "readers" in of_readers
        assert "Expected the rank and size of this process" in of_rank


def look_at_labels(folder):
    with pytest.raises(ValueError) as caught:
        imagenet_data.open_split("tfrecord", folder, "train", classes=10)
    return str(caught.value)


def test_a_wrong_label_is_the_same_error_on_all_ranks(tmp_path):
    encoded = tf.io.encode_jpeg(np.zeros([8, 8, 3], np.uint8)).numpy()
    with tf.io.TFRecordWriter(str(tmp_path / "train-00000-of-00001")) as writer:
        for label in range(1, 11):
            feature = {
                "image/encoded": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[encoded])
                ),
                "image/class/label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[label])
                ),
            }
            features = tf.train.Features(feature=feature)
            writer.write(tf.train.Example(features=features).SerializeToString())
    first, second = run_ranks(look_at_labels, 2, str(tmp_path))
    assert first == second
    assert "record 9: expected a label of 0..9, found 10" in first


def threads(processors, machines):
    """What ranks take that may use these processors of these machines."""
    rank = tfdist.rank()
    before = os.sched_getaffinity, imagenet_examples._machine
    os.sched_getaffinity = lambda pid: set(processors[rank])
    imagenet_examples._machine = lambda: machines[rank]
    script = recipe.script()
    script.FLAGS["data_threads"].unparse()
    script.FLAGS(["resnet50_imagenet.py"])
    try:
        return script.pipeline(224)["threads"]
    finally:
        os.sched_getaffinity, imagenet_examples._machine = before


@pytest.mark.parametrize(
    ("processors", "machines", "expected"),
    [
        ([[0, 1, 2, 3, 4, 5]] * 3, "aaa", [2, 2, 2]),
        ([[0, 1, 2, 3, 4, 5]] * 3, "aba", [3, 6, 3]),
        ([[0, 1, 2], [3, 4, 5], [6, 7]], "aaa", [3, 3, 2]),  # bound
        ([[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]], "aaa", [2, 2, 4]),
        ([[0], [0], [0]], "aaa", [1, 1, 1]),
    ],
)
def test_ranks_share_the_processors_that_they_may_use(processors, machines, expected):
    assert run_ranks(threads, 3, processors, machines) == expected
