"""Runs all reproductions, and writes build/reproductions/report.html.

    python recipes/reproductions/run.py [--quick]

A run is not repeated if its code has not changed.
"""

import argparse

import adasum
import batch_statistics
import double_buffering
import gradient_variance
import half_precision
import lamb
import linear_scaling
import loss_scaling
import mnist
import moving_statistics
import report
import rmsprop_warmup
import study
import unequal_batches
import warmup

STUDIES = (
    gradient_variance.STUDY,
    linear_scaling.STUDY,
    warmup.STUDY,
    mnist.STUDY,
    rmsprop_warmup.STUDY,
    lamb.STUDY,
    adasum.STUDY,
    double_buffering.STUDY,
    batch_statistics.STUDY,
    moving_statistics.STUDY,
    unequal_batches.STUDY,
    half_precision.STUDY,
    loss_scaling.STUDY,
)


def main() -> None:
    """Runs the studies, prints their results and writes the report.

    Raises:
        SystemExit: a criterion does not hold.
    """
    parser = argparse.ArgumentParser(description="Reproduces published claims.")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, and no real ranks"
    )
    flags = parser.parse_args()
    seeds = 1 if flags.quick else study.SEEDS
    results, failed = [], []
    for one in STUDIES:
        result = study.run(one, seeds=seeds, with_ranks=not flags.quick)
        results.append((one, result))
        print(study.as_text(one, result), flush=True)
        if not all(check.holds for check in study.checks_of(one, result)):
            failed.append(one.name)
    file = study.RESULTS / "report.html"
    file.write_text(report.page(results), encoding="utf-8")
    print(f"report: {file}")
    if failed:
        raise SystemExit(f"Studies whose criteria do not hold: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
