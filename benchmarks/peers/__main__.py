"""Command line of the benchmarks: measures peers, and reports the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import catalogue, quick, report, rounds
from benchmarks.peers.marks import TOLERANCE
from benchmarks.peers.text import parsed_sizes
from benchmarks.resnet50 import gradient_shapes

WARM_STEPS = 6
BATCH = 32  # of each rank


def _measured(parser: argparse.ArgumentParser, ranks: str, cap_s: float) -> None:
    parser.add_argument("--np", default=ranks, help="numbers of ranks, as in 2,4")
    parser.add_argument("--peers", default="all", help="names, as in tfdist-core,impi")
    parser.add_argument("--rounds", type=int, default=7)
    if cap_s:
        parser.add_argument("--cap", type=float, default=cap_s, help="seconds a case")
    parser.add_argument(
        "--environ",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable for all peers",
    )
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds for a peer in a round"
    )
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="tfdist beside its peers"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sizes = commands.add_parser("sizes", help="one allreduce of each size")
    _measured(sizes, "2,4", 0.5)
    sizes.add_argument("--sizes", default="1K,16K,256K,1M,4M,16M,64M,256M")
    gradients = commands.add_parser(
        "gradients", help="the gradients of ResNet-50 in one step"
    )
    _measured(gradients, "2,4", 2.0)
    training = commands.add_parser("training", help="images a second of two models")
    _measured(training, "2", 0.0)
    training.add_argument("--models", default="cnn,mlp")
    training.add_argument("--steps", type=int, default=30)
    report = commands.add_parser("report", help="tables and marks of --out files")
    report.add_argument("files", type=Path, nargs="+")
    report.add_argument(
        "--tolerance",
        type=_tolerance,
        default=TOLERANCE,
        help="largest deviation of a control; default: 0.2, which is 20 %%",
    )
    commands.add_parser("quick", help="a sample of everything in five minutes")
    commands.add_parser("peers", help="which peers are built")
    return parser


def _tolerance(given: str) -> float:
    value = float(given)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0; 0.2 is 20 %")
    return value


def _pairs(given: list[str]) -> dict[str, str]:
    if wrong := [one for one in given if not one.partition("=")[1]]:
        raise ValueError(f"--environ takes NAME=VALUE, not {wrong[0]!r}")
    return dict(one.split("=", 1) for one in given)


def _task(options: argparse.Namespace) -> dict[str, Any]:
    task: dict[str, Any] = {"task": options.command}
    if options.environ:
        task["environ"] = _pairs(options.environ)
    if options.command == catalogue.TRAINING:
        models = options.models.split(",")
        steps = {"warm": WARM_STEPS, "steps": options.steps, "batch": BATCH}
        return {**task, "models": models, **steps}
    task["cap_s"] = options.cap
    if options.command == catalogue.SIZES:
        return {**task, "sizes": parsed_sizes(options.sizes)}
    return {**task, "shapes": gradient_shapes()}


def _measure(options: argparse.Namespace) -> None:
    task = _task(options)
    present, absent = catalogue.split(catalogue.chosen(options.peers, options.command))
    for name, reason in absent.items():
        print(f"without {name}: {reason}", flush=True)
    plan = rounds.Plan(task, present, options.timeout)
    all_ranks = [int(one) for one in options.np.split(",")]
    rounds.run(plan, all_ranks, options.rounds, options.out)


def main() -> None:
    """Runs one command."""
    parser = _parser()
    options = parser.parse_args()
    try:
        if options.command == "report":
            print(report.text(options.files, options.tolerance))
        elif options.command == "quick":
            print(quick.run(gradient_shapes()))
        elif options.command == "peers":
            for peer in catalogue.PEERS.values():
                print(f"{peer.name:14} {peer.missing() or 'ready'}")
        else:
            _measure(options)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
