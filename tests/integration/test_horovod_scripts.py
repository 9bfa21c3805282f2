"""Scripts written for Horovod, started as they are with `tfdistrun --horovod`.

Ten scripts of different styles in horovod_scripts/, as Horovod's documentation teaches
them. Each ends with equal bits on both ranks, after as many reductions as its text
says; and where one process with the same global batches computes the same, with its
weights.
"""

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.deadline import deadline
from helpers.launcher import run

SCRIPTS = Path(__file__).with_name("horovod_scripts")
TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Script:
    """What a script's text implies.

    Attributes:
        reductions: operations that reduce gradients, with two ranks.
        same_as: number of ranks and arguments of a run with the same global batches,
            None: there is none.
        atol: by how much its weights may differ; they are about 1.
        same_facts: what is equal in both runs.
    """

    reductions: int
    same_as: tuple[int, list[str]] | None
    atol: float = 2e-6
    same_facts: dict[str, Any] = field(default_factory=dict)


TWICE = ["--batch-size", "64"]  # on one rank
EXPECTED = {
    # 2 epochs of 1024 / 64 steps.
    "mnist_fit": Script(32, (1, [*TWICE, "--base-lr", "0.002"])),
    "mnist_tape": Script(12, (1, [*TWICE, "--base-lr", "0.002", "--batches", "12"])),
    # 5 epochs of 1024 / 64. One process has no warm-up, and other batch statistics.
    "imagenet_fit": Script(80, None),
    # 10 steps of two optimizers.
    "gan": Script(20, (1, TWICE)),
    # 12 steps, two tables, indices and values of each.
    "embedding": Script(48, (1, ["--batch-size", "128"])),
    # 2 epochs of 16 batches, of which four are added up.
    "accumulation": Script(8, (1, ["--batches-per-allreduce", "8"])),
    # 12 steps in each rank's own set. Four ranks: two in each set.
    "process_sets": Script(12, (4, ["--batch-size", "16"])),
    # Rounded to fp16: forward, backward and on the way.
    "mixed_precision": Script(
        20, (1, [*TWICE, "--base-lr", "0.1", "--batches", "20"]), atol=4e-3
    ),
    # 12 steps, all gradients in one operation of the script's own.
    "allgather_metrics": Script(12, (1, TWICE)),
    "keras2_style": Script(32, (1, [*TWICE, "--lr", "0.04"])),
}


@dataclass(frozen=True)
class Outcome:
    """What the ranks of one run have left."""

    facts: list[dict[str, Any]]
    weights: list[list[np.ndarray]]
    stdout: str
    stderr: str


@functools.cache
def outcome(name: str, ranks: int, *arguments: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            Path(folder),
            *("--horovod", "-np", str(ranks), str(SCRIPTS / f"{name}.py"), *arguments),
            timeout_s=TIMEOUT_S,
            TF_CPP_MIN_LOG_LEVEL="2",
        )
        assert done.code == 0, done.stdout[-2000:] + done.stderr[-3000:]
        paths = [Path(folder, f"rank-{rank}") for rank in range(ranks)]
        facts = [json.loads(p.with_suffix(".json").read_text()) for p in paths]
        weights = []
        for path in paths:
            with np.load(path.with_suffix(".npz")) as file:
                weights.append([file[key] for key in file.files])
        return Outcome(facts, weights, done.stdout, done.stderr)


def reductions_of(name: str, facts: dict[str, Any]) -> int:
    if name == "allgather_metrics":  # its own calls of grouped_allreduce
        return sum(n.startswith("grouped_allreduce") for n in facts["names"])
    return facts["reductions"]


def scripts(default: str) -> list[Any]:
    """All names; those of `default` also in a quick run of the tests."""
    slow = pytest.mark.slow
    return [n if n == default else pytest.param(n, marks=slow) for n in EXPECTED]


