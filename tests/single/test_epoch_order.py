"""The order of an epoch: a function of seed and epoch, divided by the ranks."""

import numpy as np
import pytest

import tfdist
from tfdist.data import epoch_order, positions, samples_of_step

WORD = 1 << 64
GOLDEN = [4, 2, 0, 6, 1, 5, 9, 8, 7, 3]


def philox4x64(counter, key):
    """Philox4x64-10 of Salmon et al. (2011), section 3.3, one block."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], WORD)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], WORD)
        c = [high1 ^ c[1] ^ k0, low1, high0 ^ c[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % WORD, (k1 + 0xBB67AE8584CAA73B) % WORD
    return c


def words(total, key):
    """As NumPy counts: the first block is that of counter 1."""
    blocks = [philox4x64((n, 0, 0, 0), key) for n in range(1, total // 4 + 2)]
    return [word for block in blocks for word in block][:total]


def test_the_reference_gives_the_vector_of_its_authors():
    # Random123, kat_vectors: "philox4x64 10", counter and key all zeros.
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC]
    expected += [0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox4x64((0, 0, 0, 0), (0, 0)) == expected


@pytest.mark.parametrize(
    ("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (42, 89), (WORD - 1, WORD - 1)]
)
def test_the_order_sorts_the_words_of_the_paper(seed, epoch):
    for total in (1, 4, 101):
        keys = words(total, (seed, epoch))
        expected = sorted(range(total), key=lambda i: (keys[i], i))
        assert epoch_order(total, seed=seed, epoch=epoch).tolist() == expected


def test_the_order_stays_what_it_was():
    """A run that goes on under another version sees the samples it has not seen."""
    assert epoch_order(10, seed=1, epoch=2).tolist() == GOLDEN


def test_an_order_has_each_sample_once_and_every_epoch_and_seed_its_own():
    orders = [
        epoch_order(1000, seed=seed, epoch=epoch)
        for seed in range(3)
        for epoch in range(3)
    ]
    for order in orders:
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(1000))
    assert len({order.tobytes() for order in orders}) == 9
    assert epoch_order(0, seed=0, epoch=0).tolist() == []


def rows(total, global_batch, size, **options):
    """The samples of every step, all ranks together."""
    parts = [
        positions(
            total,
            global_batch=global_batch,
            seed=3,
            epoch=1,
            rank=r,
            size=size,
            **options,
        )
        for r in range(size)
    ]
    steps = total // global_batch - options.get("first_step", 0)
    assert all(part.shape == (steps, global_batch // size) for part in parts)
    assert all(part.dtype == np.int64 for part in parts)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("total", [12, 13, 23, 24, 101])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_a_step_has_the_same_samples_for_any_number_of_ranks(total, size):
    steps = total // 12
    expected = epoch_order(total, seed=3, epoch=1)[: steps * 12].reshape(steps, 12)
    assert np.array_equal(rows(total, 12, size), expected)


def test_a_run_goes_on_with_another_size_and_sees_nothing_twice():
    before, after = rows(101, 12, 2)[:5], rows(101, 12, 3, first_step=5)
    assert np.array_equal(np.concatenate([before, after]), rows(101, 12, 1))
    assert len(np.unique(np.concatenate([before, after]))) == 96
    assert rows(101, 12, 3, first_step=8).shape == (0, 12)


def test_rank_and_size_are_those_of_the_world():
    tfdist.init()
    own = positions(10, global_batch=2, seed=3, epoch=1)
    assert np.array_equal(own, rows(10, 2, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 10, "size": 4}, "multiple of 4, .*, got 10.* 8 and 12"),
        ({"global_batch": 3, "size": 4}, "got 3. Nearest valid values: 4"),
        ({"total": 11}, "got 11 samples for a global_batch of 12.*this data is 9\\."),
        ({"total": 2}, "each of 3 ranks, got 2 samples. Start at most 2 ranks"),
        ({"total": 0}, "got 0 samples. Check the data"),
        ({"rank": 3}, "rank to be in 0..2, got 3"),
        ({"rank": -1}, "Expected rank to be in 0.*got -1"),
        ({"size": 0}, "Expected size to be in 1.*got 0"),
        ({"total": -5}, "Expected total to be in 0.*got -5"),
        ({"global_batch": 0}, "Expected global_batch to be in 1.*got 0"),
        ({"seed": -1}, "Expected seed to be in 0.*got -1"),
        ({"epoch": WORD}, "Expected epoch to be in 0..2..64 - 1, got"),
        ({"first_step": 9}, r"first_step to be in 0..8 .the epoch has 8 steps.*got 9"),
        ({"first_step": -1}, "Expected first_step to be in 0.*got -1"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, words):
    arguments = {"total": 101, "global_batch": 12, "seed": 0, "epoch": 0}
    arguments |= {"rank": 0, "size": 3, **changes}
    with pytest.raises(ValueError, match=words):
        positions(arguments.pop("total"), **arguments)


@pytest.mark.parametrize("value", [1.0, True, "1", None])
def test_numbers_are_integers(value):
    with pytest.raises(TypeError, match="Expected epoch to be an integer, got"):
        epoch_order(4, seed=0, epoch=value)


def test_numbers_may_come_from_numpy():
    one = np.int64(1)
    expected = epoch_order(4, seed=1, epoch=1)
    assert np.array_equal(epoch_order(np.int32(4), seed=one, epoch=one), expected)


@pytest.mark.parametrize("step", [0, 7, 8, 23])
def test_samples_of_a_step_are_those_of_positions(step):
    epoch, of_epoch = divmod(step, 8)  # 101 // 12 steps in an epoch
    expected = positions(
        101, global_batch=12, seed=5, epoch=epoch, first_step=of_epoch, rank=0, size=1
    )[0]
    for size in (1, 3, 5, 12):
        parts = [
            samples_of_step(
                101, global_batch=12, seed=5, step=step, rank=rank, size=size
            )
            for rank in range(size)
        ]
        assert np.array_equal(np.concatenate(parts), expected)
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


def test_samples_of_a_step_are_those_of_the_rank_in_the_world():
    tfdist.init()
    own = samples_of_step(10, global_batch=4, seed=3, step=1)
    assert np.array_equal(own, epoch_order(10, seed=3, epoch=0)[4:8])
    expected = own.tolist()
    own.sort()  # for files that are read in order, such as HDF5
    again = samples_of_step(10, global_batch=4, seed=3, step=1)
    assert again.tolist() == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 2}, "global_batch of 3 .the number of ranks. to 101"),
        ({"global_batch": 102}, "global_batch of 3 .*to 101 .*got 102"),
        ({"step": -1}, "Expected step to be in 0.*got -1"),
        ({"rank": 3}, "rank to be in 0..2, got 3"),
    ],
)
def test_a_step_needs_a_sample_for_each_rank(changes, words):
    arguments = {"global_batch": 12, "seed": 0, "step": 0, "rank": 0, "size": 3}
    with pytest.raises(ValueError, match=words):
        samples_of_step(101, **(arguments | changes))
