"""Accuracy of the ImageNet recipe with label smoothing, mixup or image growth.

    python benchmarks/recipe_options.py [--rounds 3] [--epochs 30] [--data FOLDER]

The recipe trains `resnet8` in one process on 1,200 generated images of ten classes
(`recipes/make_tiny_imagenet.py`). Each round trains four variants once: plain, and with
each of the three options alone. The number of the round is the seed.

The table contains for each variant, as means over the rounds:

- validation: the accuracy on 500 other images after the last epoch, with its 95 %
  confidence interval;
- training: the accuracy during the last epoch on the training images, which are
  randomly cropped, and mixed with mixup.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
sys.path[:0] = [str(ROOT), str(RECIPES / "reproductions")]

import study  # noqa: E402

IMAGE_SIZE = 64


class Run(NamedTuple):
    """The results of a run.

    Attributes:
        validation: accuracy after the last epoch, in percent.
        training: accuracy on the training images during the last epoch, in percent.
    """

    validation: float
    training: float


def variants(epochs: int) -> dict[str, list[str]]:
    """Returns the recipe's flags for each variant, by name."""
    third = epochs // 3
    growth = (
        f"0:{IMAGE_SIZE // 2},{third}:{IMAGE_SIZE * 3 // 4},{2 * third}:{IMAGE_SIZE}"
    )
    return {
        "plain": ["--label_smoothing=0"],
        "label smoothing": ["--label_smoothing=0.1"],
        "mixup": ["--label_smoothing=0", "--mixup=0.2"],
        "image growth": ["--label_smoothing=0", f"--image_growth={growth}"],
    }


def prepare(folder: Path) -> None:
    """Generates and prepares the images, unless the folder already contains them."""
    if (folder / "imagenet2012" / "5.1.0").exists():  # absent after an interruption
        return
    tars = folder / "tars"
    sizes = ["--train=1200", "--validation=500", "--size=96"]
    call("make_tiny_imagenet.py", f"--out={tars}", *sizes)
    call("prepare_imagenet.py", f"--manual_dir={tars}", f"--data_dir={folder}")


def call(script: str, *flags: str) -> None:
    """Runs a script in recipes/; prints its output only if it fails."""
    done = subprocess.run(
        [sys.executable, str(RECIPES / script), *flags],
        capture_output=True,
        text=True,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
    )
    if done.returncode != 0:
        raise SystemExit(f"{script} failed:\n{done.stdout}{done.stderr}")


def train(data: Path, folder: Path, epochs: int, seed: int, flags: list[str]) -> Run:
    """Trains one variant with one seed, and returns its results."""
    call(
        "resnet50_imagenet.py",
        f"--data_dir={data}",
        f"--output_dir={folder}",
        "--network=resnet8",
        f"--image_size={IMAGE_SIZE}",
        "--notensorboard",
        "--global_batch=32",
        f"--epochs={epochs}",
        "--preset=cosine_2018",
        "--rate=3.2",
        f"--seed={seed}",
        *flags,
    )
    with (folder / "latest" / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = rows[-1]
    return Run(
        validation=100 * float(last["val_top_1"]),
        training=100 * float(last["top_1"]),
    )


def report(found: dict[str, list[Run]]) -> None:
    """Prints the table for the results of each round, by variant."""
    print(f"{'':16}{'validation, %':>16}{'training, %':>13}")
    for name, runs in found.items():
        accuracy = str(study.interval([one.validation for one in runs]))
        training = statistics.fmean(one.training for one in runs)
        print(f"{name:16}{accuracy:>16}{training:13.1f}")


def main() -> None:
    """Trains all variants in all rounds, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 9))
    parser.add_argument("--epochs", type=int, default=30, help="epochs of a run")
    parser.add_argument(
        "--data", type=Path, help="folder for the prepared data, reused if it exists"
    )
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error("--epochs: expected at least 3, one for each size of the images")
    flags = variants(options.epochs)
    found: dict[str, list[Run]] = {name: [] for name in flags}
    with tempfile.TemporaryDirectory() as temporary:
        data = options.data or Path(temporary) / "data"
        prepare(data)
        for seed in range(1, options.rounds + 1):
            for name in flags:
                folder = Path(temporary) / f"{name.replace(' ', '-')}-{seed}"
                run = train(data, folder, options.epochs, seed, flags[name])
                found[name].append(run)
                print(f"round {seed}, {name}: {run}", file=sys.stderr, flush=True)
    report(found)


if __name__ == "__main__":
    main()
