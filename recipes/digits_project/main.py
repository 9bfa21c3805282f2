"""One run: settings, data, network, training, and a folder with the results.

tfdistrun -np 2 python main.py batch_size=512
"""

import contextlib
import logging
import os
import sys
import time
from pathlib import Path

import config
import dataset
import keras
import network
import trainer
import yaml

import tfdist

log = logging.getLogger("digits")


def new_folder(runs: Path) -> Path:
    """Creates runs/<time>, and the link runs/latest to it."""
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        folder = runs / time.strftime("%Y-%m-%d_%H-%M-%S")
        with contextlib.suppress(FileExistsError):  # from a run in the same second
            folder.mkdir()
            break
        time.sleep(0.1)
    link = runs / f".latest-{os.getpid()}"
    link.symlink_to(folder.name)
    link.replace(runs / "latest")
    return folder


def start_log(folder: Path) -> None:
    """Logs to screen and file on rank 0; all ranks print warnings."""
    if tfdist.rank() == 0:
        to_file = logging.FileHandler(folder / "log.txt")
        logging.basicConfig(
            level=logging.INFO,
            format="%(asctime)s %(message)s",
            datefmt="%H:%M:%S",
            handlers=[logging.StreamHandler(sys.stdout), to_file],
        )


def main() -> None:
    """Trains the network and reports the results."""
    settings = config.load(sys.argv[1:])
    tfdist.init()
    keras.utils.set_random_seed(settings.seed)
    made = str(new_folder(Path(settings.runs))) if tfdist.rank() == 0 else None
    folder = Path(tfdist.broadcast_object(made))
    start_log(folder)
    if tfdist.rank() == 0:
        config.save(settings, folder / "config.yaml")
    log.info("%s: %s", folder, settings)

    data = dataset.load(settings.test_part, settings.seed)
    model = network.build(
        data.train[0].shape[1:], dataset.CLASSES, settings.width, settings.dropout
    )
    summary = trainer.train(model, data, settings, folder)

    if tfdist.rank() == 0:
        (folder / "summary.yaml").write_text(yaml.safe_dump(summary, sort_keys=False))
    log.info("%s", ", ".join(f"{name} {value}" for name, value in summary.items()))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"main.py: {error}")