@deadline(2 * TIMEOUT_S)
@pytest.mark.parametrize("name", scripts("mnist_fit"))
def test_ranks_end_with_equal_bits_after_the_reductions_that_the_text_implies(name):
    found = outcome(name, 2)
    assert len({facts["hash"] for facts in found.facts}) == 1
    for facts in found.facts:
        assert reductions_of(name, facts) == EXPECTED[name].reductions, facts["names"]


@pytest.mark.slow
@deadline(2 * TIMEOUT_S)
@pytest.mark.parametrize("name", [n for n, s in EXPECTED.items() if s.same_as])
def test_it_is_the_training_of_one_process_with_the_same_global_batches(name):
    ranks, arguments = EXPECTED[name].same_as
    together, other = outcome(name, 2), outcome(name, ranks, *arguments)
    for ours, theirs in zip(together.weights[0], other.weights[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXPECTED[name].atol)


@pytest.mark.slow
@deadline(2 * TIMEOUT_S)
def test_what_the_scripts_report_is_what_their_texts_say():
    size, base = 2, 0.0125
    # The last step of each epoch of warm-up, then the full rate, and the two steps.
    expected = [
        base * 1.5,
        base * size,
        base * size,
        base * size / 10,
        base * size / 100,
    ]
    rates = outcome("imagenet_fit", 2).facts[0]["lr"]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)

    facts = outcome("allgather_metrics", 2).facts[1]
    assert facts["counts"][1] == facts["gathered"] == 255
    assert facts["per_rank"] == [128, 127]
    assert facts["accuracy"] == facts["counts"][0] / 255

    facts = outcome("keras2_style", 2).facts[1]
    np.testing.assert_allclose(facts["rates"], [0.04, 0.02, 0.02], rtol=1e-6)
    assert "experimental_run_tf_function" in outcome("keras2_style", 2).stderr

    # Metrics are averages over the ranks, the same on both.
    first, second = outcome("mnist_fit", 2).facts
    assert first["loss"] == second["loss"] and first["loss"][0] > first["loss"][1]
    assert outcome("process_sets", 2).facts[0]["sizes"] == [1, 1]


# In `make test`: tests/parallel/test_horovod_unreduced.py.
@pytest.mark.slow
@deadline(2 * TIMEOUT_S)
def test_gradients_that_are_not_reduced_are_an_error(tmp_path):
    done = run(
        tmp_path,
        *("--horovod", "-np", "2", str(SCRIPTS / "unreduced.py")),
        timeout_s=TIMEOUT_S,
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for rank in range(2):
        start = f"[rank {rank}] "
        lines = [line.removeprefix(start) for line in done.stdout.splitlines()
                 if line.startswith(start) and ": " in line]  # fmt: skip
        told = dict(line.split(": ", 1) for line in lines)
        assert told["before init"].startswith("RuntimeError: SGD takes a step before")
        wrong = ["plain tape", "tape too late", "only the loss", "loss of all"]
        wrong += ["outputs of all", "loss beside"]
        wrong = [f"{w}, {kind}" for w in wrong for kind in ("function", "eager")]
        wrong += ["TensorFlow 1, unwrapped", "plain arguments"]
        wrong += ["statistics alone"]
        for name in ["unwrapped", *wrong]:
            assert "gradients that were not reduced over the 2 ranks" in told[name], (
                name
            )
        # The origin of these gradients is unknown, so the weights are compared.
        for name in ["loss beside, eager", "plain arguments"]:
            assert "The ranks differ before the update of step 2" in told[name], name
        assert "hvd.DistributedOptimizer(keras.optimizers.Adam(" in told["unwrapped"]
        right = ["wrapped tape", "by hand", "nested"]
        right = [f"{r}, {kind}" for r in right for kind in ("function", "eager")]
        right += ["wrapped after compile", "loss scale, wrapped tape", "arguments"]
        for name in [*right, "TensorFlow 1, wrapped", "TensorFlow 1, wrapped tape"]:
            assert told[name] == "no error", name
