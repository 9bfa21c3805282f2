"""The examples of recipes/examples do what they say, through the real launcher."""

import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.launcher import clean_environment

import tfdist

EXAMPLES = Path(__file__).resolve().parents[2] / "recipes" / "examples"
TIMEOUT_S = 110


def output_of(example, *arguments, ranks=2, **environ):
    """The lines that the example prints, those of rank 0 without its name."""
    bin_dir = Path(sys.executable).parent
    done = subprocess.run(
        [
            *(str(bin_dir / "tfdistrun"), "-np", str(ranks), sys.executable),
            *(str(EXAMPLES / f"{example}.py"), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=clean_environment(
            TF_CPP_MIN_LOG_LEVEL="2", TFDIST_TIMEOUT_S="60", **environ
        ),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert {line[:8] for line in lines} == {"[rank 0]"}, "one rank speaks for all"
    assert re.fullmatch(
        r"\[rank 0\] same weights on all ranks: [0-9a-f]{12}", lines[-1]
    )
    return [line.removeprefix("[rank 0] ") for line in lines]


@pytest.mark.slow
def test_a_gan_with_two_optimizers_learns_to_draw():
    lines = output_of("gan")
    found = re.fullmatch(r"unlike real digits: (\S+) before, (\S+) after", lines[-2])
    before, after = float(found[1]), float(found[2])
    assert before > 1.0
    assert after < 0.5
    assert sum("telling:" in line and "drawing:" in line for line in lines) == 20


@pytest.mark.slow
def test_a_policy_learns_from_episodes_of_different_lengths():
    # With 100 the last round is enough for one rank by itself, and not for the other.
    lines = output_of("reinforce", "--enough", "100")
    rounds = [
        re.fullmatch(
            r"round +(\d+): +(\S+) steps upright; of ranks \[(\d+), (\d+)\]", line
        )
        for line in lines[:-2]
    ]
    assert [int(r[1]) for r in rounds] == list(range(1, len(rounds) + 1))
    lengths = [float(r[2]) for r in rounds]
    assert lengths[0] < 40
    assert lengths[-1] >= 100
    assert max(lengths[:-1]) < 100  # no rank went on, and none stopped before
    assert lines[-2] == (
        f"after {len(rounds)} rounds a pole stands for {lengths[-1]:.1f} steps"
    )
    # The point of the example: the ranks' episodes differ.
    assert sum(r[3] != r[4] for r in rounds) > len(rounds) / 2
    for one in rounds:  # of 16 episodes on each rank
        assert float(one[2]) == pytest.approx(
            (int(one[3]) + int(one[4])) / 32, abs=0.06
        )


@functools.cache
def example(name):
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture
def in_float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(before)


def two_heads_alone(epochs, ranks):
    """One process that has the batches of all ranks in every step."""
    heads = example("two_heads")
    keras.utils.set_random_seed(heads.SEED)
    data = heads.mnist_data.load()
    batches = [
        tfdist.data.shard(
            data.train, batch_size=heads.GLOBAL_BATCH // ranks, rank=rank, size=ranks
        )
        for rank in range(ranks)
    ]
    model, optimizer = heads.build_model(), heads.build_optimizer()

    @tf.function
    def step(*parts):
        with tf.GradientTape() as tape:
            losses = [
                heads.loss_of(model, heads.head_of(rank), images, digits)
                for rank, (images, digits) in enumerate(parts)
            ]
            loss = tf.add_n(losses) / len(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for _ in range(epochs):
        for parts in zip(*batches, strict=True):
            step(*parts)
    return model


# The accuracy of the digit and of its parity after two epochs, and after all.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "digit", "parity"), [(2, 0.6, 0.8), (8, 0.88, 0.92)]
)
def test_a_branch_of_one_rank_trains_as_in_one_process(
    epochs, digit, parity, tmp_path, in_float64
):
    (tmp_path / "keras.json").write_text(json.dumps({"floatx": "float64"}))
    saved = tmp_path / "heads.keras"
    words = ["--epochs", str(epochs), "--save", str(saved)]
    lines = output_of("two_heads", *words, KERAS_HOME=str(tmp_path))
    found = {
        line.split()[0]: float(line.split()[-1]) for line in lines if "accuracy" in line
    }
    assert found["digit"] > digit
    assert found["parity"] > parity
    expected = two_heads_alone(epochs, 2).get_weights()
    trained = keras.models.load_model(saved).get_weights()
    for a, b in zip(expected, trained, strict=True):
        assert a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(b, a, rtol=1e-8, atol=1e-10)
