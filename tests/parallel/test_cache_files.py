"""A cache in a file: one for each rank, or one that is complete."""

import tensorflow as tf
from helpers.outcome import outcome
from helpers.ranks import run_ranks

import tfdist


def sharded(folder):
    numbers = tf.data.Dataset.range(8)

    def shard(name):
        cached = numbers.cache(name).map(lambda x: x + 1)
        batches = tfdist.data.shard(cached, batch_size=2)
        return [batch.tolist() for batch in batches.as_numpy_iterator()]

    refused = outcome(lambda: shard(f"{folder}/cache"))
    own = shard(f"{folder}/cache-{tfdist.rank()}")
    if tfdist.rank() == 0:
        list(numbers.cache(f"{folder}/whole"))
    tfdist.barrier()
    return [refused, own, shard(f"{folder}/whole"), shard("")]


def test_ranks_of_a_host_do_not_write_one_file(tmp_path):
    for rank, found in enumerate(run_ranks(sharded, 2, str(tmp_path))):
        expected = [[rank + 1, rank + 3], [rank + 5, rank + 7]]
        assert found[1:] == [expected] * 3
        assert found[0]["class"] == "ValueError"
        assert "Add the rank to the file name" in found[0]["message"]
