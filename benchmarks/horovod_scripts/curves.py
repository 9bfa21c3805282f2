"""The scripts and their tolerances, the comparison of losses, and its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.text import table

# Kernels of two versions of TensorFlow, and sums over ranks, do the same float32
# operations in different orders. This makes losses differ by 1e-7. A learning rate that
# is off by 1 % makes them differ by 1e-4 to 2e-3, with mixed_precision by 4e-3 (seven
# of the scripts were measured).
FLOAT32 = 1e-5
# Activations and gradients are rounded to 11 bits, 5e-4, in each step.
FLOAT16 = 3e-3
# Batch normalization of TensorFlow 2.15 is accurate to 1e-5 only; in float64, the
# losses agree to 1e-9.
BATCH_NORM = 1e-4

SAME, DIFFERS, FAILED = "same", "differs", "failed"

# The losses of each rank, one for each epoch or step.
Curves = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        name: of the script.
        arguments: of both runs.
        tolerance: for `difference`.
        remark: why there are arguments.
    """

    name: str
    arguments: tuple[str, ...] = ()
    tolerance: float = FLOAT32
    remark: str = ""


_SEEDED = "one seed: Horovod broadcasts after the first step, tfdist before it"
CASES = (
    Case("mnist_fit", ("--seed", "7"), remark=_SEEDED),
    Case("mnist_tape"),
    Case(
        "imagenet_fit",
        ("--seed", "1", "--base-lr", "0.001"),
        BATCH_NORM,
        remark="at the script's rate weights that are 1e-7 off make losses 1e-3 off",
    ),
    Case("gan"),
    Case("embedding"),
    Case("accumulation", ("--seed", "2"), remark=_SEEDED),
    Case("process_sets"),
    Case("mixed_precision", tolerance=FLOAT16, remark="float16 throughout"),
    Case("allgather_metrics"),
    # SGD(lr=0.01) on two ranks.
    Case(
        "keras2_style",
        ("--lr", "0.005"),
        remark="the default rate: Keras 2.11 and later take lr= and ignore it",
    ),
)


def chosen(names: str) -> list[Case]:
    """The cases of a comma-separated list; "all" is every one.

    Raises:
        ValueError: a name is not known.
    """
    known = {case.name: case for case in CASES}
    wanted = list(known) if names == "all" else names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(
            f"Expected scripts of {', '.join(known)}; got {', '.join(unknown)}."
        )
    return [known[name] for name in wanted]


def difference(ours: Curves, theirs: Curves) -> float:
    """The largest difference of two losses, as a share of the largest of them.

    Args:
        ours: losses of each rank with tfdist.
        theirs: as many losses with Horovod.

    Returns:
        The difference; NaN if a loss is not finite, because it hides the others.

    Raises:
        ValueError: the numbers of ranks or losses differ, or there are no losses.
    """
    shapes = [[len(rank) for rank in curves] for curves in (ours, theirs)]
    if shapes[0] != shapes[1] or not sum(shapes[0]):
        raise ValueError(
            f"Expected equal numbers of losses, and not none; got {shapes[0]} with "
            f"tfdist, {shapes[1]} with Horovod."
        )
    pairs = [
        pair
        for one, other in zip(ours, theirs, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return math.nan
    largest = max(abs(loss) for pair in pairs for loss in pair)
    return max(abs(one - other) for one, other in pairs) / (largest or 1.0)


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        case: what was run.
        losses: that were compared.
        difference: the largest; NaN where there is none.
        verdict: SAME, DIFFERS or FAILED.
        reason: why it has failed.
    """

    case: Case
    losses: int
    difference: float
    verdict: str
    reason: str = ""


def compared(case: Case, ours: Curves, theirs: Curves) -> Result:
    """Compares the losses of two runs of a case."""
    try:
        found = difference(ours, theirs)
    except ValueError as error:
        return failed(case, str(error))
    verdict = SAME if found <= case.tolerance else DIFFERS
    return Result(case, sum(map(len, ours)), found, verdict)


def failed(case: Case, reason: str) -> Result:
    """The result of a case whose losses cannot be compared, with the reason."""
    return Result(case, 0, math.nan, FAILED, reason)


def report(results: Sequence[Result]) -> str:
    """The table, then why scripts have failed."""
    head = ["script", "losses", "largest difference", "allowed", "verdict", "remark"]
    rows = [
        [
            result.case.name,
            str(result.losses or "-"),
            f"{result.difference:.1e}" if result.losses else "-",
            f"{result.case.tolerance:.0e}",
            result.verdict,
            result.case.remark,
        ]
        for result in results
    ]
    reasons = [f"{r.case.name}: {r.reason}" for r in results if r.reason]
    return "\n\n".join([table(head, rows), *reasons])
